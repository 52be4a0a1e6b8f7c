"""What a worker prints, line by line, and on to where it would have gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

_READ_BYTES = 65_536
_LINE_BYTES = 16_384
"""A longer line is cut: whoever prints without an end must not fill our memory."""


class Tap:
    """A pipe: give `fd` to the child, then call `close_theirs`. It ends by itself when nobody can write to it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_line: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_line = on_line
        self._rest = b""
        self._ours, self.fd = os.pipe()
        os.set_blocking(self._ours, False)
        loop.add_reader(self._ours, self._read)

    def close_theirs(self) -> None:
        os.close(self.fd)

    def _read(self) -> None:
        try:
            data = os.read(self._ours, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(data)
            sys.stderr.flush()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line[:_LINE_BYTES].decode("utf-8", "replace"))
        if len(self._rest) > _LINE_BYTES:
            self._on_line(self._rest[:_LINE_BYTES].decode("utf-8", "replace"))
            self._rest = b""

    def close(self) -> None:
        """Whatever is still in it is read first."""
        if self._ours < 0:
            return
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        self._ours = -1
        if self._rest:
            self._on_line(self._rest.decode("utf-8", "replace"))
            self._rest = b""
