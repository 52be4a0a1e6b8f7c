"""WebSocket transport alone: messages come out as they went in, however they were cut, and no more of them than are taken."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection, HttpLimits
from lamina.server.http_server import HttpServer
from lamina.server.turn_budget import SLICE_S, TurnBudget
from lamina.server.websocket import MessageSocket, UnreadWindow
from tests.properties import examples

pytest.importorskip("wsproto")
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, TextMessage

HANDSHAKE = (
    b"GET /chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MESSAGES = st.lists(st.one_of(st.text(max_size=40), st.binary(max_size=300)), min_size=1, max_size=12)


class Transport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_reading = True
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class Echo:
    """A handler that sends each message back; it has dealt with them when it is told so."""

    def __init__(self) -> None:
        self.socket: MessageSocket | None = None
        self.received: list[str | bytes] = []

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        self.socket = socket = exchange.open_socket(request)
        socket.accept(self.on_message, lambda code, reason: None)

    def on_message(self, message: str | bytes) -> None:
        assert self.socket is not None
        self.received.append(message)
        self.socket.send(message)


def connected(handler: Echo, turns: TurnBudget | None = None, **limits: Any) -> tuple[HttpConnection, Transport]:
    server = HttpServer(handler.handle, lambda *_: (b"{}", b"application/json"), HttpLimits(**limits), turns=turns)
    connection, transport = HttpConnection(server), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def answered(client: Connection, written: bytes) -> list[Event]:
    head, _, frames = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    client.receive_data(frames)
    return list(client.events())


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0)


@examples(60)
@given(MESSAGES, st.lists(st.integers(1, 400), min_size=1, max_size=30), st.booleans())
def test_messages_come_out_as_they_went_in_however_they_were_cut(
    messages: list[str | bytes], cuts: list[int], at_once: bool
) -> None:
    async def work() -> list[Event]:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        connection, transport = connected(handler)
        wire = HANDSHAKE
        for message in messages:
            half = len(message) // 2  # two fragments each
            kind: Any = TextMessage if isinstance(message, str) else BytesMessage
            wire += client.send(kind(data=message[:half], message_finished=False)) + client.send(kind(data=message[half:]))
        at = 0
        for cut in [len(wire)] if at_once else [*cuts, len(wire)]:
            connection.data_received(wire[at : at + cut])
            at += cut
        await until(lambda: len(handler.received) == len(messages))
        connection.connection_lost(None)
        return answered(client, bytes(transport.written))

    events = asyncio.run(work())
    assert [event.data for event in events if isinstance(event, TextMessage | BytesMessage)] == messages


def test_a_socket_is_not_read_while_messages_are_outstanding_and_is_read_on_when_they_are_taken() -> None:
    async def work() -> None:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        connection, transport = connected(handler, unread_messages=3)
        connection.data_received(HANDSHAKE + b"".join(client.send(TextMessage(data=str(n))) for n in range(8)))
        assert handler.received == ["0", "1", "2"] and not transport.is_reading
        assert handler.socket is not None
        handler.socket.taken(2)
        await until(lambda: len(handler.received) >= 5)
        assert handler.received == ["0", "1", "2", "3", "4"] and not transport.is_reading
        handler.socket.taken(3)
        await until(lambda: len(handler.received) == 8)
        assert not transport.is_reading
        handler.socket.taken(1)
        await until(lambda: transport.is_reading)
        connection.connection_lost(None)

    asyncio.run(work())


def test_a_flood_of_tiny_frames_is_handled_a_few_in_a_turn_of_the_loop() -> None:
    async def work() -> list[int]:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        connection, _ = connected(handler, unread_messages=10_000)
        connection.data_received(HANDSHAKE + b"".join(client.send(TextMessage(data="x")) for _ in range(1_000)))
        seen = [len(handler.received)]
        while len(handler.received) < 1_000:
            await asyncio.sleep(0)
            seen.append(len(handler.received))
        connection.connection_lost(None)
        return seen

    seen = asyncio.run(work())
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 64


def test_frames_that_take_long_are_handled_within_the_slice_of_their_connection() -> None:
    async def work() -> list[int]:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        clock = itertools.count(0.0, SLICE_S / 3)
        turns = TurnBudget(asyncio.get_running_loop().call_soon, lambda: next(clock))
        connection, _ = connected(handler, turns, unread_messages=10_000)
        connection.data_received(HANDSHAKE + b"".join(client.send(TextMessage(data="x")) for _ in range(50)))
        seen = [len(handler.received)]
        while len(handler.received) < 50:
            await asyncio.sleep(0)
            seen.append(len(handler.received))
        connection.connection_lost(None)
        return seen

    seen = asyncio.run(work())
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 4


def test_memory_of_messages_is_charged_and_given_back() -> None:
    async def work() -> None:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        connection, _ = connected(handler)
        budget = connection.server.budget
        connection.data_received(HANDSHAKE + client.send(BytesMessage(data=bytes(100_000))))
        assert budget.layers()["bodies"] == 100_000  # it has come, and has not been taken
        assert handler.socket is not None
        handler.socket.taken(1)
        assert not budget.layers()["bodies"]
        connection.data_received(client.send(BytesMessage(data=bytes(200_000)))[:50_000])
        assert budget.layers()["bodies"] > 40_000
        connection.connection_lost(None)
        assert budget.used_bytes == 0
        budget.check()

    asyncio.run(work())


def test_both_sides_close_and_then_the_connection_ends() -> None:
    async def work() -> list[Event]:
        handler, client = Echo(), Connection(ConnectionType.CLIENT)
        connection, transport = connected(handler)
        connection.data_received(HANDSHAKE)
        assert handler.socket is not None
        handler.socket.close(4429, "é" * 100)
        events = answered(client, bytes(transport.written))
        assert not transport.is_closed
        connection.data_received(client.send(CloseConnection(code=1000)))
        assert transport.is_closed
        return events

    [closed] = asyncio.run(work())
    assert isinstance(closed, CloseConnection) and closed.code == 4429 and closed.reason == "é" * 61


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=40))
def test_a_window_counts_what_is_outstanding(steps: list[tuple[int, int]]) -> None:
    window, sizes = UnreadWindow(5, 100), list[int]()
    for size, taken in steps:
        window.add(size)
        sizes = [*sizes, size][taken:]
        window.take(taken)
        assert window.size == sum(sizes)
        assert window.is_full == (len(sizes) >= 5 or sum(sizes) >= 100)
