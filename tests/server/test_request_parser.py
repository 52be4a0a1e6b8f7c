"""Request parser: what a client sends means the same, however the network cuts it into pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.gateway.routes.request_options import OWN_HEADERS
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection
from lamina.server.http_server import HttpServer
from lamina.server.request_parser import MAX_NAME_BYTES, MAX_NAMES, HeaderNames
from lamina.server.turn_budget import SLICE_S, TURN_S, TurnBudget

POST = b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
CONTINUE = b"HTTP/1.1 100 Continue"
REQUESTS = (
    POST,
    POST[:-3] + b"xyz",
    b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\nGET / H\r\n\r\nab",
    b"GET /z HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /z HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n",
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n!",
    b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\nLamina-Deadline: 50\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /bye HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
)


class Wire:
    """The other end of a connection: what it was sent."""

    def __init__(self) -> None:
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.said += b"<closed>"

    def is_closing(self) -> bool:
        return self.said.endswith(b"<closed>")

    def abort(self) -> None:
        raise AssertionError("an exception was caught")

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Turns(TurnBudget):
    """Turns of a loop that is run by hand, whose clock goes on by so much with every look."""

    def __init__(self, look_s: float) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        self._now_s, self._look_s = 0.0, look_s
        super().__init__(self.soon.append, self._look)

    def _look(self) -> float:
        self._now_s += self._look_s
        return self._now_s

    def run(self) -> int:
        """Turns until nothing is left to do."""
        count = 0
        while self.soon:
            self.soon.popleft()()
            count += 1
        return count


def server(seen: list[tuple[Any, ...]], turns: Turns) -> HttpServer:
    def handler(request: HttpRequest, exchange: Exchange) -> None:
        seen.append((request.method, request.path, request.query, dict(request.headers), request.body, request.keep_alive))
        exchange.respond(200, request.body)

    return HttpServer(handler, lambda status, what, *hint: (what.encode(), b"text/plain"), None, OWN_HEADERS, turns=turns)


def feed(seen: list[tuple[Any, ...]], pieces: list[bytes], look_s: float = 0.0) -> bytes:
    turns = Turns(look_s)
    connection, wire = HttpConnection(server(seen, turns)), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        connection.data_received(piece)
        turns.run()
    connection.connection_lost(None)
    return b"".join(part for part in wire.said.split(b"\r\n") if not part.startswith(b"date:"))


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6), st.data())
def test_requests_in_pieces_are_seen_and_answered_as_those_that_come_whole(requests: list[bytes], data: st.DataObject):
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    whole: list[tuple[Any, ...]] = []
    cut: list[tuple[Any, ...]] = []
    look_s = data.draw(st.sampled_from([0.0, SLICE_S / 3, 2 * TURN_S]))
    assert feed(cut, pieces, look_s).replace(CONTINUE, b"") == feed(whole, [stream]).replace(CONTINUE, b"")
    assert cut == whole


def test_what_stands_behind_a_body_says_nothing_about_the_request():
    """A proxy that takes headers away, or checks them, does so before the body."""
    seen: list[tuple[Any, ...]] = []
    head = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    feed(seen, [head + b"2\r\nhi\r\n0\r\nAuthorization: Bearer x\r\nContent-Type: text/html\r\nLamina-Priority: 9\r\n\r\n"])
    assert [(one[3], one[4]) for one in seen] == [({b"host": b"a", b"transfer-encoding": b"chunked"}, b"hi")]


def test_a_target_with_a_host_is_a_path_on_that_host():
    """As proxies are sent it: every server takes it (RFC 9112 3.2.2), and its host counts."""
    for target, path, query in [
        (b"http://b.example/x?y=1", b"/x", b"y=1"),
        (b"HTTPS://b.example", b"/", b""),
        (b"http://b.example?y=1", b"/", b"y=1"),
    ]:
        seen: list[tuple[Any, ...]] = []
        feed(seen, [b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % target])
        assert [(one[1], one[2], one[3][b"host"]) for one in seen] == [(path, query, b"b.example")]
    seen = []
    assert b" 400 " in feed(seen, [b"GET http://b.example/x HTTP/1.1\r\n\r\n"]) and not seen


def test_the_number_and_the_length_of_names_kept_are_bounded():
    names = HeaderNames(None)
    for number in range(3 * MAX_NAMES):
        assert names[b"X-%d" % number] == b"x-%d" % number
    assert len(names) <= MAX_NAMES
    assert names[b"X" * (MAX_NAME_BYTES + 1)] == b"x" * (MAX_NAME_BYTES + 1)
    assert b"X" * (MAX_NAME_BYTES + 1) not in names


def test_a_header_of_our_own_that_there_is_not_is_no_name():
    names = HeaderNames(OWN_HEADERS)
    assert names[b"Lamina-Deadline"] == b""
    assert names[b"Lamina-Deadline-Ms"] == b"lamina-deadline-ms"
