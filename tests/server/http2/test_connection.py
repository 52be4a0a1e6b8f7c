"""HTTP/2 connection frame by frame: what a client may do, and what it may not cost us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamina.server.http2.connection import Http2Connection, Http2Limits
from lamina.server.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from lamina.server.http2.hpack import encode
from lamina.server.http2.stream import Http2Stream
from lamina.server.turn_budget import TurnBudget

HEAD = encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")])
TAIL = encode([(b"grpc-status", b"0")])


class Pipe:
    """A transport that remembers what went into it."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_closed = self.is_aborted = False
        self.unread = 0

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what was sent since the last time."""
        found, at = [], 0
        while at < len(self.sent):
            size = int.from_bytes(self.sent[at : at + 3], "big")
            stream = int.from_bytes(self.sent[at + 5 : at + 9], "big")
            found.append((self.sent[at + 3], self.sent[at + 4], stream, bytes(self.sent[at + 9 : at + 9 + size])))
            at += 9 + size
        self.sent.clear()
        return found


class Request:
    """A receiver that remembers."""

    def __init__(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> None:
        self.stream, self.headers = stream, headers
        self.body = b""
        self.is_whole = self.is_gone = False

    def on_data(self, piece: bytes) -> bool:
        self.body += piece
        return True

    def on_end(self) -> None:
        self.is_whole = True

    def on_reset(self) -> None:
        self.is_gone = True


class Talk:
    def __init__(self, limits: Http2Limits | None = None) -> None:
        self.requests: list[Request] = []
        self.pipe = Pipe()
        self.now_s = 0.0
        self.connection = self.opened(limits or Http2Limits())
        self.say(PREFACE + frame(SETTINGS, 0, 0))
        self.pipe.frames()

    def opened(self, limits: Http2Limits) -> Http2Connection:
        """A connection on a clock that stands still: frames take no time, and nuisances do not refill."""
        budget = TurnBudget(lambda turn: None, lambda: self.now_s)
        connection = Http2Connection(self._taken, limits, set(), 1.0, budget)
        connection.connection_made(self.pipe)  # type: ignore[arg-type]
        return connection

    def _taken(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> Request:
        self.requests.append(Request(stream, headers))
        return self.requests[-1]

    def say(self, data: bytes) -> None:
        self.connection.data_received(data)

    def ask(self, number: int = 1, body: bytes = b"body") -> Request:
        self.say(frame(HEADERS, END_HEADERS, number, HEAD) + frame(DATA, END_STREAM, number, body))
        return self.requests[-1]

    @property
    def error(self) -> int:
        """The code of the GOAWAY that ended it."""
        away = [payload for kind, _, _, payload in self.pipe.frames() if kind == GOAWAY]
        assert away and self.pipe.is_closed, "it goes on"
        return int.from_bytes(away[0][4:8], "big")


def kinds(frames: list[tuple[int, int, int, bytes]]) -> list[int]:
    return [kind for kind, *_ in frames]


def test_a_request_is_taken_and_answered() -> None:
    talk = Talk()
    request = talk.ask()
    assert (request.body, request.is_whole, request.headers[b":path"]) == (b"body", True, b"/x")
    request.stream.begin(HEAD)
    request.stream.end(b"answer", TAIL)
    assert [(kind, flags) for kind, flags, *_ in talk.pipe.frames()] == [(HEADERS, 4), (DATA, 0), (HEADERS, 5)]
    assert not talk.connection.streams


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_bytes_may_come_in_any_pieces(size: int) -> None:
    talk = Talk()
    data = frame(HEADERS, END_HEADERS, 1, HEAD) + frame(DATA, END_STREAM, 1, b"body" * 20)
    for at in range(0, len(data), size):
        talk.say(data[at : at + size])
    assert talk.requests[0].body == b"body" * 20 and talk.requests[0].is_whole


def test_headers_may_go_on_in_further_frames_and_have_padding_and_priority() -> None:
    talk = Talk()
    padded = b"\x03" + bytes(5) + HEAD[:4] + bytes(3)
    talk.say(frame(HEADERS, END_STREAM | PADDED | 0x20, 1, padded) + frame(CONTINUATION, END_HEADERS, 1, HEAD[4:]))
    assert talk.requests[0].is_whole


def test_an_answer_waits_for_the_windows_of_its_client() -> None:
    talk = Talk()
    talk.say(frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x05"))  # five bytes for each stream
    talk.pipe.frames()
    request = talk.ask()
    request.stream.begin(HEAD)
    request.stream.end(b"0123456789", TAIL)
    first = talk.pipe.frames()
    talk.say(frame(WINDOW_UPDATE, 0, 1, (100).to_bytes(4, "big")))
    second = talk.pipe.frames()
    assert ([p for k, _, _, p in first if k == DATA], [p for k, _, _, p in second if k == DATA]) == ([b"01234"], [b"56789"])
    assert kinds(second) == [DATA, HEADERS]


def test_the_window_of_the_connection_counts_too() -> None:
    talk = Talk()
    for number in (1, 3):
        stream = talk.ask(number).stream
        stream.begin(HEAD)
        stream.end(bytes(60_000), TAIL)
    assert sum(len(payload) for kind, _, _, payload in talk.pipe.frames() if kind == DATA) == 65_535
    talk.say(frame(WINDOW_UPDATE, 0, 0, (60_000).to_bytes(4, "big")))
    assert sum(len(payload) for kind, _, _, payload in talk.pipe.frames() if kind == DATA) == 120_000 - 65_535


def test_large_answers_go_out_in_frames_the_client_takes() -> None:
    talk = Talk()
    stream = talk.ask().stream
    stream.begin(HEAD)
    stream.end(bytes(40_000), TAIL)
    assert max(len(payload) for *_, payload in talk.pipe.frames()) == 16_384


def test_pings_and_settings_are_acknowledged() -> None:
    talk = Talk()
    talk.say(frame(PING, 0, 0, b"12345678") + frame(SETTINGS, 0, 0))
    assert talk.pipe.frames() == [(PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]


def test_a_reset_tells_the_receiver_once() -> None:
    talk = Talk()
    request = talk.ask()
    talk.say(frame(RST_STREAM, 0, 1, bytes(4)))
    request.stream.end(b"late", TAIL)
    assert request.is_gone and talk.pipe.frames() == []


def test_a_lost_connection_tells_all_receivers() -> None:
    talk = Talk()
    requests = [talk.ask(number) for number in (1, 3, 5)]
    talk.connection.connection_lost(None)
    assert all(request.is_gone for request in requests)


def test_on_the_way_out_requests_under_way_are_answered_and_new_ones_refused() -> None:
    talk = Talk()
    request = talk.ask()
    talk.connection.go_away()
    talk.say(frame(HEADERS, END_HEADERS | END_STREAM, 3, HEAD))
    request.stream.begin(HEAD)
    request.stream.end(b"", TAIL)
    assert kinds(talk.pipe.frames()) == [GOAWAY, RST_STREAM, HEADERS, HEADERS] and talk.pipe.is_closed


# ---------------------------------------------------------------------- hostility

BROKEN: dict[str, bytes] = {
    "data before headers": frame(DATA, 0, 1, b"x"),
    "an even stream": frame(HEADERS, END_HEADERS, 2, HEAD),
    "a stream that was": frame(HEADERS, END_HEADERS, 3, HEAD) + frame(HEADERS, END_HEADERS, 1, HEAD),
    "headers cut in two": frame(HEADERS, 0, 1, HEAD) + frame(DATA, 0, 1, b"x"),
    "nothing to go on with": frame(CONTINUATION, END_HEADERS, 1, HEAD),
    "a push": frame(PUSH_PROMISE, 0, 1, HEAD),
    "a frame too large": (2**20).to_bytes(3, "big") + bytes(6),
    "a short ping": frame(PING, 0, 0, b"1"),
    "odd settings": frame(SETTINGS, 0, 0, b"12345"),
    "settings of a stream": frame(SETTINGS, 0, 1, b""),
    "an empty window": frame(WINDOW_UPDATE, 0, 0, bytes(4)),
    "a window too large": frame(WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4, "big")),
    "padding longer than the frame": frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + HEAD),
    "a reset of nothing": frame(RST_STREAM, 0, 9, bytes(4)),
    "no headers": frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
    "a window setting too large": frame(SETTINGS, 0, 0, b"\x00\x04\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_client_that_breaks_the_rules_is_sent_away(name: str) -> None:
    talk = Talk()
    talk.say(BROKEN[name])
    assert talk.error


def test_a_client_that_speaks_something_else_is_sent_away() -> None:
    talk = Talk()
    talk.connection = talk.opened(Http2Limits())
    talk.say(b"GET / HTTP/1.1\r\n")
    assert talk.pipe.is_closed


FLOODS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda number: frame(PING, 0, 0, bytes(8)),
    "settings": lambda number: frame(SETTINGS, 0, 0),
    "priorities": lambda number: frame(PRIORITY, 0, 1, bytes(5)),
    "resets": lambda number: frame(HEADERS, END_HEADERS, 2 * number + 1, HEAD) + frame(RST_STREAM, 0, 2 * number + 1, bytes(4)),
    "empty data": lambda number: frame(HEADERS, END_HEADERS, 1, HEAD) if not number else frame(DATA, 0, 1),
    "headers that go on": lambda number: frame(HEADERS, 0, 1, HEAD) if not number else frame(CONTINUATION, 0, 1),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_that_cost_the_client_nothing_ends(name: str) -> None:
    talk = Talk(Http2Limits(abusive_frames=100))
    for number in range(200):
        talk.say(FLOODS[name](number))
    assert talk.error == 11  # ENHANCE_YOUR_CALM


def test_headers_that_go_on_too_long_end_the_connection() -> None:
    talk = Talk()
    talk.say(frame(HEADERS, 0, 1, HEAD) + frame(CONTINUATION, 0, 1, bytes(17_000)))
    assert talk.error == 11


def test_headers_too_large_refuse_the_request_alone() -> None:
    talk = Talk()
    talk.say(frame(HEADERS, END_HEADERS | END_STREAM, 1, encode([(b"x", bytes(9_000))])))
    assert kinds(talk.pipe.frames()) == [RST_STREAM]
    assert talk.ask(3).is_whole


def test_more_streams_than_allowed_are_refused_one_by_one() -> None:
    talk = Talk(Http2Limits(streams=2))
    for number in (1, 3, 5):
        talk.say(frame(HEADERS, END_HEADERS, number, HEAD))
    assert [(kind, stream) for kind, _, stream, _ in talk.pipe.frames()] == [(RST_STREAM, 5)]


def test_a_request_larger_than_its_window_is_reset() -> None:
    talk = Talk(Http2Limits(stream_window=100))
    talk.say(frame(HEADERS, END_HEADERS, 1, HEAD) + frame(DATA, 0, 1, bytes(101)))
    assert kinds(talk.pipe.frames()) == [RST_STREAM] and talk.requests[0].is_gone


def test_what_is_held_for_all_streams_is_bounded_by_the_connections_window() -> None:
    talk = Talk(Http2Limits(connection_window=100_000, stream_window=90_000))
    for number in (1, 3):
        talk.say(frame(HEADERS, END_HEADERS, number, HEAD) + frame(DATA, 0, number, bytes(60_000)))
    assert talk.error == 3  # FLOW_CONTROL_ERROR


def test_the_window_is_given_back_when_requests_are_whole() -> None:
    talk = Talk(Http2Limits(connection_window=100_000))
    for number in range(1, 21, 2):
        talk.ask(number, bytes(30_000))
    assert sum(int.from_bytes(p, "big") for kind, _, s, p in talk.pipe.frames() if kind == WINDOW_UPDATE and not s) >= 225_000


def test_a_client_that_stops_in_the_middle_of_a_request_is_reset() -> None:
    talk = Talk()
    talk.say(frame(HEADERS, END_HEADERS, 1, HEAD))
    talk.connection.check_timeouts(20.0)
    assert not talk.pipe.frames()
    talk.connection.check_timeouts(40.0)
    assert kinds(talk.pipe.frames()) == [RST_STREAM]


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    talk = Talk()
    talk.connection.pause_writing()
    talk.connection.check_timeouts(20.0)
    assert not talk.pipe.is_aborted
    talk.connection.check_timeouts(40.0)
    assert talk.pipe.is_aborted


def test_pieces_that_are_not_read_are_not_kept_without_end() -> None:
    talk = Talk(Http2Limits(unread_bytes=1_000))
    request: Any = talk.ask()
    request.stream.begin(HEAD)
    for _ in range(100):
        request.stream.send(bytes(2_000))
    assert request.stream.is_closed and request.is_gone


def test_small_pieces_that_are_not_read_are_few() -> None:
    """Of 50 bytes each, 32 MiB were 670,000 objects."""
    talk = Talk()
    request: Any = talk.ask()
    request.stream.begin(HEAD)
    sent = 0
    while not request.stream.is_closed:
        request.stream.send(bytes(50))
        sent += 1
    assert 30_000 < sent < 35_000 and request.is_gone


def dripped(talk: Talk, piece: bytes, seconds: int, then: Callable[[Http2Stream], None] = lambda stream: None) -> bool:
    """A piece of a request each second. Is it still there?"""
    talk.say(frame(HEADERS, END_HEADERS, 1, HEAD))
    stream = talk.requests[0].stream
    for second in range(seconds):
        talk.connection.check_timeouts(2.0 + second)
        if stream.is_closed:
            return False
        talk.say(frame(DATA, 0, 1, piece))
        then(stream)
    return True


@pytest.mark.parametrize(("piece", "stays"), [(b"x", False), (b"x" * 600, True)])
def test_a_request_that_drips_is_not_held_for_ever(piece: bytes, stays: bool) -> None:
    talk = Talk()
    assert dripped(talk, piece, 60) is stays
    assert talk.requests[0].is_gone is not stays


def test_a_stream_of_small_messages_is_no_drip() -> None:
    assert dripped(Talk(), b"x", 60, Http2Stream.restart_timer)


def lasts_s(data: bytes, per_s: int, greeted: bool = True) -> int:
    """How long a client may go on that sends so many bytes of this each second; 60: as long as it likes."""
    talk = Talk()
    if not greeted:
        talk.connection = talk.opened(Http2Limits())
    for second in range(60):
        talk.connection.check_timeouts(1.0 + second)
        if talk.pipe.is_closed:
            return second
        talk.say(data[second * per_s : (second + 1) * per_s])
    return 60


_HEADERS = frame(HEADERS, END_HEADERS, 1, HEAD + encode([(b"x", b"y" * 100)]))
_BLOCK = frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 100
DRIPS: dict[str, tuple[bytes, int, bool, int]] = {
    "the greeting": (PREFACE, 1, False, 11),
    "nothing at all": (b"", 1, False, 11),
    "a frame of headers": (_HEADERS, 1, True, 11),
    "headers that go on and on": (_BLOCK, 9, True, 11),
    "a frame of data": (frame(HEADERS, END_HEADERS, 1, HEAD) + frame(DATA, 0, 1, bytes(10_000)), 60, True, 35),
    "a frame of data that comes fast enough": (
        frame(HEADERS, END_HEADERS, 1, HEAD) + frame(DATA, 0, 1, bytes(99_000)),
        600,
        True,
        60,
    ),
    "nothing, once it has said who it is": (b"", 1, True, 60),
    "whole frames, one at a time": (frame(PING, 0, 0, bytes(8)) * 99, 17, True, 60),
}


@pytest.mark.parametrize("what", DRIPS)
def test_what_comes_in_drops_and_belongs_to_no_request_yet_is_not_waited_for_either(what: str) -> None:
    data, per_s, greeted, most_s = DRIPS[what]
    assert lasts_s(data, per_s, greeted) <= most_s
    assert most_s < 60 or lasts_s(data, per_s, greeted) == 60


def test_a_large_frame_that_comes_slowly_but_fast_enough_is_no_drip() -> None:
    talk = Talk()
    talk.say(frame(HEADERS, END_HEADERS, 1, HEAD))
    whole = frame(DATA, END_STREAM, 1, bytes(200_000))
    for second in range(len(whole) // 2_000 + 1):
        talk.connection.check_timeouts(2.0 + second)
        talk.say(whole[second * 2_000 : (second + 1) * 2_000])
    assert talk.requests[0].is_whole and not talk.requests[0].is_gone
