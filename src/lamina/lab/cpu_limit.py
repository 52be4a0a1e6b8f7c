"""Limit on the CPU time of one cell. A policy that plans for minutes is a finding, not a reason to wait for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CpuLimitExceeded(Exception):
    """The bound was reached."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `CpuLimitExceeded` inside the block after so much processor time. For the main thread of a process, as cells are."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise CpuLimitExceeded(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
