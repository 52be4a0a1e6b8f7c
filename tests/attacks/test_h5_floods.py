"""H5: work per frame is constant, work per turn of the loop has a budget, and floods are cut off."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamina.gateway.ingress.handlers import IngressGrpcMethods, KnownRoutes
from lamina.gateway.ingress.messages import ResponseEnd
from lamina.gateway.ingress.session import RemoteReply
from lamina.server.grpc import GrpcMethod, GrpcServer, OnDone, RpcContext
from lamina.server.http2.connection import Http2Connection, Http2Limits
from lamina.server.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from lamina.server.http2.hpack import encode
from lamina.server.http2.stream import Http2Stream
from lamina.server.process_status import ProcessStatus
from lamina.server.turn_budget import SLICE_S, TURN_S, TurnBudget
from tests.attacks.test_hot_loop import Link
from tests.server.http2.test_connection import HEAD, TAIL, Pipe, Request, Talk

OPEN = frame(HEADERS, END_HEADERS, 1, HEAD)
MOST = 2_100
"""Frames of a flood before it is cut off: those at once, and as many more as the cost of the cheapest allows."""


def streams(count: int) -> bytes:
    return b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, HEAD) for number in range(count))


def huffman_head(size: int) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD + b"\x00\x01x\xff" + _integer(size - 127) + b"\x1c" * size)


def _integer(rest: int) -> bytes:
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


#: what comes first, and what is repeated
FLOODS: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "window updates of 1, 256 streams open": (streams(256), lambda number: frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01")),
    "window updates of streams": (
        streams(256),
        lambda number: frame(WINDOW_UPDATE, 0, 2 * (number % 256) + 1, b"\x00\x00\x00\x01"),
    ),
    "settings, 256 streams open": (
        streams(256),
        lambda number: frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff" + bytes([number % 256])),
    ),
    "padding-only data": (OPEN, lambda number: frame(DATA, PADDED, 1, b"\xff" + bytes(255))),
    "data in drops": (OPEN, lambda number: frame(DATA, 0, 1, b"x")),
    "data of a stream that was reset": (
        OPEN + frame(RST_STREAM, 0, 1, bytes(4)),
        lambda number: frame(DATA, 0, 1, b"x"),
    ),
    "unknown frames": (b"", lambda number: frame(0x16, 0, 0, b"anything")),
    "pings": (b"", lambda number: frame(PING, 0, 0, bytes(8))),
    "resets": (
        b"",
        lambda number: frame(HEADERS, END_HEADERS, 2 * number + 1, HEAD) + frame(RST_STREAM, 0, 2 * number + 1, bytes(4)),
    ),
    "malformed requests": (b"", lambda number: frame(HEADERS, END_HEADERS, 2 * number + 1, encode([(b"X", b"y")]))),
    "headers that go on": (frame(HEADERS, 0, 1, HEAD), lambda number: frame(CONTINUATION, 0, 1)),
    "large headers": (
        b"",
        lambda number: frame(HEADERS, END_HEADERS, 2 * number + 1, encode([*[(b":method", b"POST")], (b"x", bytes(8_100))])),
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_cut_off(name: str) -> None:
    first, more = FLOODS[name]
    talk = Talk()
    talk.say(first)
    for number in range(MOST):
        talk.say(more(number))
        if talk.pipe.is_closed:
            break
    assert talk.error == (5 if "was reset" in name else ENHANCE_YOUR_CALM)  # a stream that its client has reset is closed


def test_many_settings_in_one_frame_are_too_many() -> None:
    talk = Talk()
    talk.say(streams(256) + frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff\xff" * 43_600))
    assert talk.error == ENHANCE_YOUR_CALM


def test_a_header_block_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()

    def decode(block: bytes) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(talk.connection.decoder, "decode", decode)
    talk.say(huffman_head(120_000))
    assert talk.error == ENHANCE_YOUR_CALM


def test_a_window_update_flushes_no_more_streams_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()
    talk.say(streams(256))
    for request in talk.requests:
        request.stream.begin(HEAD)
        request.stream.end(bytes(1_000), TAIL)  # the connection's window has room for 65 of them
    flushed = []
    real = Http2Stream.flush
    monkeypatch.setattr(Http2Stream, "flush", lambda stream: (flushed.append(stream.id), real(stream)))
    talk.pipe.frames()
    talk.say(frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01"))
    assert len(flushed) == 1
    assert [len(payload) for kind, *_, payload in talk.pipe.frames() if kind == DATA] == [1]


def test_every_response_goes_out_once_there_is_room() -> None:
    talk = Talk()
    talk.say(streams(256))
    for request in talk.requests:
        request.stream.begin(HEAD)
        request.stream.end(bytes(1_000), TAIL)
    talk.say(frame(WINDOW_UPDATE, 0, 0, (1_000_000).to_bytes(4, "big")))
    assert not talk.connection.streams and not talk.connection._blocked


def test_a_client_that_reads_much_may_update_its_windows_often() -> None:
    """Two updates for each KiB of a response, ten thousand times: they have been earned."""
    talk = Talk()
    talk.say(frame(SETTINGS, 0, 0, b"\x00\x04\x7f\xff\xff\xff"))
    for number in range(1, 2_001, 2):
        request = talk.ask(number)
        request.stream.begin(HEAD)
        request.stream.end(bytes(10_240), TAIL)
        for _ in range(10):
            talk.say(frame(WINDOW_UPDATE, 0, 0, (1_024).to_bytes(4, "big")))
    assert not talk.pipe.is_closed


# ------------------------------------------------------------------------------------- turns


class Loop:
    """A loop by hand, and a clock on which each look takes some time."""

    def __init__(self, look_s: float = 50e-6) -> None:
        self.now_s = 0.0
        self.look_s = look_s
        self.soon: list[Callable[[], None]] = []
        self.budget = TurnBudget(self.soon.append, self.clock)
        self.requests: list[Request] = []

    def clock(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def connection(self) -> tuple[Http2Connection, Pipe]:
        pipe = Pipe()
        made = Http2Connection(self._taken, Http2Limits(), set(), 1.0, self.budget)
        made.connection_made(pipe)  # type: ignore[arg-type]
        made.data_received(PREFACE + frame(SETTINGS, 0, 0))
        pipe.frames()
        return made, pipe

    def _taken(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> Request:
        self.requests.append(Request(stream, headers))
        return self.requests[-1]

    def turn(self) -> float:
        """One turn; how long it took."""
        began_s, soon = self.now_s, self.soon[:]
        self.soon.clear()
        for callback in soon:
            callback()
        return self.now_s - began_s


def test_a_read_with_thousands_of_frames_is_handled_in_slices() -> None:
    loop = Loop()
    connection, pipe = loop.connection()
    began_s = loop.now_s
    connection.data_received(frame(PING, 0, 0, bytes(8)) * 900)
    assert loop.now_s - began_s <= SLICE_S + 5 * loop.look_s
    answered = len(pipe.frames())
    assert 0 < answered < 100
    while loop.soon:
        assert loop.turn() <= SLICE_S + 10 * loop.look_s
        answered += len(pipe.frames())
    assert answered == 900


def test_all_connections_share_the_budget_of_a_turn() -> None:
    loop = Loop()
    pairs = [loop.connection() for _ in range(20)]
    loop.turn()
    began_s = loop.now_s
    for connection, _ in pairs:
        connection.data_received(frame(PING, 0, 0, bytes(8)) * 300)
    assert loop.now_s - began_s <= TURN_S + SLICE_S + 20 * 5 * loop.look_s
    turns = 0
    while loop.soon:
        assert loop.turn() <= TURN_S + SLICE_S + 20 * 5 * loop.look_s
        turns += 1
    assert [len(pipe.frames()) for _, pipe in pairs] == [300] * 20
    assert turns > 10


def test_floods_that_slow_each_other_down_are_cut_off_all_the_same() -> None:
    """Each of twenty has fewer pings a second handled than a bucket refills: it would send more if it could."""
    loop = Loop()
    pairs = [loop.connection() for _ in range(20)]
    loop.turn()
    for connection, _ in pairs:
        connection.data_received(frame(PING, 0, 0, bytes(8)) * 1_500)
    while loop.soon:
        loop.turn()
    assert all(pipe.is_closed for _, pipe in pairs)


def test_a_bucket_refills_while_nothing_of_the_connection_waits() -> None:
    loop = Loop(look_s=1e-6)
    connection, pipe = loop.connection()
    for _ in range(5):
        connection.data_received(frame(PING, 0, 0, bytes(8)) * 900)
        while loop.soon:
            loop.turn()
        loop.now_s += 1.0
    assert not pipe.is_closed


def test_frames_keep_their_order_over_slices() -> None:
    loop = Loop()
    connection, _ = loop.connection()
    body = b"".join(frame(DATA, 0, 1, bytes([number]) * 100) for number in range(200))
    connection.data_received(frame(HEADERS, END_HEADERS, 1, HEAD) + body[:9_000])
    connection.data_received(body[9_000:] + frame(DATA, END_STREAM, 1, b"end"))
    while loop.soon:
        loop.turn()
    assert loop.requests[0].body == b"".join(bytes([number]) * 100 for number in range(200)) + b"end"
    assert loop.requests[0].is_whole


# ---------------------------------------------------------------------------------- messages


class Counting:
    """A service that counts its messages. Of every so many that `good` says, one comes to something (0: none does)."""

    def __init__(self, good: int = 1, work: Callable[[], None] = lambda: None) -> None:
        self.methods = {b"/x": GrpcMethod("Stream", bytes, True)}
        self.count = 0
        self.good = good
        self.work = work

    def unary(self, *_: object) -> None: ...

    def stream(self, message: bytes, context: object, then: object, done: OnDone) -> None:
        self.count += 1
        self.work()
        done(failed=not self.good or self.count % self.good > 0)


def grpc_stream(loop: Loop, service: Counting | None = None) -> tuple[Counting, Http2Connection, Pipe]:
    service = service or Counting()
    server = GrpcServer(service, 2**20)  # type: ignore[arg-type]
    pipe = Pipe()
    connection = Http2Connection(server._open, Http2Limits(), set(), 1.0, loop.budget)
    connection.connection_made(pipe)  # type: ignore[arg-type]
    head = encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b"content-type", b"application/grpc")])
    connection.data_received(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head))
    return service, connection, pipe


def test_messages_of_one_frame_are_handled_in_slices() -> None:
    loop = Loop()
    service, connection, _ = grpc_stream(loop)
    loop.turn()
    connection.data_received(frame(DATA, 0, 1, (b"\x00\x00\x00\x00\x01x") * 2_000))
    assert 0 < service.count < 100
    while loop.soon:
        assert loop.turn() <= TURN_S
    assert service.count == 2_000


def test_empty_messages_are_cut_off_early_and_messages_without_end_in_time() -> None:
    for message, most in ((bytes(5), 300), (b"\x00\x00\x00\x00\x01x", 11_000)):
        loop = Loop(look_s=1e-7)
        service, connection, pipe = grpc_stream(loop)
        for _ in range(20):
            connection.data_received(frame(DATA, 0, 1, message * 1_000))
            while loop.soon:
                loop.turn()
            if pipe.is_closed:
                break
        assert pipe.is_closed and service.count <= most


SMALL = b"\x00\x00\x00\x00\x01x"


def test_twenty_streams_of_messages_that_come_to_nothing_are_cut_off_within_a_second() -> None:
    loop = Loop(look_s=1e-7)

    def work() -> None:
        loop.now_s += 75e-6

    streams = [grpc_stream(loop, Counting(good=0, work=work)) for _ in range(20)]
    began_s = loop.now_s
    for _, connection, _ in streams:
        connection.data_received(frame(DATA, 0, 1, SMALL * 2_000))
    while loop.soon and not all(pipe.is_closed for *_, pipe in streams):
        loop.turn()
        assert loop.now_s - began_s < 1.0
    assert all(pipe.is_closed for *_, pipe in streams)


def test_a_stream_of_which_every_other_message_is_answered_goes_on() -> None:
    """Rejections under load are no flood: what is served between them pays for them."""
    loop = Loop()
    service, connection, pipe = grpc_stream(loop, Counting(good=2))
    for _ in range(4):
        connection.data_received(frame(DATA, 0, 1, SMALL * 2_000))
        while loop.soon:
            loop.turn()
    assert service.count == 8_000 and not pipe.is_closed


def test_an_ingress_charges_messages_of_which_the_controller_says_that_they_came_to_nothing() -> None:
    link, found = Link(), []
    link.full_head = lambda request: 0  # type: ignore[method-assign,assignment]
    methods = IngressGrpcMethods(link, KnownRoutes(), ProcessStatus(), None)  # type: ignore[arg-type]

    def done(*, failed: bool = False) -> None:
        found.append(failed)

    unknown = methods.schema["ModelInferRequest"](model_name="x")
    for failed in (True, False):
        methods.stream(unknown, RpcContext({}), lambda message: None, done)
        session = Sent()
        RemoteReply(session, 1, is_streaming=True).end_stream(failed=failed)  # type: ignore[arg-type]
        link.on_message(*session.sent)
    assert found == [True, False]
    assert session.sent == [ResponseEnd(1)]


class Sent:
    """The session of an ingress that keeps what is sent to it."""

    def __init__(self) -> None:
        self.pending: dict[int, object] = {}
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def forget(self, number: int) -> None:
        self.pending.pop(number, None)
