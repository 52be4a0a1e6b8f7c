"""Head cache: requests with a known head are not parsed again, and clients cannot tell."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.actions import Reject
from lamina.gateway.routes.rejection_cache import CachedRejection
from lamina.server.exchange import Exchange
from lamina.server.http1 import HttpConnection, HttpServer
from lamina.server.request import MAX_HEAD_BYTES, MAX_HEADS, HeadCache, HttpRequest

POST = b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
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


class Forgetful(HeadCache):
    def read(self, data: bytes) -> HttpRequest | None:
        return None


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

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def server(seen: list[tuple[Any, ...]]) -> HttpServer:
    def handler(request: HttpRequest, exchange: Exchange) -> None:
        seen.append((request.method, request.path, request.query, dict(request.headers), request.body, request.keep_alive))
        exchange.respond(200, request.body)

    return HttpServer(handler, lambda status, what, *hint: (what.encode(), b"text/plain"))


def feed(to: HttpServer, pieces: list[bytes]) -> bytes:
    connection, wire = HttpConnection(to), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    return b"".join(part for part in wire.said.split(b"\r\n") if not part.startswith(b"date:"))


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6), st.data())
def test_a_server_that_knows_the_heads_sees_and_says_what_one_that_does_not_would(requests: list[bytes], data: st.DataObject):
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    fresh: list[tuple[Any, ...]] = []
    plain = server(fresh)
    plain.heads = Forgetful()
    knowing: list[tuple[Any, ...]] = []
    experienced = server(knowing)
    for request in REQUESTS:
        feed(experienced, [request])
    knowing.clear()
    assert feed(experienced, pieces) == feed(plain, pieces)
    assert knowing == fresh


def heads_with(data: bytes) -> HeadCache:
    heads = HeadCache()
    request = HttpRequest("POST", b"/x", b"y=1", {b"host": b"a", b"content-length": b"3"}, b"abc", True)
    heads.store(data, request)
    return heads


def test_a_known_head_with_another_body_of_the_same_size_is_read_at_once():
    found = heads_with(POST).lookup(POST[:-3] + b"xyz")
    assert found is not None
    assert (found.path, found.query, found.body) == (b"/x", b"y=1", b"xyz")


def test_a_known_head_with_more_or_less_behind_it_goes_to_the_parser():
    heads = heads_with(POST)
    assert heads.lookup(POST[:-1]) is None
    assert heads.lookup(POST + b"G") is None


def test_the_number_and_the_length_of_heads_kept_are_bounded():
    heads = HeadCache()
    for number in range(3 * MAX_HEADS):
        heads.store(b"GET /%d HTTP/1.1\r\n\r\n" % number, HttpRequest("GET", b"/%d" % number, b"", {}, b"", True))
    assert len(heads._known) <= MAX_HEADS
    long = b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n"
    heads.store(long, HttpRequest("GET", long[4:-13], b"", {}, b"", True))
    assert heads.lookup(long) is None


def test_a_refusal_given_again_differs_in_its_id_only():
    said: list[bytes] = []

    class Client:
        def respond(self, status: int, body: bytes, kind: bytes, extra: bytes) -> None:
            said.append(b"%d %s %s" % (status, body, extra))

    closed = CachedRejection(1, 10, Reject("first", "deadline", retry_after_us=2_000_000, offer_us=5_000))
    for name in ("call-1", "call-2"):
        closed.respond(Client(), name)  # type: ignore[arg-type]
    assert b"call-1" in said[0] and b'"offer_ms":5.0' in said[0] and b"retry-after: 2" in said[0]
    assert said[1] == said[0].replace(b"call-1", b"call-2")


def test_a_refusal_as_it_travels_is_what_an_exchange_would_send():
    closed = CachedRejection(1, 10, Reject("first", "deadline", retry_after_us=2_000_000, offer_us=5_000))
    to = HttpServer(lambda request, exchange: closed.respond(exchange, "call-100%"), lambda status, what: (b"", b""))
    connection, wire = HttpConnection(to), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert closed.raw_response(b"call-100%", to.date_line) == wire.said


def test_a_shortcut_answers_in_place_of_the_handler_until_it_gives_up():
    seen: list[tuple[Any, ...]] = []
    to = server(seen)
    feed(to, [POST])
    head = to.heads.lookup(POST).head  # type: ignore[union-attr]
    assert head is not None
    answers = [b"one", None]
    head.shortcut = lambda date_line: answers.pop(0)
    seen.clear()
    assert feed(to, [POST]) == b"one"
    assert seen == []
    feed(to, [POST, POST])
    assert len(seen) == 2
