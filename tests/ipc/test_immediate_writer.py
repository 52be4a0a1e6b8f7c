"""Immediate writer: bytes leave at once, in order, and never through a descriptor that was reused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from lamina.ipc.event_loop import ImmediateWriter
from lamina.server.http_server import event_loop_factory

pytestmark = pytest.mark.live


def connected(act: Callable[[ImmediateWriter, asyncio.Transport, socket.socket], Awaitable[None]]) -> None:
    """Runs `act` with an outlet on one end of a connection and a plain socket at the other, on the loop servers use."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(asyncio.Protocol, sock=ours)
        await act(ImmediateWriter(transport), transport, theirs)
        transport.abort()
        theirs.close()

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(main())


def test_what_is_written_is_there_before_the_loop_turns() -> None:
    async def act(outlet: ImmediateWriter, transport: asyncio.Transport, theirs: socket.socket) -> None:
        outlet.write(b"now")
        assert theirs.recv(10, socket.MSG_DONTWAIT) == b"now"

    connected(act)


def test_more_than_the_socket_takes_arrives_whole_and_in_order() -> None:
    pieces = [bytes([number]) * 100_000 for number in range(30)]

    async def act(outlet: ImmediateWriter, transport: asyncio.Transport, theirs: socket.socket) -> None:
        for piece in pieces:
            outlet.write(piece)
        theirs.setblocking(False)
        came = b""
        while len(came) < 3_000_000:
            came += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1 << 20), 60)
        assert came == b"".join(pieces)

    connected(act)


def test_nothing_goes_through_the_number_of_a_connection_that_is_closed() -> None:
    async def act(outlet: ImmediateWriter, transport: asyncio.Transport, theirs: socket.socket) -> None:
        number = transport.get_extra_info("socket").fileno()
        transport.abort()
        await asyncio.sleep(0)
        taken = [socket.socketpair() for _ in range(8)]  # one of them may get the number
        with contextlib.suppress(RuntimeError):  # the transport may object
            outlet.write(b"not for you")
        others = [end for pair in taken for end in pair]
        reached = []
        for end in others:
            with contextlib.suppress(BlockingIOError):
                reached.append(end.recv(10, socket.MSG_DONTWAIT))
        for end in others:
            end.close()
        assert (number >= 0, reached) == (True, [])

    connected(act)
