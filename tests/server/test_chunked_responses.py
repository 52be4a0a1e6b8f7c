"""Streamed responses over real sockets: `Exchange.start_stream`, `send_chunk`, `end_stream`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpLimits
from lamina.server.http_server import HttpServer
from tests.server.test_http1 import serve
from tests.serving import hang_up, request

pytestmark = pytest.mark.live

EVENTS = b"text/event-stream"


def held(exchanges: list[Exchange]) -> Any:
    def handler(request: HttpRequest, exchange: Exchange) -> None:
        exchanges.append(exchange)

    return handler


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


async def asked(port: int, exchanges: list[Exchange], data: bytes, count: int = 1) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await until(lambda: len(exchanges) >= count)
    return reader, writer


async def read_chunks(reader: asyncio.StreamReader) -> list[bytes]:
    chunks = []
    while size := int(await reader.readline(), 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return chunks


def test_a_client_that_does_not_know_chunks_gets_none_and_the_end_of_the_connection() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        exchanges[0].start_stream(200, EVENTS)
        exchanges[0].send_chunk(b"one")
        exchanges[0].end_stream()
        everything: bytes = await reader.read()
        await hang_up(writer)
        return everything

    head, _, body = serve(script, held(exchanges)).partition(b"\r\n\r\n")
    assert body == b"one"
    assert b"connection: close" in head and b"chunked" not in head


def test_pieces_arrive_one_by_one_as_chunks() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> list[bytes]:
        reader, writer = await asked(port, exchanges, request("GET", "/"))
        exchange = exchanges[0]
        exchange.start_stream(200, EVENTS)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head and b"content-length" not in head
        exchange.send_chunk(b"one")
        assert await reader.readexactly(8) == b"3\r\none\r\n"  # before the next is there
        exchange.send_chunk(b"two")
        exchange.end_stream()
        found = await read_chunks(reader)
        await hang_up(writer)
        return found

    assert serve(script, held(exchanges)) == [b"two"]


def test_the_connection_can_be_used_again_after_the_last_piece() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, request("GET", "/"))
        exchanges[0].start_stream(200, EVENTS)
        exchanges[0].end_stream()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(request("GET", "/again"))
        await until(lambda: len(exchanges) == 2)
        exchanges[1].respond(200, b"whole")
        found = await reader.readuntil(b"whole")
        await hang_up(writer)
        return found

    assert serve(script, held(exchanges)).startswith(b"HTTP/1.1 200")


def test_pipelined_answers_wait_for_the_last_piece_of_the_one_before() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, request("GET", "/1") + request("GET", "/2"), count=2)
        exchanges[1].start_stream(200, EVENTS)
        exchanges[1].send_chunk(b"second")
        exchanges[0].start_stream(200, EVENTS)
        exchanges[0].send_chunk(b"first")
        exchanges[1].end_stream()
        exchanges[0].end_stream()
        found = await reader.readuntil(b"second\r\n0\r\n\r\n")
        await hang_up(writer)
        return found

    said = serve(script, held(exchanges))
    assert said.index(b"first\r\n0\r\n\r\n") < said.rindex(b"HTTP/1.1 200") < said.index(b"second")


def test_without_keep_alive_the_end_of_the_connection_is_the_end_of_the_answer() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, request("GET", "/", Connection="close"))
        exchanges[0].start_stream(200, EVENTS)
        exchanges[0].send_chunk(b"one")
        exchanges[0].send_chunk(b"two")
        exchanges[0].end_stream()
        said = await reader.read()
        await hang_up(writer)
        return said

    said = serve(script, held(exchanges))
    assert b"chunked" not in said and said.endswith(b"\r\n\r\nonetwo")


def test_a_client_that_leaves_is_told_of_once_and_pieces_go_nowhere() -> None:
    exchanges: list[Exchange] = []
    gone: list[int] = []

    async def script(port: int, server: HttpServer) -> None:
        _, writer = await asked(port, exchanges, request("GET", "/"))
        exchange = exchanges[0]
        exchange.when_disconnected(lambda: gone.append(1))
        exchange.start_stream(200, EVENTS)
        exchange.send_chunk(b"one")
        await hang_up(writer)
        await until(lambda: gone)
        exchange.send_chunk(b"two")
        exchange.end_stream()

    serve(script, held(exchanges))
    assert gone == [1]


def test_a_head_request_gets_no_pieces() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, request("HEAD", "/"))
        exchanges[0].start_stream(200, EVENTS)
        exchanges[0].send_chunk(b"one")
        exchanges[0].end_stream()
        writer.write(request("GET", "/2"))
        await until(lambda: len(exchanges) == 2)
        exchanges[1].respond(200, b"next")
        said = await reader.readuntil(b"next")
        await hang_up(writer)
        return said

    assert b"one" not in serve(script, held(exchanges))


def test_a_reader_that_takes_nothing_is_cut_off_at_the_limit() -> None:
    exchanges: list[Exchange] = []
    gone: list[int] = []

    async def script(port: int, server: HttpServer) -> int:
        _, writer = await asked(port, exchanges, request("GET", "/"))
        writer.transport.pause_reading()
        exchange = exchanges[0]
        exchange.when_disconnected(lambda: gone.append(1))
        exchange.start_stream(200, EVENTS)
        pieces = 0
        while not gone and pieces < 1_000:
            exchange.send_chunk(bytes(2**18))
            pieces += 1
            await asyncio.sleep(0)
        await hang_up(writer)
        return pieces

    assert serve(script, held(exchanges), HttpLimits(body_bytes=2**21)) < 100


def test_what_follows_the_end_is_ignored() -> None:
    exchanges: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> bytes:
        reader, writer = await asked(port, exchanges, request("GET", "/", Connection="close"))
        exchange = exchanges[0]
        exchange.start_stream(200, EVENTS)
        exchange.end_stream()
        exchange.send_chunk(b"late")
        exchange.respond(500, b"later")
        exchange.start_stream(200, EVENTS)
        said = await reader.read()
        await hang_up(writer)
        return said

    said = serve(script, held(exchanges))
    assert b"late" not in said and said.count(b"HTTP/1.1") == 1
