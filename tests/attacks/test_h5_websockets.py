"""H5 over WebSockets: a flood of frames that bring nothing is cut off by the account of HTTP/2; a chatty client never is."""

from __future__ import annotations

import pytest

from lamina.server.turn_budget import SLICE_S
from lamina.server.websocket import POLICY_VIOLATION, TOO_BIG
from tests.server.test_request_parser import Turns
from tests.server.test_websocket import HANDSHAKE, Echo, Transport, connected

pytest.importorskip("wsproto")
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage

CLIENT = Connection(ConnectionType.CLIENT)
PING, PONG = CLIENT.send(Ping(payload=b"")), CLIENT.send(Pong(payload=b""))
MESSAGE = CLIENT.send(TextMessage(data="hello"))
FIRST, FRAGMENT = b"\x01\x80" + bytes(4), b"\x00\x80" + bytes(4)
LAST = b"\x80\x80" + bytes(4)

TOO_LARGE = CLIENT.send(BytesMessage(data=bytes(2_000)))

#: what comes first, and what is repeated
FLOODS = {
    "pings": (b"", PING),
    "pongs": (b"", PONG),
    "empty fragments": (FIRST, FRAGMENT),
    "messages in empty fragments": (b"", FIRST + FRAGMENT * 90 + LAST),
    "tiny fragments": (FIRST, b"\x00\x81" + bytes(4) + b"x"),
    "messages behind our close": (TOO_LARGE, MESSAGE),
}


def closes(transport: Transport) -> list[int]:
    """Codes of the closes that were sent, as a client reads them."""
    client = Connection(ConnectionType.CLIENT)
    client.receive_data(bytes(transport.written).partition(b"\r\n\r\n")[2])
    return [event.code for event in client.events() if isinstance(event, CloseConnection)]


@pytest.mark.parametrize("name", FLOODS)
def test_h5_a_flood_that_brings_nothing_is_cut_off(name: str):
    first, more = FLOODS[name]
    turns, handler = Turns(SLICE_S / 30), Echo()
    connection, transport = connected(handler, turns, unread_messages=10_000, message_bytes=1_000)
    connection.data_received(HANDSHAKE + first)
    turns.run()
    assert not transport.is_closed
    for _ in range(30):
        connection.data_received(more * (100 if len(more) < 100 else 1))
        turns.run()
        if transport.is_closed:
            break
    assert transport.is_closed and closes(transport) == [TOO_BIG if first is TOO_LARGE else POLICY_VIOLATION]


def test_h5_floods_that_slow_each_other_down_are_cut_off():
    """A connection that waits for its slices is not calm."""
    turns = Turns(SLICE_S / 3)
    connection, transport = connected(Echo(), turns)
    connection.data_received(HANDSHAKE)
    connection.data_received(PING * 5_000)
    while turns.soon:
        turns.soon.popleft()()
        turns._now_s += 0.1
    assert transport.is_closed


@pytest.mark.slow
def test_h5_a_chatty_client_is_never_cut_off():
    """A minute of 200 small messages a second, 200 in two fragments, and a ping each second."""
    turns, handler = Turns(0.0), Echo()
    connection, transport = connected(handler, turns, unread_messages=10_000)
    connection.data_received(HANDSHAKE)
    halves = CLIENT.send(BytesMessage(data=b"a", message_finished=False)) + CLIENT.send(BytesMessage(data=b"b"))
    for _ in range(60 * 200):
        connection.data_received(MESSAGE + halves)
        if not len(handler.received) % 400:
            connection.data_received(PING)
        assert handler.socket is not None
        handler.socket.taken(2)
        turns.run()
        turns._now_s += 1 / 200
    assert len(handler.received) == 24_000 and not transport.is_closed
