"""Frame link: one end of a connection between a leader and an agent, on the event loop.

It knows frames and nothing of what they mean. What is sent leaves at once. A peer that speaks nonsense, does not introduce
itself in time, or does not read what it is sent, is disconnected; so a link holds a bounded number of bytes whatever the other
side does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

from msgspec import Struct

from lamina.ipc.event_loop import ImmediateWriter
from lamina.ipc.framing import FrameError, FrameReader, pack
from lamina.server.listener import UNKNOWN_USER, peer_user
from lamina.server.origins import is_loopback

log = logging.getLogger("lamina")

HANDSHAKE_S = 5.0
"""From the connection to the end of the handshake."""

STRANGER_BYTES = 1 << 20
"""What a peer may send before it has shown that it knows the token: a hello with all that an agent has loaded."""

UNREAD_BYTES = 256 * 2**20
"""What may wait to be sent to a peer that does not read: then it is not there any more."""


class FrameLink(asyncio.Protocol):
    """One connection. `on_frame` gets every frame; `on_closed` is called once, with why, when it has ended on either side."""

    def __init__(
        self,
        reader: FrameReader[Any],
        on_open: Callable[[FrameLink], None],
        on_frame: Callable[[FrameLink, Any], None],
        on_closed: Callable[[FrameLink, str], None],
    ) -> None:
        self._reader = reader
        self._on_open, self._on_frame, self._on_closed = on_open, on_frame, on_closed
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._has_ended = False
        self._stranger_bytes: int | None = 0  #: None: it is known
        self.peer = ""
        self.where = ("", 0)  #: address of the other end
        self.user = UNKNOWN_USER  #: that the process at the other end runs as, if it is on this machine

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        reader: FrameReader[Any],
        on_frame: Callable[[FrameLink, Any], None],
        on_closed: Callable[[FrameLink, str], None],
    ) -> FrameLink:
        link = cls(reader, lambda _: None, on_frame, on_closed)
        name = host if tls else None
        await asyncio.get_running_loop().create_connection(lambda: link, host, port, ssl=tls, server_hostname=name)
        return link

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._has_ended

    def trust(self) -> None:
        """The handshake is over: from now on frames may be as large as anywhere."""
        self._stranger_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()

    def send(self, *frames: Struct) -> None:
        """Send frames, or nothing on a link that has ended. Raises `FrameError` for what is too large."""
        wire = pack(*frames)
        transport = self._transport
        if transport is None or self._has_ended:
            return
        self._outlet.write(wire)
        if transport.get_write_buffer_size() > UNREAD_BYTES:
            self.close("it does not read what it is sent")

    def close(self, why: str = "") -> None:
        """Close it now; what has not left by now does not matter any more."""
        if self._transport is not None:
            self._transport.abort()
        self._end(why or "closed")

    def close_after(self, *frames: Struct) -> None:
        """Send some last words, then close."""
        self.send(*frames)
        if self._transport is not None and not self._has_ended:
            self._transport.close()
        self._end("closed")

    # ------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outlet = ImmediateWriter(self._transport)
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        if name:
            self.where = (str(name[0]), int(name[1]))
        self.peer = self.where[0]
        if name and is_loopback(self.peer):
            self.user = peer_user(transport.get_extra_info("sockname")[:2], name[:2])
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.close, "it did not introduce itself in time")
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        if self._stranger_bytes is not None:
            self._stranger_bytes += len(data)
            if self._stranger_bytes > STRANGER_BYTES:
                self.close("it says too much before it has introduced itself")
                return
        try:
            for frame in self._reader.feed(data):
                if self.is_open:  # a frame before it may have ended it
                    self._deliver(frame)
        except FrameError as error:
            log.warning("a connection of %s is closed: %s", self.peer, error)
            self.close(f"not a frame: {error}")

    def _deliver(self, frame: Any) -> None:
        """Hand over a frame. A defect of its receiver is not the peer's, whose other frames count."""
        try:
            self._on_frame(self, frame)
        except FrameError:
            raise
        except Exception:
            log.exception("a frame of %s could not be handled", self.peer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "the other side has closed the connection")

    def _end(self, why: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_closed(self, why)
