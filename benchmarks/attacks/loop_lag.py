"""Hostile bodies of every protocol at a real server: what calls beside them wait.

One client sends the largest body that is taken (31 MiB), made to cost the most to decode, again and again for three seconds;
beside it another calls another function over HTTP/1 a hundred times a second, and its latencies are what counts. The first is a
process of its own at the lowest priority: it is to cost the server time, not to take its core, nor the lock of the process that
measures.

`python -m benchmarks.attacks.loop_lag` writes `results/attacks/loop_lag.json`.
"""

from __future__ import annotations

import gzip
import http.client
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.attacks.floods import MOST_MS, _echo
from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, started, wait_for
from lamina import encoding
from lamina.gateway.oip.schema import load_schema
from lamina.gateway.oip.tensors import join_bytes

RESULTS = Path(__file__).parents[2] / "results" / "attacks" / "loop_lag.json"
SIZE = 31 * 2**20
SECONDS = 3.0

CALL = "/v1/functions/echo"
INFER = "/v2/models/echo/infer"
HEAD_BYTES = 256
BINARY = {"inference-header-content-length": str(HEAD_BYTES)}
VALUE = "application/vnd.lamina.value"


def _filled(first: bytes, piece: bytes, last: bytes) -> bytes:
    return first + piece * ((SIZE - len(first) - len(last)) // len(piece)) + last


def _tensor(piece: bytes) -> bytes:
    count = (SIZE - 200) // len(piece)
    return b'{"inputs":[{"name":"x","datatype":"INT64","shape":[%d],"data":[' % count + (piece * count)[:-1] + b"]}]}"


def _binary_head(dtype: str, size: int, elements: int, *, batched: bool = False, more: str = "") -> bytes:
    """JSON of an inference request whose one tensor follows."""
    shape = f"[{elements},1]" if batched else f"[{elements}]"
    text = f'{{"inputs":[{{"name":"x","datatype":"{dtype}","shape":{shape},"parameters":{{"binary_data_size":{size}}}}}]{more}}}'
    return text.ljust(HEAD_BYTES).encode()


def _texts_of_lists() -> bytes:
    text = _filled(b"[", b"[],", b"[]]")[: -HEAD_BYTES // 3 * 3 - 6] + b"[]]"
    return _binary_head("BYTES", len(text) + 4, 1, batched=True) + join_bytes([text])


def _empty_texts() -> bytes:
    count = SIZE // 4 - HEAD_BYTES
    return _binary_head("BYTES", 4 * count, count) + bytes(4 * count)


def _packed(body: bytes) -> bytes:
    return gzip.compress(body, 1)


Attack = tuple[str, str, Callable[[], bytes], dict[str, str]]
"""Method, path, body, headers."""

JSON = {"content-type": "application/json"}
HTTP: dict[str, Attack] = {
    "JSON, empty lists": ("POST", CALL, lambda: _filled(b"[", b"[],", b"[]]"), JSON),
    "JSON, objects": ("POST", CALL, lambda: _filled(b"[", b'{"a":1},', b"{}]"), JSON),
    "JSON, numbers": ("POST", CALL, lambda: _filled(b"[", b"1,", b"1]"), JSON),
    "JSON, one text": ("POST", CALL, lambda: _filled(b'"', b"a", b'"'), JSON),
    "JSON, cut short": ("POST", CALL, lambda: _filled(b"[", b"[],", b""), JSON),
    "JSON, 60 KiB of lists": ("POST", CALL, lambda: b"[" + b"[]," * 20_000 + b"[]]", JSON),
    "JSON as a form": (
        "POST",
        CALL,
        lambda: _filled(b"[", b"[],", b"[]]"),
        {"content-type": "application/x-www-form-urlencoded"},
    ),
    "encoded value, empty lists": ("POST", CALL, lambda: encoding.encode({"x": [[]] * SIZE})[:SIZE], {"content-type": VALUE}),
    "encoded value, bytes": ("POST", CALL, lambda: encoding.encode({"x": bytes(SIZE - 100)}), {"content-type": VALUE}),
    "multipart, near boundaries": (
        *("POST", CALL),
        lambda: _filled(b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n', b"\r\n--c", b"\r\n--b--\r\n"),
        {"content-type": "multipart/form-data; boundary=b"},
    ),
    "bytes": ("POST", CALL, lambda: bytes(SIZE), {"content-type": "application/octet-stream"}),
    "durable run, empty lists": ("POST", CALL, lambda: _filled(b"[", b"[],", b"[]]"), {**JSON, "prefer": "respond-async"}),
    "durable run, bytes": (
        *("POST", CALL, lambda: bytes(SIZE)),
        {"content-type": "application/octet-stream", "prefer": "respond-async"},
    ),
    "V2 binary, JSON answer": (
        *("POST", "/v2/models/tensor/infer"),
        lambda: _binary_head("UINT8", SIZE - HEAD_BYTES, SIZE - HEAD_BYTES) + bytes(SIZE - HEAD_BYTES),
        BINARY,
    ),
    "V2 binary, binary answer": (
        *("POST", "/v2/models/tensor/infer"),
        lambda: (
            _binary_head(
                *("UINT8", SIZE - HEAD_BYTES, SIZE - HEAD_BYTES),
                more=',"parameters":{"binary_data_output":true}',
            )
            + bytes(SIZE - HEAD_BYTES)
        ),
        BINARY,
    ),
    "V2 binary, empty texts": ("POST", "/v2/models/words/infer", _empty_texts, BINARY),
    "V2 binary, texts of lists": ("POST", INFER, _texts_of_lists, BINARY),
    "V2 JSON, numbers": ("POST", INFER, lambda: _tensor(b"1,"), JSON),
    "V2 JSON, lists": ("POST", INFER, lambda: _tensor(b"[1],"), JSON),
    "V2 gzip, numbers": ("POST", INFER, lambda: _packed(_tensor(b"1,")), {**JSON, "content-encoding": "gzip"}),
    "state, empty lists": ("PUT", "/v1/state/k?app=bench-two", lambda: _filled(b"[", b"[],", b"[]]"), JSON),
}


def _typed_message() -> bytes:
    message = load_schema()["ModelInferRequest"](model_name="echo")
    message.inputs.add(name="x", datatype="INT64", shape=[SIZE - 1_000]).contents.int64_contents.extend([1] * (SIZE - 1_000))
    data: bytes = message.SerializeToString()
    return data


def _many_inputs() -> bytes:
    return b"\x0a\x04echo" + b"\x2a\x00" * (SIZE // 2 - 8)


def _raw_message(model: str, dtype: str, size: int, elements: int) -> bytes:
    message = load_schema()["ModelInferRequest"](model_name=model, raw_input_contents=[bytes(size)])
    message.inputs.add(name="x", datatype=dtype, shape=[elements])
    data: bytes = message.SerializeToString()
    return data


GRPC: dict[str, Callable[[], bytes]] = {
    "gRPC, typed tensor": _typed_message,
    "gRPC, many inputs": _many_inputs,
    "gRPC, raw tensor": lambda: _raw_message("tensor", "UINT8", SIZE - HEAD_BYTES, SIZE - HEAD_BYTES),
    "gRPC, empty texts": lambda: _raw_message("words", "BYTES", SIZE - HEAD_BYTES, (SIZE - HEAD_BYTES) // 4),
}


def _sent(port: int, attack: Attack, body: bytes, seconds: float) -> list[int]:
    method, path, _, headers = attack
    statuses: list[int] = []
    until_s = time.monotonic() + seconds
    while not statuses or time.monotonic() < until_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        connection.close()
    return statuses


def _called(port: int, message: bytes, seconds: float) -> list[int]:
    import grpc  # type: ignore[import-untyped]

    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    found: list[int] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        until_s = time.monotonic() + seconds
        while not found or time.monotonic() < until_s:
            try:
                call(message, timeout=120)
                found.append(0)
            except grpc.RpcError as error:
                found.append(error.code().value[0])
    return found


def _beside(report: Report, name: str, port: int, work: Callable[[], list[int]]) -> None:
    """Latencies while this goes on."""
    answers: Any = multiprocessing.Queue()

    def attack() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        answers.put(work())

    attacker = multiprocessing.get_context("fork").Process(target=attack)
    latencies: list[float] = []
    attacker.start()
    began_s = time.monotonic()
    while attacker.is_alive():
        latencies += _echo(port, 0.2, "quiet")
    found = answers.get(timeout=30)
    latencies.sort()
    report.add(
        f"{name}: p99 beside it",
        latencies[int(0.99 * len(latencies))],
        "ms",
        most=MOST_MS,
        worst_ms=round(latencies[-1], 1),
        calls=len(latencies),
        took_s=round(time.monotonic() - began_s, 1),
        sent=len(found),
        answers=sorted(set(found)),
    )


def campaign(report: Report, seconds: float = SECONDS, only: tuple[str, ...] = ()) -> None:
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "lamina", "serve", str(APPS / "two.py"), "--port", str(port), "--grpc-port", str(grpc_port)]
    with started([*command, "--json", "--store", f"/tmp/lamina-loop-lag-{os.getpid()}.db"]):
        wait_for(f"http://127.0.0.1:{port}/v1/functions/echo", b"1")
        wait_for(f"http://127.0.0.1:{port}/v1/functions/quiet", b"1")
        quiet = sorted(_echo(port, 2.0, "quiet"))
        report.add("nothing beside it: p99", quiet[int(0.99 * len(quiet))], "ms", worst_ms=round(quiet[-1], 1))
        for name, attack in HTTP.items():
            if not only or name in only:
                body = attack[2]()
                _beside(report, name, port, lambda attack=attack, body=body: _sent(port, attack, body, seconds))  # type: ignore[misc]
        for name, make in GRPC.items():
            if not only or name in only:
                message = make()
                _beside(report, name, port, lambda message=message: _called(grpc_port, message, seconds))  # type: ignore[misc]


def main() -> None:
    report = Report()
    campaign(report, only=tuple(sys.argv[1:]))
    if not sys.argv[1:]:
        report.write(RESULTS)
    print(json.dumps({"rows": len(report.rows)}))


if __name__ == "__main__":
    main()
