"""Listener: new connections do not wait while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from lamina.server.http_server import event_loop_factory
from lamina.server.listener import listen

pytestmark = pytest.mark.live


class Greeted(asyncio.Protocol):
    def __init__(self, everybody: list[Greeted]) -> None:
        self._everybody = everybody

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._everybody.append(self)
        self.transport = transport


def on_our_loop(work: object) -> object:
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(work)  # type: ignore[arg-type]


def test_all_clients_that_connected_during_one_turn_come_in_within_a_few() -> None:
    async def knock() -> int:
        inside: list[Greeted] = []
        listener = await listen(lambda: Greeted(inside), "127.0.0.1", 0)
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))  # nobody else has a turn meanwhile
            for _ in range(10):
                await asyncio.sleep(0)
            for one in inside:
                one.transport.close()
        listener.close()
        return len(inside)

    assert on_our_loop(knock()) == 100


def test_a_name_is_listened_on_at_all_its_addresses_on_one_port() -> None:
    async def ports() -> set[int]:
        listener = await listen(asyncio.Protocol, "localhost", 0)
        found = {sock.getsockname()[1] for sock in listener.sockets}
        listener.close()
        return found

    assert len(on_our_loop(ports())) == 1  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_said_so() -> None:
    async def twice() -> None:
        first = await listen(asyncio.Protocol, "127.0.0.1", 0)
        try:
            await listen(asyncio.Protocol, "127.0.0.1", first.port)
        finally:
            first.close()

    with pytest.raises(OSError, match="in use"):
        on_our_loop(twice())


def test_after_it_is_closed_no_client_comes_in() -> None:
    async def late() -> None:
        listener = await listen(asyncio.Protocol, "127.0.0.1", 0)
        port = listener.port
        listener.close()
        await asyncio.open_connection("127.0.0.1", port)

    with pytest.raises(ConnectionRefusedError):
        on_our_loop(late())
