"""Output tags: a worker tags what functions print with the calls they serve, and the log pipe takes the tag off.

Only where output is collected: elsewhere workers print to where the server does, and nothing is in between.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from typing import TextIO

from lamina.sdk.context import context

_MARK = "\x1f"
_MOST_CHARS = 1_000
"""Of the ids in a mark: a line of a large batch names the first of its calls."""


class TaggedStream(io.TextIOBase):
    """Stream that tags lines printed while a batch runs with its function and calls; whole lines at a time."""

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                mark = _tag()
                self._real.write("".join(f"{mark}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._real.flush()

    def fileno(self) -> int:
        return self._real.fileno()

    def isatty(self) -> bool:
        return False

    def finish(self) -> None:
        """End the last line, which need not have an end of its own."""
        if self._rest:
            self.write("\n")


def tag_output() -> None:
    """Tag stdout and stderr of this process from now on: also of loggers that are set up later."""
    for name in ("stdout", "stderr"):
        if (real := getattr(sys, name)) is not None:
            with contextlib.suppress(AttributeError):
                real.reconfigure(line_buffering=True)
            setattr(sys, name, TaggedStream(real))


def show_logging(level: str) -> None:
    """Print what functions log, from this level on, where their code sets up no logging of its own: that stays in force."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.lastResort = handler
    logging.getLogger().setLevel(level)


def finish_tagged_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TaggedStream):
            stream.finish()


def split_tag(line: str) -> tuple[str, tuple[str, ...], str]:
    """Function, calls and text of a line; the first two empty if it has no tag."""
    parts = line.split(_MARK, 3)
    if len(parts) != 4 or parts[0]:
        return "", (), line
    return parts[1], tuple(one for one in parts[2].split(",") if one), parts[3]


def _tag() -> str:
    here = context()
    ids = ",".join(here.call_ids)
    if len(ids) > _MOST_CHARS:
        ids = ids[: ids.rfind(",", 0, _MOST_CHARS)]
    return f"{_MARK}{here.function}{_MARK}{ids}{_MARK}" if here.function else ""
