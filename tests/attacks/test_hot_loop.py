"""The loop of the gateway: no client waits for the bytes of another. Large bodies are decoded by other processes, or refused."""

from __future__ import annotations

import asyncio
import json
import traceback
from typing import Any

import msgspec
import pytest

from lamina import encoding
from lamina.errors import BadValue, LaminaError
from lamina.gateway.oip import json_codec
from lamina.gateway.oip.grpc_methods import decode_tensors, to_raw_contents
from lamina.gateway.oip.schema import load_schema
from lamina.gateway.routes import calls, codec_pool, http_codec
from lamina.gateway.routes.codec_pool import CodecPool, is_heavy_json, is_heavy_message, is_heavy_request, is_heavy_result
from lamina.sdk.binding import Param
from lamina.server.exchange import HttpRequest
from tests.attacks.gateways import emulated
from tests.serving import Browser, run

X = (Param("x", True),)
LISTS = b"[" + b"[]," * 50_000 + b"[]]"
TEXT = b'"' + b"a" * 3_000_000 + b'"'


def post(body: bytes, kind: bytes = b"application/json") -> HttpRequest:
    return HttpRequest("POST", b"/v1/functions/echo", b"", {b"content-type": kind}, body, True)


@pytest.mark.parametrize(
    ("what", "request_", "heavy"),
    [
        ("a small list", post(b"[1,2,3]"), False),
        ("a long text", post(TEXT), False),
        ("many lists", post(LISTS), True),
        ("many lists as a form", post(LISTS, http_codec.FORM), True),
        ("a very long text", post(b'"' + b"a" * 5_000_000 + b'"'), True),
        ("bytes", post(bytes(5_000_000), b"application/octet-stream"), False),
        ("a value with large bytes", post(encoding.encode({"x": bytes(500_000), "n": 5, "s": "a"}), http_codec.VALUE), False),
        ("a value with many lists", post(encoding.encode({"x": [[]] * 90_000}), http_codec.VALUE), True),
        ("a value that is cut short", post(encoding.encode({"x": bytes(500_000)})[:-1], http_codec.VALUE), True),
        ("a large form", post(bytes(2_000_000), b"multipart/form-data; boundary=b"), True),
    ],
)
def test_what_takes_long_to_decode_is_known_before(what: str, request_: HttpRequest, heavy: bool) -> None:
    assert is_heavy_request(request_) is heavy


def test_what_takes_long_to_encode_is_known_before() -> None:
    assert not is_heavy_result(encoding.encode("a" * 100_000), b"")
    assert not is_heavy_result(encoding.encode(bytes(5_000_000)), b"")
    assert not is_heavy_result(encoding.encode([1] * 100), b"")
    assert is_heavy_result(encoding.encode([1] * 100_000), b"application/json")
    assert not is_heavy_result(encoding.encode([1] * 100_000), http_codec.VALUE)


def outcome(work: Any) -> Any:
    """What a job came to."""

    async def all_of_it() -> Any:
        pool = CodecPool()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work(pool, done.set_result)
        try:
            return await asyncio.wait_for(done, 60)
        finally:
            await pool.stop()

    return asyncio.run(all_of_it())


def test_a_call_decoded_apart_is_as_if_decoded_here() -> None:
    found = outcome(lambda pool, then: pool.decode_call(post(LISTS), X, then))
    assert found == http_codec.decode_inputs(post(LISTS), X)


def test_an_error_from_there_is_the_error_it_would_be_here() -> None:
    broken = post(LISTS[:-1])
    found = outcome(lambda pool, then: pool.decode_call(broken, X, then))
    with pytest.raises(BadValue) as here:
        http_codec.decode_inputs(broken, X)
    assert type(found) is BadValue and found.message == here.value.message


def test_a_result_encoded_apart_is_as_if_encoded_here() -> None:
    blob = encoding.encode([1.5] * 50_000)
    found = outcome(lambda pool, then: pool.encode_result(blob, b"", then))
    made = (int(found["status"]), found["body"], found["kind"], found["extra"])
    assert made == http_codec.encode_result(blob, b"")


