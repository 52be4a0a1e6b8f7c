"""gRPC by hand: what foreign clients never send."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="pip install 'lamina[grpc]'")

from lamina.gateway.bootstrap import Gateway
from lamina.gateway.oip.schema import load_schema
from lamina.server.grpc import _timeout_us
from lamina.server.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame
from lamina.server.http2.hpack import HpackDecoder, encode
from tests.gateway.oip.test_rest import serve
from tests.serving import Browser, hang_up

pytestmark = pytest.mark.live

APP = """
import lamina

app = lamina.App("plain")


@app.function(scale=lamina.Scale(min=1, max=1))
def echo(x):
    return x
"""
INFER = b"/inference.GRPCInferenceService/ModelInfer"


def framed(message: bytes, packed: int = 0) -> bytes:
    return bytes([packed]) + len(message).to_bytes(4, "big") + message


def request() -> bytes:
    message = load_schema()["ModelInferRequest"](model_name="echo", id="7")
    message.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b'{"a": 1}')
    data: bytes = message.SerializeToString()
    return data


async def call(port: int, body: bytes, path: bytes = INFER, kind: bytes = b"application/grpc", **more: bytes) -> dict[bytes, Any]:
    """All headers of the answer, and its data under b""."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-type", kind)]
    headers += [(name.replace("_", "-").encode(), value) for name, value in more.items()]
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, encode(headers)))
    writer.write(frame(DATA, END_STREAM, 1, body))
    found: dict[bytes, Any] = {b"": b""}
    decoder = HpackDecoder(8_192, 100)
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == HEADERS:
            found |= dict(decoder.decode(payload) or [])
        elif head[3] == DATA:
            found[b""] += payload
        if (head[3] in (HEADERS, DATA) and head[4] & END_STREAM) or head[3] == RST_STREAM:
            break
    await hang_up(writer)
    return found


def answers(folder: Path, *asked: dict[str, Any]) -> list[dict[bytes, Any]]:
    async def script(browser: Browser, gateway: Gateway) -> list[dict[bytes, Any]]:
        port = await gateway.oip.open_grpc("127.0.0.1", 0)
        return [await call(port, **one) for one in asked]

    found: list[dict[bytes, Any]] = serve(folder, script, APP)
    return found


def test_a_request_is_answered_plain_or_packed(tmp_path: Path) -> None:
    plain = {"body": framed(request())}
    packed = {"body": framed(gzip.compress(request()), 1), "grpc_encoding": b"gzip"}
    for answer in answers(tmp_path, plain, packed):
        assert (answer[b":status"], answer[b"grpc-status"]) == (b"200", b"0")
        response = load_schema()["ModelInferResponse"].FromString(answer[b""][5:])
        assert (response.id, response.raw_output_contents[0][4:]) == ("7", b'{"a":1}')


HEALTH = b"/grpc.health.v1.Health/Check"


def test_a_health_check_of_grpc_follows_readiness_and_knows_its_services(tmp_path: Path) -> None:
    """The bytes are those of `grpc_health_probe`: the name of a service, and SERVING (1) or NOT_SERVING (2)."""

    async def script(browser: Browser, gateway: Gateway) -> list[dict[bytes, Any]]:
        port = await gateway.oip.open_grpc("127.0.0.1", 0)
        while not gateway.is_ready():
            await asyncio.sleep(0.01)
        named = b"\x0a" + bytes([len(b"inference.GRPCInferenceService")]) + b"inference.GRPCInferenceService"
        found = [await call(port, framed(body), HEALTH) for body in (b"", named, b"\x0a\x04nope")]
        gateway.drain()
        return [*found, await call(port, framed(b""), HEALTH)]

    whole, service, unknown, draining = serve(tmp_path, script, APP)
    assert [answer[b""] for answer in (whole, service, draining)] == [
        framed(b"\x08\x01"),
        framed(b"\x08\x01"),
        framed(b"\x08\x02"),
    ]
    assert unknown[b"grpc-status"] == b"5"


BAD: dict[str, tuple[dict[str, Any], bytes]] = {
    "no such method": ({"body": framed(b""), "path": b"/inference.GRPCInferenceService/Explode"}, b"12"),
    "no such service": ({"body": framed(b""), "path": b"/"}, b"12"),
    "no message": ({"body": b""}, b"3"),
    "half a message": ({"body": framed(request())[:-1]}, b"3"),
    "two messages": ({"body": framed(request()) * 2}, b"3"),
    "no protobuf": ({"body": framed(b"\xff" * 20)}, b"3"),
    "no such model": ({"body": framed(b"")}, b"5"),
    "a message too large": ({"body": b"\x00\xff\xff\xff\xff"}, b"8"),
    "packed in a way we do not know": ({"body": framed(b"x", 1), "grpc_encoding": b"snappy"}, b"12"),
    "a wish that is none here": ({"body": framed(request()), "lamina_deadline_ms": b"50"}, b"3"),
    "a bomb": ({"body": framed(gzip.compress(bytes(40 * 2**20), 1), 1), "grpc_encoding": b"gzip"}, b"8"),
}


def test_what_is_no_request_gets_the_status_that_says_so(tmp_path: Path) -> None:
    found = answers(tmp_path, *(asked for asked, _ in BAD.values()))
    assert {name: answer.get(b"grpc-status") for name, answer in zip(BAD, found, strict=True)} == {
        name: status for name, (_, status) in BAD.items()
    }
    assert all(answer[b"grpc-message"] for answer in found)


def test_what_is_not_grpc_is_told_so(tmp_path: Path) -> None:
    [answer] = answers(tmp_path, {"body": b"{}", "kind": b"application/json"})
    assert answer[b":status"] == b"415"


@pytest.mark.parametrize(
    ("text", "wanted"), [(b"", 0), (b"100m", 100_000), (b"2S", 2_000_000), (b"1H", 3_600_000_000), (b"5n", 1), (b"soon", 0)]
)
def test_time_limits_are_read(text: bytes, wanted: int) -> None:
    assert _timeout_us(text) == wanted
