"""Log pipe: the output of a worker, line by line, forwarded to stderr and to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

from lamina.worker.output_tags import split_tag

_READ_BYTES = 65_536
_LINE_BYTES = 16_384
"""A longer line is cut: whoever prints without an end must not fill our memory."""

OnLine = Callable[[str, tuple[str, ...], str], None]
"""Function and calls, where that is known, and what was printed."""


class LogPipe:
    """A pipe: give `fd` to the child, then call `close_child_end`. It ends by itself when its last writer has gone.

    `on_line` gets every line; with `echo` it also goes to stderr, as it would without a pipe in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_line: OnLine, *, echo: bool = True) -> None:
        self._loop = loop
        self._on_line = on_line
        self._echo = echo
        self._rest = b""
        self._ours, self.fd = os.pipe()
        os.set_blocking(self._ours, False)
        loop.add_reader(self._ours, self._read)

    def close_child_end(self) -> None:
        os.close(self.fd)

    def _read(self) -> None:
        try:
            data = os.read(self._ours, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._deliver(lines)

    def _deliver(self, lines: list[bytes]) -> None:
        found = [split_tag(line[:_LINE_BYTES].decode("utf-8", "replace")) for line in lines]
        if self._echo:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("".join(f"{text}\n" for _, _, text in found))
                sys.stderr.flush()
        for function, calls, text in found:
            self._on_line(function, calls, text)

    def close(self) -> None:
        """Deliver what is still in it, and close."""
        if self._ours < 0:
            return
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        self._ours = -1
        if self._rest:
            self._deliver([self._rest])
            self._rest = b""