def test_json_tensors_made_binary_mean_the_same() -> None:
    body = json.dumps(
        {
            "id": "7",
            "inputs": [
                {"name": "x", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
                {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "bc"]},
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    binary, size = json_codec.to_binary(body, b"")
    before, after = json_codec.decode_request(body, b""), json_codec.decode_request(binary, b"%d" % size)
    assert [(one.name, one.dtype, one.shape, bytes(one.data)) for one in after.inputs] == [
        (one.name, one.dtype, one.shape, bytes(one.data)) for one in before.inputs
    ]
    assert (after.id, after.requested_outputs, after.binary_outputs) == ("7", ["y"], frozenset({"y"}))


def test_typed_grpc_tensors_made_raw_mean_the_same() -> None:
    kind = load_schema()["ModelInferRequest"]
    message = kind(model_name="m", id="7")
    message.inputs.add(name="x", datatype="INT64", shape=[50_000]).contents.int64_contents.extend(range(50_000))
    raw = kind(model_name="m", raw_input_contents=[bytes(500_000)])
    raw.inputs.add(name="x", datatype="UINT8", shape=[500_000])
    assert is_heavy_message(message.SerializeToString()) and not is_heavy_message(raw.SerializeToString())
    again = kind.FromString(to_raw_contents(message.SerializeToString()))
    assert [bytes(one.data) for one in decode_tensors(again)] == [bytes(one.data) for one in decode_tensors(message)]
    assert (again.model_name, again.id) == ("m", "7") and not is_heavy_message(again.SerializeToString())


def test_a_job_that_takes_too_long_is_ended_and_the_next_one_is_done() -> None:
    async def work() -> None:
        pool = CodecPool(processes=1, job_limit_s=0.05)
        found: list[Any] = []
        both = asyncio.Event()

        def then(result: Any) -> None:
            found.append(result)
            if len(found) == 2:
                both.set()

        pool.encode_result(encoding.encode([[]] * 3_000_000), b"", then)
        pool.encode_result(encoding.encode([[]] * 3_000_000), b"", then)
        await asyncio.wait_for(both.wait(), 60)
        assert all(isinstance(one, LaminaError) and one.status == 413 for one in found)
        await pool.stop()

    asyncio.run(work())


def test_more_large_bodies_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_pool, "MAX_WAITING", 2)

    async def work() -> list[Any]:
        pool, found = CodecPool(processes=0), []
        for _ in range(3):
            pool.decode_call(post(LISTS), X, found.append)
        await pool.stop()
        return found

    assert [one.status for one in asyncio.run(work())] == [503, 503, 503]


def test_a_large_call_and_a_large_run_are_served(tmp_path: Any) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            assert (await browser.ask("POST", "/v1/functions/echo", LISTS)).status == 200
            assert (await browser.ask("POST", "/v1/functions/echo", LISTS[:-1])).status == 400
            started = await browser.ask("POST", "/v1/functions/echo", LISTS, Prefer="respond-async")
            assert started.status == 202
            answer = await browser.ask("GET", f"/v1/runs/{started.json['id']}/result?wait_ms=20000")
            assert answer.status == 200

    run(work)


def test_a_large_body_in_one_piece_is_taken_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            handler, driver = gateway.router.call_handler, gateway.driver
            real = driver.submit
            monkeypatch.setattr(driver, "submit", lambda *arguments: (turns.append(_turn()), real(*arguments)))
            decode = calls.decode_inputs
            monkeypatch.setattr(calls, "decode_inputs", lambda *arguments: (turns.append(_turn()), decode(*arguments))[1])
            assert handler is not None
            answer = await browser.ask("POST", "/v1/functions/echo", bytes(5_000_000), "application/octet-stream")
            assert answer.status == 200
            assert len(turns) == 2 and "call_soon" not in turns[0]

    def _turn() -> str:
        """The function at the bottom of this turn of the loop."""
        frames = traceback.extract_stack()
        names = [frame.name for frame in frames]
        assert "data_received" not in names, "it was read in this turn"
        return ",".join(names)

    run(work)


def test_a_value_of_state_that_cannot_fit_is_not_decoded() -> None:
    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            assert (await browser.ask("PUT", "/v1/state/k?app=attacked", LISTS * 10)).status == 400

    run(work)


def test_json_is_heavy_by_its_parts_and_not_by_its_size_alone() -> None:
    assert is_heavy_json(LISTS) and not is_heavy_json(TEXT) and not is_heavy_json(LISTS[:60_000])
    assert msgspec.json.decode(LISTS)[0] == []
