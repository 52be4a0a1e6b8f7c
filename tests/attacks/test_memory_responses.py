"""Responses that wait: behind one that is not there yet, or for a client that does not take them. They are counted, refused when
there is no room for them, and given up when nobody takes them."""

from __future__ import annotations

import pytest

from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection
from lamina.server.http2.connection import Http2Connection, Http2Limits
from lamina.server.http2.frames import CANCEL, HEADERS, RST_STREAM, SETTINGS, frame
from lamina.server.http_server import HttpServer
from lamina.server.memory_budget import MemoryBudget, MemoryExhausted
from lamina.server.turn_budget import TurnBudget
from tests.server.http2.test_connection import HEAD, TAIL, Talk
from tests.server.test_request_parser import Turns, Wire

MIB = 2**20
GET = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"


class Pipeline:
    """A connection over HTTP/1.1 whose requests wait until they are answered here."""

    def __init__(self, budget: MemoryBudget, requests: int) -> None:
        self.waiting: list[Exchange] = []
        self.budget, self.wire, turns = budget, AbortableWire(), Turns(0.0)
        server = HttpServer(self._take, lambda *_: (b"{}", b"text/plain"), budget=budget, turns=turns)
        self.connection = HttpConnection(server)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.connection.data_received(GET % b"x" * requests)
        turns.run()

    def _take(self, request: HttpRequest, exchange: Exchange) -> None:
        self.waiting.append(exchange)

    @property
    def held(self) -> int:
        return self.budget.layers().get("responses", 0)


class AbortableWire(Wire):
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.parametrize("size", [8 * MIB, 64 * 2**10])
def test_responses_behind_one_that_is_not_there_yet_take_room_in_the_budget(size: int) -> None:
    """One connection with 64 requests had 64 results kept that nobody counted."""
    pipeline = Pipeline(MemoryBudget(3 * size), 60)
    first, *others = pipeline.waiting
    for exchange in others:
        exchange.respond(200, bytes(size))
    assert size < pipeline.held < 3 * size, "what there is room for, and small refusals"
    first.respond(200, b"")
    assert pipeline.held == 0
    assert (pipeline.wire.said.count(b" 200 "), pipeline.wire.said.count(b" 503 ")) == (3, 57), "each has its answer"


def test_pieces_of_streams_behind_one_that_is_not_there_yet_are_counted_together() -> None:
    pipeline = Pipeline(MemoryBudget(), 60)
    for exchange in pipeline.waiting[1:]:
        exchange.start_stream(200, b"text/plain")
        exchange.send_chunk(bytes(MIB))
    assert pipeline.wire.is_aborted and pipeline.held > 30 * MIB
    pipeline.connection.connection_lost(None)
    assert pipeline.held == 0


def test_a_stream_behind_another_request_is_the_same_when_its_turn_comes() -> None:
    pipeline = Pipeline(MemoryBudget(), 2)
    first, second = pipeline.waiting
    second.start_stream(200, b"text/plain", piece=b"a")
    for piece in (b"bc", b"def"):
        second.send_chunk(piece)
    second.end_stream(b"g")
    assert not pipeline.wire.said
    first.respond(204)
    assert pipeline.wire.said.endswith(b"\r\n\r\n1\r\na\r\n2\r\nbc\r\n3\r\ndef\r\n1\r\ng\r\n0\r\n\r\n")
    assert pipeline.held == 0


# ---------------------------------------------------------------------------------------------- HTTP/2


class Shut(Talk):
    """A client over HTTP/2 that takes nothing: its window is shut."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        super().__init__()
        self.say(frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)))
        self.pipe.frames()

    def opened(self, limits: Http2Limits) -> Http2Connection:
        turns = TurnBudget(lambda turn: None, lambda: self.now_s)
        connection = Http2Connection(self._taken, limits, set(), 1.0, turns, budget=self.budget)
        connection.connection_made(self.pipe)  # type: ignore[arg-type]
        return connection

    def answer(self, number: int, size: int) -> None:
        stream = self.ask(number).stream
        stream.check_response(size)
        stream.begin(HEAD)
        stream.end(bytes(size), TAIL)

    @property
    def held(self) -> int:
        return self.budget.layers().get("responses", 0)


@pytest.mark.parametrize("size", [8 * MIB, 64 * 2**10])
def test_responses_whose_window_is_shut_take_room_in_the_budget(size: int) -> None:
    """256 streams of one connection kept a result each, for as long as the client liked."""
    talk = Shut(MemoryBudget(3 * size))
    for number in (1, 3):
        talk.answer(number, size)
    with pytest.raises(MemoryExhausted):
        talk.answer(5, size)
    assert talk.held == 2 * size
    talk.connection.connection_lost(None)
    assert talk.held == 0
    talk.budget.check()


def test_a_response_that_is_taken_gives_its_room_back_as_it_goes() -> None:
    talk = Shut(MemoryBudget())
    talk.answer(1, 100_000)
    talk.say(frame(SETTINGS, 0, 0, b"\0\4" + (30_000).to_bytes(4, "big")))
    assert talk.held == 70_000
    talk.say(frame(SETTINGS, 0, 0, b"\0\4" + (60_000).to_bytes(4, "big")))
    assert talk.held == 40_000
    talk.say(frame(RST_STREAM, 0, 1, CANCEL.to_bytes(4, "big")))
    assert talk.held == 0


def test_a_response_that_is_not_taken_is_given_up() -> None:
    talk = Shut(MemoryBudget())
    talk.answer(1, MIB)
    for now_s in range(2, 29):
        talk.connection.check_timeouts(float(now_s))
    assert not talk.pipe.frames()[1:] and talk.held == MIB, "it has half a minute"
    talk.connection.check_timeouts(40.0)
    assert [kind for kind, *_ in talk.pipe.frames()] == [RST_STREAM] and talk.held == 0


def test_a_response_that_is_taken_by_the_byte_is_given_up_too() -> None:
    talk = Shut(MemoryBudget())
    talk.answer(1, MIB)
    for now_s in range(2, 70):
        talk.say(frame(8, 0, 1, (1).to_bytes(4, "big")))
        talk.connection.check_timeouts(float(now_s))
    assert talk.held == 0


def test_a_stream_of_pieces_has_its_part_of_the_budget() -> None:
    """Each stream might keep 32 MiB unread, and a connection has 256 of them."""
    talk = Shut(MemoryBudget(20 * MIB))
    for number in range(1, 41, 2):
        stream = talk.ask(number).stream
        stream.begin(HEAD)
        for _ in range(3):
            stream.send(bytes(MIB))
    assert 15 * MIB < talk.held <= 21 * MIB
    assert HEADERS in [kind for kind, *_ in talk.pipe.frames()]
