"""Threats T3 to T6, where a figure is asked for: nothing decodes code, parsers are bounded, tensors are checked first.

What each test stands for, and the figures found, are in docs/explanation/reliability.md.
"""

from __future__ import annotations

import ast
import gzip
import json
import logging
import re
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.bootstrap import open_local
from lamina.core.actions import StartBatch
from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway, GatewayObservers, open_gateway
from lamina.gateway.observability import logs
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.gateway.oip import json_codec
from lamina.server.http1 import HttpLimits
from tests.gateway.oip.test_rest import HOSTILE, ROW
from tests.serving import Answer, Browser, raw, request, run, served, write_app

pytestmark = pytest.mark.live

SOURCE = Path(lamina.__file__).parent
CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
RUNS = {"eval", "exec", "compile", "__import__"}


# --------------------------------------------------------------------------- T3


def _suspects(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in CODE:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUNS:
                yield called.id
            elif (
                isinstance(called, ast.Attribute)
                and called.attr == "load"
                and ast.unparse(called.value) in ("torch", "np", "numpy")
            ):
                yield ast.unparse(called)


def test_nothing_here_can_make_code_of_data() -> None:
    found = {}
    words = re.compile(rf"(?<!\.)\b({'|'.join(CODE | RUNS)})\b|\bload\b")  # a file without any of them cannot
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        if words.search(text) and (names := list(_suspects(ast.parse(text)))):
            found[str(file.relative_to(SOURCE))] = names
    assert found == {}


# --------------------------------------------------------------------------- T4

DEEP = b"[" * 10_000 + b"]" * 10_000
BODIES: dict[str, tuple[bytes, int]] = {
    "JSON 10,000 deep": (DEEP, 400),
    "a number too large": (b"1e999", 400),
    "NaN": (b"NaN", 400),
    "5,000 digits": (b"9" * 5_000, 400),
    "half a surrogate pair": (b'"\\ud800"', 400),
    "NUL in text": (b'"a\x00b"', 400),
    "an escaped NUL": (b'"a\\u0000b"', 200),
    "no UTF-8": (b'"\xff\xfe"', 400),
    "keys repeated 100,000 times": (b"{" + b",".join([b'"k":1'] * 100_000) + b"}", 200),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


def test_strange_bodies_get_the_right_status_for_less_than_fifty_milliseconds_of_a_core(app: Path) -> None:
    """The client's own work and that of everything else in this process is counted too."""

    async def work() -> dict[str, tuple[int, float]]:
        async with served(app) as gateway, Browser(gateway.port) as browser:
            await browser.post("/v1/functions/echo", 1)
            found = {}
            for name, (body, _) in BODIES.items():
                begun = time.process_time()
                answer = await browser.ask("POST", "/v1/functions/echo", body)
                found[name] = (answer.status, 1e3 * (time.process_time() - begun))
            return found

    found = run(work)
    assert {name: status for name, (status, _) in found.items()} == {name: status for name, (_, status) in BODIES.items()}
    assert max(spent_ms for _, spent_ms in found.values()) < 50, found


def test_no_hostile_request_takes_more_than_twice_the_limit_of_a_body_in_memory(app: Path) -> None:
    limit = 12 * 2**20
    zeros = gzip.compress(bytes(4 * limit))
    chunks = (
        b"POST /v1/functions/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 500_000
    )
    boundary = request("POST", "/v1/functions/echo", b"x", f"multipart/form-data; boundary={'b' * 10_000_000}")
    tries = {
        "a byte too large": (request("POST", "/v1/functions/echo", bytes(limit + 1), "image/png"), 413),
        "in chunks of a byte": (chunks, 413),
        "a boundary of 10 MB": (boundary, 431),
        "a bomb of gzip, 1 to 1,000": (request("POST", "/v2/models/echo/infer", zeros, Content_Encoding="gzip"), 413),
        "four gigabytes declared": (b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4294967296\r\n\r\n", 413),
    }

    async def work() -> dict[str, tuple[int, float]]:
        async with served(app, limits=HttpLimits(body_bytes=limit)) as gateway:
            found = {}
            for name, (data, _) in tries.items():
                tracemalloc.start()
                answer = await raw(gateway.port, data)
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                found[name] = (answer.status if answer is not None else 0, peak / limit)
            return found

    found = run(work)
    assert {name: status for name, (status, _) in found.items()} == {name: status for name, (_, status) in tries.items()}
    assert max(times for _, times in found.values()) <= 2, found


# --------------------------------------------------------------------------- T5


def test_the_id_a_failed_call_was_told_is_in_the_log_with_what_happened(app: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> Answer:
        async with served(app, full_errors=False) as gateway, Browser(gateway.port) as browser:
            return await browser.post("/v1/functions/fail", 5)

    with caplog.at_level(logging.WARNING, "lamina"):
        answer = run(work)
    assert answer.status == 500 and "cannot take" not in answer.body.decode()
    (line,) = [record.getMessage() for record in caplog.records if answer.json["id"] in record.getMessage()]
    assert "ValueError: cannot take 5 from /secret/place" in line


MISTAKES = {
    "not JSON": ("POST", "/v1/functions/echo", b"{"),
    "no such function": ("POST", "/v1/functions/ech", b"1"),
    "another method": ("PUT", "/v1/functions/echo", b"1"),
    "no such model": ("GET", "/v2/models/ech", b""),
    "no tensor": ("POST", "/v2/models/echo/infer", b"{}"),
}


def test_the_id_of_every_mistake_is_in_the_log_too(
    app: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_line_limiter", RateLimiter())  # mistakes of other tests have not used it up

    async def work() -> dict[str, str]:
        async with served(app) as gateway, Browser(gateway.port) as browser:
            answers = {name: await browser.ask(*asked) for name, asked in MISTAKES.items()}
            cut = await raw(gateway.port, b"POST /v1/functions/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n")
        assert all(400 <= answer.status < 500 for answer in answers.values())
        ids = {name: answer.headers["lamina-call-id"] for name, answer in answers.items()}
        assert cut is not None
        return ids | {"what cannot be read": cut.json["id"]}

    with caplog.at_level(logging.INFO, "lamina"):
        ids = run(work)
    logged = " ".join(record.getMessage() for record in caplog.records if record.name == "lamina.request")
    assert {name: id in logged for name, id in ids.items()} == dict.fromkeys(ids, True)


def test_strangers_cannot_fill_the_log() -> None:
    few = RateLimiter(per_s=0, burst=10)
    assert [sum(few.try_acquire() for _ in range(1_000)), few.take_suppressed()] == [10, 990]


# --------------------------------------------------------------------------- T6

TENSORS: dict[str, Any] = {
    **HOSTILE,
    "a 1x1 image": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1, 1], "data": [1]}]},
    "an output 100,000 times": {"inputs": [ROW], "outputs": [{"name": "output"}] * 100_000},
    "100,000 inputs": {"inputs": [ROW] * 100_000},
}
MEGABYTES = ("an output 100,000 times", "100,000 inputs")
TRIES = 3


def _binary(numbers: list[float]) -> tuple[bytes, str]:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    return head + struct.pack("<4f", *numbers), str(len(head))


async def _double(tmp_path: Path, watch: Any = None) -> Gateway:
    from tests.gateway.oip.apps import APP

    return await open_gateway(open_local(str(write_app(tmp_path, APP))), observers=GatewayObservers(on_event=watch))


def test_tensors_that_make_no_sense_are_refused_for_five_milliseconds_of_a_core_and_no_worker_hears_it(tmp_path: Path) -> None:
    begun: list[str] = []

    def watch(now_us: int, event: Any, actions: list[Any]) -> None:
        begun.extend(action.function for action in actions if isinstance(action, StartBatch))

    async def work() -> dict[str, tuple[int, float]]:
        gateway = await _double(tmp_path, watch)
        found = {}
        try:
            async with Browser(gateway.port) as browser:
                for name, body in TENSORS.items():
                    data = json.dumps(body).encode()
                    times = []
                    for _ in range(TRIES):
                        asked = time.process_time()
                        answer = await browser.ask("POST", "/v2/models/double/infer", data)
                        times.append(1e3 * (time.process_time() - asked))
                    found[name] = (answer.status, min(times))
        finally:
            await gateway.stop(5)
        return found

    found = run(work)
    assert {status for status, _ in found.values()} == {400}
    for name in MEGABYTES:
        del found[name]  # most of their time is that of sending them
    assert max(spent_ms for _, spent_ms in found.values()) <= 5, found
    assert begun == []


@pytest.mark.parametrize("name", MEGABYTES)
def test_what_comes_in_megabytes_is_refused_for_five_milliseconds_of_a_core_once_it_is_here(name: str) -> None:
    """On a slow core for a quarter of what reading it all takes there."""
    data = json.dumps(TENSORS[name]).encode()
    spent_ms, reading_ms = [], []
    for _ in range(TRIES):
        begun = time.process_time()
        with pytest.raises(BadValue, match=r"inputs: more than|outputs: 2000000 bytes"):
            json_codec.decode_request(data, b"")
        between = time.process_time()
        json.loads(data)
        spent_ms.append(1e3 * (between - begun))
        reading_ms.append(1e3 * (time.process_time() - between))
    assert min(spent_ms) <= max(5, min(reading_ms) / 4)


def test_texts_that_look_like_inputs_are_not_counted_as_such() -> None:
    words = {"name": "x", "datatype": "BYTES", "shape": [2_000], "data": ["datatype"] * 2_000}
    assert len(json_codec.decode_request(json.dumps({"inputs": [words]}).encode(), b"").inputs) == 1


def test_not_a_number_and_infinity_pass_through_bit_by_bit(tmp_path: Path) -> None:
    body, length = _binary([float("nan"), float("inf"), float("-inf"), -0.0])

    async def work() -> bytes:
        gateway = await _double(tmp_path)
        try:
            async with Browser(gateway.port) as browser:
                headers = {"Inference_Header_Content_Length": length}
                answer = await browser.ask("POST", "/v2/models/double/infer", body, "application/octet-stream", **headers)
                return answer.body
        finally:
            await gateway.stop(5)

    answer = run(work)
    assert answer[-16:] == body[-16:], "twice each of them is itself"
