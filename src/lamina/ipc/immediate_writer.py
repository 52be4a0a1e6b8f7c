"""Immediate writes: bytes that leave at once instead of at the end of the event loop's turn.

uvloop keeps what is written until the end of its turn, when everything that could be read has been dealt with: the first of
sixteen answers waits for the sixteenth, and under overload a rejection for hundreds of others. Where nothing is waiting to be
sent the bytes go straight to the socket instead; what it does not take, and all of a connection with TLS, goes the usual way.
"""

from __future__ import annotations

import asyncio
import os


class ImmediateWriter:
    __slots__ = ("_fd", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd = -1
        about = getattr(transport, "get_extra_info", None)  # what stands for a transport in a test need not know it
        if about is not None and about("ssl_object") is None:
            plain = about("socket")
            self._fd = plain.fileno() if plain is not None else -1

    def write(self, data: bytes | bytearray) -> None:
        transport = self._transport
        if self._fd >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._fd, data)
            except OSError:  # full, or broken: the transport finds out, and knows what to do
                sent = 0
            if sent == len(data):
                return
            transport.write(memoryview(data)[sent:] if isinstance(data, bytes) else data[sent:])  # a large one is not copied
            return
        transport.write(data)
