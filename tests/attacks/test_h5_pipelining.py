"""H5 over HTTP/1: one read may hold thousands of requests. They are handled a few in a turn of the loop, and none behind those
that wait for their responses."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.server.exchange import Exchange
from lamina.server.http1 import HttpConnection
from lamina.server.http_server import HttpServer
from lamina.server.turn_budget import SLICE_S
from tests.server.test_request_parser import REQUESTS, Turns, Wire, server


@pytest.mark.parametrize("request_", [REQUESTS[0], REQUESTS[3]])
def test_h5_of_many_requests_in_one_read_each_turn_of_the_loop_has_a_few(request_: bytes):
    seen: list[tuple[Any, ...]] = []
    turns = Turns(SLICE_S / 3)
    connection = HttpConnection(server(seen, turns))
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.data_received(request_ * 1_000)
    assert 1 <= len(seen) <= 10
    while turns.soon:
        before = len(seen)
        turns.soon.popleft()()
        assert len(seen) - before <= 10
    assert len(seen) == 1_000


def test_h5_requests_behind_those_that_wait_for_their_responses_are_not_begun():
    waiting: list[Exchange] = []
    turns = Turns(0.0)
    to = HttpServer(lambda request, exchange: waiting.append(exchange), lambda *_: (b"", b"text/plain"), turns=turns)
    connection = HttpConnection(to)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.data_received(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n" * 1_000)
    turns.run()
    count = len(waiting)
    assert count <= to.limits.pipelined_requests + 2
    for exchange in waiting[:count]:
        exchange.respond(200, b"")
    turns.run()
    assert count < len(waiting) <= 2 * (to.limits.pipelined_requests + 2)


def talk(look_s: float = 0.0) -> tuple[HttpConnection, Wire, Turns, list[tuple[Any, ...]]]:
    seen: list[tuple[Any, ...]] = []
    turns, wire = Turns(look_s), Wire()
    connection = HttpConnection(server(seen, turns))
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire, turns, seen


def test_h5_empty_lines_are_read_in_slices_and_no_more_of_them_than_a_head_may_have():
    connection, wire, turns, _ = talk(SLICE_S / 3)
    connection.data_received(b"\r\n" * 100_000)
    assert len(connection._unparsed) > 190_000, "a slice has a few of them"
    turns.run()
    assert b" 400 " in wire.said and wire.is_closing()


def test_h5_a_few_empty_lines_before_a_request_are_passed_over():
    connection, _, turns, seen = talk(SLICE_S / 3)
    connection.data_received(b"\r\n" * 500 + REQUESTS[0] + b"\r\n" * 500 + REQUESTS[0])
    turns.run()
    assert len(seen) == 2


CHUNKED = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_h5_an_extension_of_a_chunk_has_an_end():
    connection, wire, _, _ = talk()
    connection.data_received(CHUNKED + b"1;")
    for _ in range(100):
        connection.data_received(b"a" * 1_000)
    assert b" 413 " in wire.said


def test_h5_chunks_may_have_signatures():
    connection, _, turns, seen = talk()
    connection.data_received(CHUNKED)
    for _ in range(1_000):
        connection.data_received(b"100;chunk-signature=" + b"0" * 64 + b"\r\n" + b"x" * 256 + b"\r\n")
    connection.data_received(b"0\r\n\r\n")
    turns.run()
    assert [len(request[4]) for request in seen] == [256_000]
