"""H5 over HTTP/1: one read may hold thousands of requests. They are handled a few in a turn of the loop, and none behind those
that wait for their responses."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.server.exchange import Exchange
from lamina.server.http1 import HttpConnection, HttpServer
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
