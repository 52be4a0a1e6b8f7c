from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy
import pytest

import lamina
from lamina.errors import BadValue, DeadlineExceeded, Refused, UnknownTarget, Unreachable

from .scripted_server import DROP, Scripted, Seen, http, ok, problem, serving, silent

pytestmark = pytest.mark.live


def echo(seen: Seen) -> bytes:
    return ok(seen.inputs)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serving(echo) as script:
        yield script


def run(url: str, act: Callable[[lamina.AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with lamina.AsyncClient(url, **{"timeout": "60s", **options}) as client:
            return await act(client)

    return asyncio.run(main())


def test_a_call_sends_its_inputs_and_returns_the_value(server: Scripted):
    assert run(server.url, lambda client: client.call("echo", {"x": 1, "data": b"\x00"})) == {"x": 1, "data": b"\x00"}


def test_large_arrays_travel_both_ways(server: Scripted):
    array = numpy.arange(300_000, dtype=numpy.float64)
    found = run(server.url, lambda client: client.call("echo", {"x": array}))["x"]
    assert (found == array).all()


def test_a_detailed_call_tells_its_latency(server: Scripted):
    server.answer = lambda seen: ok(3, lamina_latency_ms=12.5)
    answer = run(server.url, lambda client: client.call_detailed("f", deadline="20ms", priority=1))
    assert (answer.value, answer.latency_ms) == (3, 12.5)
    assert (server.seen[0].headers["lamina-deadline-ms"], server.seen[0].headers["lamina-priority"]) == ("20", "1")


def test_calls_at_once_have_connections_of_their_own(server: Scripted):
    together = threading.Barrier(8)

    def answer(seen: Seen) -> bytes:
        together.wait(60)
        return echo(seen)

    server.answer = answer
    results = run(server.url, lambda client: asyncio.gather(*(client.call("f", {"x": x}) for x in range(8))))
    assert [result["x"] for result in results] == list(range(8))


def test_more_calls_than_connections_take_turns(server: Scripted):
    results = run(
        server.url,
        lambda client: asyncio.gather(*(client.call("f", {"x": x}) for x in range(20))),
        max_connections=2,
    )
    assert [result["x"] for result in results] == list(range(20))
    assert server.connections == 2


def test_calls_in_a_row_share_a_connection(server: Scripted):
    async def act(client: lamina.AsyncClient) -> None:
        for _ in range(3):
            await client.call("f")

    run(server.url, act)
    assert [(seen.connection, seen.number) for seen in server.seen] == [(1, 1), (1, 2), (1, 3)]


def test_a_server_that_closes_is_connected_to_again(server: Scripted):
    server.answer = lambda seen: ok(1, close=True)

    async def act(client: lamina.AsyncClient) -> list[Any]:
        return [await client.call("f"), await client.call("f")]

    assert run(server.url, act) == [1, 1]


def test_a_kept_connection_that_drops_before_an_answer_is_tried_once_more(server: Scripted):
    server.answer = lambda seen: DROP if (seen.connection, seen.number) == (1, 2) else ok(seen.connection)

    async def act(client: lamina.AsyncClient) -> Any:
        await client.call("f")
        return await client.call("f")

    assert run(server.url, act) == 2


def test_a_new_connection_that_drops_is_not_tried_again(server: Scripted):
    server.answer = lambda seen: DROP
    with pytest.raises(Unreachable, match="without an answer"):
        run(server.url, lambda client: client.call("f"))
    assert len(server.seen) == 1


def test_an_answer_that_breaks_off_is_not_tried_again(server: Scripted):
    def answer(seen: Seen) -> bytes:
        return ok("x" * 100) if seen.number == 1 else ok("x" * 100, connection="close")[:60] + b"\r\nconnection: close"

    server.answer = answer

    async def act(client: lamina.AsyncClient) -> Any:
        await client.call("f")
        return await client.call("f")

    with pytest.raises(Unreachable, match="broke off"):
        run(server.url, act)
    assert len(server.seen) == 2


def test_something_that_is_not_http_is_said_plainly(server: Scripted):
    server.answer = lambda seen: b"SSH-2.0 hello connection: close\r\n\r\n"
    with pytest.raises(Unreachable, match="not HTTP"):
        run(server.url, lambda client: client.call("f"))


def test_a_chunked_answer_is_put_together(server: Scripted):
    server.answer = lambda seen: (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n2\r\n[1\r\n2\r\n,2\r\n1\r\n]\r\n0\r\n\r\n"
    )
    assert run(server.url, lambda client: client.call("f")) == [1, 2]


def test_a_second_response_to_one_request_is_not_taken_for_the_next(server: Scripted):
    server.answer = lambda seen: ok(seen.connection) + ok("more", lamina_call_id="other")

    async def act(client: lamina.AsyncClient) -> Any:
        return (await client.call_detailed("f")).call_id, await client.call("f")

    assert run(server.url, act) == ("", 2)


def test_a_missing_server_is_said_plainly():
    with serving(echo) as script:
        url = script.url
    with pytest.raises(Unreachable, match="no server at"):
        run(url, lambda client: client.call("f"))


def test_a_server_that_says_nothing_runs_into_the_timeout(server: Scripted):
    server.answer = silent
    with pytest.raises(DeadlineExceeded, match="within 50ms"):
        run(server.url, lambda client: client.call("f"), timeout="50ms")


def test_a_cancelled_call_hangs_up(server: Scripted):
    arrived, gone = threading.Event(), threading.Event()

    def answer(seen: Seen) -> bytes:
        arrived.set()
        if seen.gone():
            gone.set()
        return DROP

    server.answer = answer

    async def act(client: lamina.AsyncClient) -> bool:
        task = asyncio.create_task(client.call("f"))
        assert await asyncio.to_thread(arrived.wait, 5)
        task.cancel()
        return await asyncio.to_thread(gone.wait, 5)

    assert run(server.url, act)


def test_problems_are_raised_as_their_errors(server: Scripted):
    server.answer = lambda seen: problem(429, "refused", offer_ms=80)
    with pytest.raises(Refused):
        run(server.url, lambda client: client.call("f"))


def test_a_name_that_is_neither_is_unknown(server: Scripted):
    server.answer = lambda seen: problem(404, "unknown-target")
    with pytest.raises(UnknownTarget):
        run(server.url, lambda client: client.call("f"))


def test_lists_and_health_are_read(server: Scripted):
    server.answer = lambda seen: http(200, f'["{seen.path}"]'.encode(), "application/json")

    async def act(client: lamina.AsyncClient) -> Any:
        return await client.functions(), await client.workflows(), await client.health()

    assert run(server.url, act) == (["/v1/functions"], ["/v1/workflows"], ["/healthz"])


def test_bad_inputs_are_refused_before_anything_is_sent(server: Scripted):
    with pytest.raises(BadValue, match="cannot send"):
        run(server.url, lambda client: client.call("f", {"x": object()}))
    assert server.seen == []


def test_aio_of_a_function_uses_the_server_of_the_environment(server: Scripted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAMINA_URL", server.url)
    app = lamina.App("remote")

    @app.function()
    def square(x): ...

    async def main() -> Any:
        results = await asyncio.gather(square.aio(3), square.aio(x=4))
        await app.async_client().close()
        return results

    assert asyncio.run(main()) == [{"x": 3}, {"x": 4}]


def test_connections_behind_aio_end_with_their_loop(server: Scripted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAMINA_URL", server.url)
    left: list[Any] = []

    @lamina.App("vision").function()
    def square(x: int) -> int:
        return x * x

    async def use() -> None:
        await square.aio(3)
        client = square.app.async_client()
        left.extend(client._pool(client.server)._open)

    asyncio.run(use())
    assert [connection.closed.is_set() for connection in left] == [True]


def test_a_stream_is_asked_of_the_next_server_if_one_is_not_there(server: Scripted):
    """Calls were; streams failed for as long as a client's first server was away."""
    server.answer = lambda seen: DROP if len(server.seen) > 1 else ok(7)

    async def act(client: lamina.AsyncClient) -> list[Any]:
        return [item async for item in client.stream("f")]

    with socket.create_server(("127.0.0.1", 0)) as gone:
        urls = f"http://127.0.0.1:{gone.getsockname()[1]},{server.url}"
    assert run(urls, act) == [7]
    with pytest.raises(Unreachable, match="without an answer"):  # it may have begun there
        run(urls, act)
