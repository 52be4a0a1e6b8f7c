"""Frames between two processes: those that were read and not taken are not lost, nor waited for."""

from __future__ import annotations

import socket

from lamina.ipc.framing import FrameChannel, pack
from lamina.worker.protocol import CancelStream, to_worker_reader


def test_reading_more_keeps_what_was_not_taken() -> None:
    ours, theirs = socket.socketpair()
    first, second = CancelStream(1), CancelStream(2)
    with ours, theirs:
        channel = FrameChannel(ours, to_worker_reader())
        theirs.sendall(pack(first))
        assert channel.is_readable and channel.read()
        assert not channel.is_readable, "to read again would wait for ever"
        theirs.sendall(pack(second))
        assert channel.is_readable and channel.read()
        assert [channel.next_buffered(), channel.next_buffered(), channel.next_buffered()] == [first, second, None]
