"""Forms, streams and pages of functions: what they cost the loop, and what a browser makes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lamina import encoding
from lamina.errors import FunctionFailed
from lamina.gateway.routes.codec_pool import MAX_PARTS, PIECE_TEXT_BYTES, is_heavy_piece, is_heavy_request
from lamina.gateway.routes.http_codec import encode_result
from lamina.gateway.routes.sessions import MAX_UNREAD_BYTES, CallSession
from lamina.gateway.routes.streaming import ServerSentEvents, piece_value
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http_server import HttpServer
from lamina.server.memory_budget import MemoryBudget
from tests.attacks.test_memory import Client, serve
from tests.serving import run


def a_form(body: bytes) -> HttpRequest:
    return HttpRequest("POST", b"/", b"", {b"content-type": b"application/x-www-form-urlencoded"}, body, True)


def test_a_form_of_many_escapes_is_taken_apart_elsewhere():
    """Each is split off by itself: four megabytes of them held the loop for 280 ms."""
    assert is_heavy_request(a_form(b"x=" + b"%41" * (MAX_PARTS + 10_000)))
    assert not is_heavy_request(a_form(b"x=" + b"a" * 100_000)) and not is_heavy_request(a_form(b"x=%41"))


def test_a_large_piece_of_a_stream_is_not_made_text_of_on_the_loop():
    lists = encoding.encode([[] for _ in range(PIECE_TEXT_BYTES + 1)])
    assert is_heavy_piece(lists)
    with pytest.raises(FunctionFailed, match="yielded"):
        piece_value(lists)
    for small in ("x" * (PIECE_TEXT_BYTES + 1), bytes(PIECE_TEXT_BYTES + 1), [[]] * 1_000):
        assert piece_value(encoding.encode(small)) == small


def test_a_client_is_told_that_a_piece_was_too_large():
    sent: list[bytes] = []

    class Client:
        is_streaming = True

        def send_chunk(self, piece: bytes) -> None:
            sent.append(piece)

    real: Any = Client()
    ServerSentEvents(real).send_value(encoding.encode([[] for _ in range(PIECE_TEXT_BYTES + 1)]))
    assert sent[0].startswith(b"event: error\ndata: ") and b"yielded" in sent[0]


@pytest.mark.parametrize(
    "kind", ["text/html", " Text/HTML", "image/svg+xml", "application/xhtml+xml", "text/xml", "text/javascript"]
)
def test_whatever_a_function_answers_is_no_page_of_the_server_s_origin(kind: str):
    """A page of the server's origin could use it as the user of the browser: on loopback that is the operator. Scripts of a
    page could be another answer of the function's."""
    blob = encoding.encode(encoding.Response("<script>", content_type=kind, headers={"content-security-policy": "default-src *"}))
    _, _, _, lines = encode_result(blob, b"")
    assert lines.startswith(b"content-security-policy: sandbox allow-scripts; frame-ancestors 'none'\r\n")
    assert b"allow-same-origin" not in lines


def test_what_a_session_returns_counts_like_what_it_yields():
    async def work() -> None:
        budget = MemoryBudget(2**30)
        returned, yielded = CallSession("f", "evil", 10**9, budget), CallSession("f", "evil", 10**9, budget)
        returned.respond(200, b'"' + b"x" * (MAX_UNREAD_BYTES + 1) + b'"')
        assert returned.ended is not None and returned.ended["status"] == 400 and not returned.values
        yielded.respond(200, b'"small"')
        assert yielded.ended == {"status": 200} and budget.layers()["sessions"] == len(b'"small"')

    run(work)


def test_small_pieces_that_a_client_does_not_read_are_few():
    """32 MiB of pieces of 50 bytes are 600,000 buffers, which the loop looks through in every turn: five such clients kept
    others waiting for two seconds."""
    sent = 0

    async def script(port: int, server: HttpServer) -> None:
        async with Client(port) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not server.connections:
                await asyncio.sleep(0)
            while server.connections:
                await asyncio.sleep(0.01)

    def drip(request: HttpRequest, exchange: Exchange) -> None:
        loop, gone = asyncio.get_running_loop(), list[bool]()

        def more() -> None:
            nonlocal sent
            for _ in range(500):
                exchange.send_chunk(bytes(50))
            if exchange.unsent_bytes:  # what comes before is in the buffers of the system
                sent += 500
            if not gone:
                loop.call_soon(more)

        exchange.when_disconnected(lambda: gone.append(True))
        exchange.start_stream(200, b"text/plain")
        more()

    serve(script, drip)
    assert 10_000 < sent < 60_000
