"""Tracebacks of user code: the frames of an app and its libraries, none of the platform's."""

from __future__ import annotations

import os
import sys
import traceback
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import NamedTuple, TypeVar

import lamina

_HOME = os.path.dirname(os.path.abspath(lamina.__file__)) + os.sep
_STARTERS = ("/asyncio/runners.py", "/asyncio/base_events.py")
MAX_TRACE_CHARS = 20_000
E = TypeVar("E", bound=BaseException)


def is_platform_file(filename: str) -> bool:
    """Whether a file is the platform's, or starts code for it: such frames explain nothing to the author of an app."""
    return filename.startswith((_HOME, "<frozen importlib", "<frozen runpy")) or filename.endswith(_STARTERS)


def user_trace(error: BaseException) -> str:
    """The traceback as text, causes included, in user frames only; bounded, the middle goes first."""
    summary = traceback.TracebackException.from_exception(error)
    _strip(summary)
    text = "".join(summary.format())
    if len(text) > MAX_TRACE_CHARS:
        half = MAX_TRACE_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


def _strip(summary: traceback.TracebackException) -> None:
    summary.stack[:] = [frame for frame in summary.stack if not is_platform_file(frame.filename)]
    for frame in summary.stack:
        _ = frame.line  # read while its file is known
        frame.filename = shown_path(frame.filename)
    for inner in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        if inner is not None:
            _strip(inner)


def shown_path(filename: str) -> str:
    """A file as a reader elsewhere may know it: below the folder it was imported from. Where that lies is the server's own."""
    folders = [folder.rstrip(os.sep) + os.sep for folder in (os.getcwd(), *sys.path) if os.path.isabs(folder)]
    inside = [filename[len(folder) :] for folder in folders if filename.startswith(folder)]
    return min(inside, key=len, default=os.path.basename(filename) if os.path.isabs(filename) else filename)


def user_frames_only(error: E) -> E:
    """The same error, its traceback cut down to user frames, for raising or chaining."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _user_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    return error


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if not is_platform_file(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for one in reversed(frames):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def place_of(error: BaseException) -> str:
    """The last line of user code that the error passed, as in "app.py:12"; "" if it passed none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not is_platform_file(name) and not name.startswith("<"):  # dataclasses write methods that are in no file
            place = f"{os.path.basename(name)}:{line}"
    return place


def message_of(error: BaseException) -> str:
    """Type and message, as in "ValueError: no such label", even if `str()` of the error fails."""
    return "".join(traceback.TracebackException.from_exception(error, limit=0).format_exception_only()).strip()


class SourceLine(NamedTuple):
    """A line of user code that is read, not run: it has no frame, so the frame that reads it stands for it."""

    file: str
    line: int
    reader: FrameType


source_line: ContextVar[SourceLine | None] = ContextVar("lamina_source_line", default=None)
"""The line of an `async def` workflow that is being read here."""


def user_place() -> str:
    """The line of user code that led here, as in "app.py:12"."""
    frame, reading = sys._getframe(1), source_line.get()
    while frame.f_back is not None and is_platform_file(frame.f_code.co_filename):
        if reading is not None and frame is reading.reader:
            return f"{os.path.basename(reading.file)}:{reading.line}"
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
