"""HTTP/1 server alone, over real sockets: what it rejects, and that rejecting is cheap."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection, HttpLimits
from lamina.server.http_server import HttpServer
from lamina.server.request_parser import RequestParser
from tests.serving import hang_up

pytestmark = pytest.mark.live

Script = Callable[[int, HttpServer], Coroutine[Any, Any, Any]]


def echo(request: HttpRequest, exchange: Exchange) -> None:
    exchange.respond(200, request.body, b"application/octet-stream", b"x-path: %s\r\n" % request.path)


def problem(status: int, what: str, hint: str = "") -> tuple[bytes, bytes]:
    return json.dumps({"status": status, "title": what}).encode(), b"application/problem+json"


def serve(script: Script, handler: Any = echo, limits: HttpLimits | None = None) -> Any:
    async def main() -> Any:
        server = HttpServer(handler, problem, limits)
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(script(port, server), 60)
        finally:
            await server.stop()

    return asyncio.run(main())


async def talk(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Everything the server says before it hangs up or falls silent for a moment after a whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            return getattr(error, "partial", b"")
        length = int(
            next((line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        )
        return head + (await reader.readexactly(length) if not head.startswith(b"HTTP/1.1 100") else b"")
    finally:
        await hang_up(writer)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def ask(data: bytes, **options: Any) -> int:
    async def script(port: int, _server: HttpServer) -> int:
        return status_of(await talk(port, data))

    return int(serve(script, **options))


POST = b"POST /x HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(("status", "has_length"), [(204, False), (200, True), (404, True)])
def test_only_a_204_says_nothing_of_a_length(status: int, has_length: bool) -> None:
    """RFC 9110 8.6: a server must not send it there."""

    async def script(port: int, _server: HttpServer) -> bytes:
        return await talk(port, POST + b"Content-Length: 0\r\n\r\n")

    said = serve(script, lambda request, exchange: exchange.respond(status))
    assert (b"content-length: 0\r\n" in said) == has_length and said.endswith(b"\r\n\r\n")


def test_a_request_is_echoed() -> None:
    assert ask(POST + b"Content-Length: 3\r\n\r\nabc") == 200


@pytest.mark.parametrize(
    ("why", "data", "status"),
    [
        ("length and chunks together", POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("two lengths", POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        ("the same length twice", POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        ("a negative length", POST + b"Content-Length: -3\r\n\r\nabc", 400),
        ("a length with a sign", POST + b"Content-Length: +3\r\n\r\nabc", 400),
        ("a length of many digits", POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", 400),
        ("four gigabytes declared", POST + b"Content-Length: 4294967296\r\n\r\n", 413),
        ("a strange transfer encoding", POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        ("a chunk size that is none", POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        ("a million headers", POST + b"x: y\r\n" * 1_000_000 + b"\r\n", 431),
        ("one header of 64 KiB", POST + b"x: " + b"y" * 65536 + b"\r\n\r\n", 431),
        ("an endless header", POST + b"x: " + b"y" * 200_000, 431),
        ("an address of 70 KB", b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        ("three megabytes in chunks of one byte", POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 3_000_000, 413),
        ("no host", b"GET / HTTP/1.1\r\n\r\n", 400),
        ("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("a websocket", POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        ("a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400),
        ("bare line feeds in the header", b"POST /x HTTP/1.1\nHost: a\nContent-Length: 0\n\n", 400),
        ("NUL in a header", POST + b"x: a\x00b\r\n\r\n", 400),
        ("a space before the colon", POST + b"Content-Length : 3\r\n\r\nabc", 400),
    ],
)
def test_it_refuses(why: str, data: bytes, status: int) -> None:
    assert ask(data) == status, why


@pytest.mark.parametrize(
    "data",
    [
        POST + b"x: y\r\n" * 100_000,
        POST + b"x: " + b"y" * 2_000_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 500_000,
        b"GET /" + b"y" * 2_000_000,
    ],
    ids=["headers", "header", "chunks", "address"],
)
def test_refusing_costs_little_cpu(data: bytes) -> None:
    """Measured in the server's own callbacks: reading stops at the first excess, whatever the client still wants to send."""
    spent = 0.0

    async def script(port: int, server: HttpServer) -> int:
        nonlocal spent
        from lamina.server import http1

        original = http1.HttpConnection.data_received

        def timed(self: http1.HttpConnection, piece: bytes) -> None:
            nonlocal spent
            begin = time.thread_time()
            original(self, piece)
            spent += time.thread_time() - begin

        http1.HttpConnection.data_received = timed  # type: ignore[method-assign]
        try:
            return status_of(await talk(port, data))
        finally:
            http1.HttpConnection.data_received = original  # type: ignore[method-assign]

    assert serve(script) in (413, 414, 431)
    assert spent < 0.05


def test_a_smuggled_request_is_never_seen() -> None:
    seen: list[bytes] = []

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        seen.append(request.path)
        exchange.respond(200)

    smuggle = b"POST /front HTTP/1.1\r\nHost: a\r\nContent-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert ask(smuggle + b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n", handler=handler) == 400
    assert seen == []


def test_pipelined_requests_are_answered_in_order() -> None:
    held: list[Exchange] = []

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        held.append(exchange)
        if len(held) == 3:
            for number in (2, 0, 1):
                held[number].respond(200, str(number).encode())

    async def script(port: int, _server: HttpServer) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        said = await reader.read()
        await hang_up(writer)
        return said

    bodies = [part[-1:] for part in serve(script, handler).split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"0", b"1", b"2"]


def test_large_bodies_sent_ahead_are_read_one_at_a_time_and_no_client_is_blamed_for_the_wait() -> None:
    held: list[Exchange] = []
    one = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000)

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        if request.method == "GET":
            exchange.respond(200)
        else:
            held.append(exchange)

    async def script(port: int, server: HttpServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(one * 4 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        counts = []
        for number in range(1, 5):
            while len(held) < number:
                await talk(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            for _ in range(5):  # time for more to be read, if it were
                await talk(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            for connection in list(server.connections):
                connection.check_timeouts(server.now_s + 55)
            counts.append(len(held))
            held[-1].respond(200)
        counts.append((await reader.read()).count(b"200 OK"))
        await hang_up(writer)
        return counts

    assert serve(script, handler, HttpLimits(body_idle_s=50, head_s=50)) == [1, 2, 3, 4, 5]


def test_a_connection_that_waits_for_its_next_request_holds_nothing_of_the_last() -> None:
    async def script(port: int, server: HttpServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000))
        await reader.readuntil(b"\r\n\r\n")
        held = [len(connection._parser._body.getvalue()) for connection in server.connections]
        await hang_up(writer)
        return held

    assert serve(script) == [0]


def test_chunked_bodies_are_put_together() -> None:
    async def script(port: int, _server: HttpServer) -> bytes:
        return await talk(port, POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")

    assert serve(script).endswith(b"\r\n\r\nabcdefg")


def test_head_has_no_body_and_expect_is_answered() -> None:
    async def script(port: int, _server: HttpServer) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        head = await reader.read()
        await hang_up(writer)
        return head.count(b"\r\n\r\n"), await talk(port, POST + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n")

    ends, expected = serve(script)
    assert ends == 1
    assert expected.startswith(b"HTTP/1.1 100 Continue")


@pytest.mark.parametrize(
    ("why", "data"), [("half a header", b"POST /x HTTP/1.1\r\nHo"), ("half a body", POST + b"Content-Length: 9\r\n\r\nabc")]
)
def test_a_client_that_is_too_slow_is_told_and_cut_off(why: str, data: bytes) -> None:
    limits = HttpLimits(head_s=0.2, body_idle_s=0.2)
    assert ask(data, limits=limits) == 408, why


KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("announced", "came_before", "came", "waited_s", "is_cut_off"),
    [
        (0, 0, 40, 1, True),
        (0, 0, 32 * KIB, 1, False),
        (0, 31 * MIB, 40, 1, True),
        (0, 31 * MIB, 32 * KIB, 1, True),
        (31 * MIB, 0, 32 * KIB, 1, True),
        (31 * MIB, 0, 4 * MIB, 1, False),
        (31 * MIB, 0, 4 * MIB, 31, True),
    ],
)
def test_a_body_has_a_least_rate_in_every_window_whatever_came_before(
    announced: int, came_before: int, came: int, waited_s: float, is_cut_off: bool
) -> None:
    parser = RequestParser(HttpConnection(HttpServer(echo, problem, HttpLimits())))
    parser._length, parser._body_bytes = announced, came_before
    assert not parser.is_too_slow(29, 1)
    parser.is_too_slow(30, 1)
    parser._body_bytes += came
    assert parser.is_too_slow(60, waited_s) == is_cut_off


def test_too_many_connections_are_turned_away_and_the_others_served() -> None:
    held: list[Exchange] = []

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        held.append(exchange)

    async def script(port: int, _server: HttpServer) -> tuple[list[int], int]:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in idle:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        while len(held) < 4:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turned = status_of(await reader.readuntil(b"\r\n\r\n"))
        for exchange in held:
            exchange.respond(200)
        served = status_of(await idle[0][0].readuntil(b"\r\n\r\n"))
        for _, other in [*idle, (reader, writer)]:
            await hang_up(other)
        return [turned], served

    assert serve(script, handler, HttpLimits(connections=4)) == ([503], 200)


def test_a_client_that_never_reads_is_not_answered_without_end_and_is_cut_off() -> None:
    answered = 0

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        nonlocal answered
        answered += 1
        exchange.respond(200, bytes(2**20))

    async def script(port: int, server: HttpServer) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.read(1)
        for _ in range(500):
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n" % (b"y" * 10_000))
        while server.connections:
            await asyncio.sleep(0.05)
        writer.transport.abort()
        return answered

    assert serve(script, handler, HttpLimits(write_s=0.3)) < 100


def test_a_client_that_leaves_is_noticed_once() -> None:
    gone: list[str] = []

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        exchange.when_disconnected(lambda: gone.append("gone"))

    async def script(port: int, _server: HttpServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await writer.drain()
        await hang_up(writer)
        while not gone:
            await asyncio.sleep(0)

    serve(script, handler)
    assert gone == ["gone"]


@pytest.mark.parametrize("turns", range(8))
def test_a_client_that_comes_while_the_server_stops_is_not_left_waiting(turns: int) -> None:
    """Whatever turn of the loop it is: taken by the system, taken by us, or connected."""

    async def main() -> bytes:
        server = HttpServer(echo, problem)
        port = await server.start("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 60)
        return b""

    assert asyncio.run(main()) == b""


def test_a_handler_that_breaks_costs_one_answer_only() -> None:
    def handler(request: HttpRequest, exchange: Exchange) -> None:
        if request.path == b"/bad":
            raise RuntimeError("secret detail")
        exchange.respond(200, b"fine")

    async def script(port: int, _server: HttpServer) -> tuple[bytes, bytes]:
        bad = await talk(port, b"GET /bad HTTP/1.1\r\nHost: a\r\n\r\n")
        return bad, await talk(port, b"GET /good HTTP/1.1\r\nHost: a\r\n\r\n")

    bad, good = serve(script, handler)
    assert status_of(bad) == 500 and b"secret" not in bad
    assert good.endswith(b"fine")


def test_a_second_answer_is_ignored() -> None:
    def handler(request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(200, b"first")
        exchange.respond(200, b"second")

    async def script(port: int, _server: HttpServer) -> bytes:
        return await talk(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert b"second" not in serve(script, handler)
