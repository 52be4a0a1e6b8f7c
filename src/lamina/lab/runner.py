"""Runner of cells on all cores. A cell that fails becomes a row that says so, and the others go on.

Processes are spawned, never forked, and get a name and a JSON text: a row depends on its cell and on nothing that
happened before it. If a process dies outright, its pool is lost with all that was under way; those cells are then run
one at a time, so that only the one at fault is blamed.

A cell may be limited in CPU time: a policy that plans for minutes is a finding, not a reason to wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from lamina.lab import experiment
from lamina.lab.experiment import Cell, Row
from lamina.worker.main import die_with_parent

FRAMES = 6  #: of a traceback that are kept, the innermost


def run_cells(name: str, cells: dict[int, Cell], jobs: int) -> Iterator[tuple[int, Row]]:
    """(place of the cell, its row), as they finish."""
    if not cells:
        return
    orphans: list[int] = []
    with _pool(min(jobs, len(cells))) as pool:
        futures: dict[Future[bytes], int] = {}
        for place, cell in cells.items():
            try:
                futures[pool.submit(run_cell, name, msgspec.json.encode(cell))] = place
            except BrokenProcessPool:
                orphans.append(place)
        for future in as_completed(futures):
            place = futures[future]
            try:
                yield place, msgspec.json.decode(future.result())
            except BrokenProcessPool:
                orphans.append(place)
    for place in sorted(orphans):
        yield place, _in_process(name, cells[place])


def run_cell(name: str, text: bytes) -> bytes:
    """One cell to one row, both as JSON: what a row cannot be written as, fails here and not in the file."""
    cell = msgspec.json.decode(text)
    try:
        row = experiment.load(name).run(dict(cell))
        return msgspec.json.encode({**row, **cell})
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        trace = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
        return msgspec.json.encode({**cell, "error": f"{type(error).__name__}: {error}", "trace": trace})


def cores() -> int:
    """How many processes can run at once here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_process(name: str, cell: Cell) -> Row:
    with _pool(1) as pool:
        try:
            row: Row = msgspec.json.decode(pool.submit(run_cell, name, msgspec.json.encode(cell)).result())
            return row
        except BrokenProcessPool:
            return {**cell, "error": "the process died", "trace": []}


def _pool(size: int) -> ProcessPoolExecutor:
    """Its processes end with this one, however that ends: a cell may take minutes."""
    return ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn"), initializer=die_with_parent)


class CpuLimitExceeded(BaseException):
    """The bound was reached. Not an `Exception`: code that contains errors of single calls must not contain this one."""


TELL_AGAIN_S = 1.0
"""Of processor time, until the bound is told again: raised in a destructor or a callback of the garbage collector, it is lost."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `CpuLimitExceeded` inside the block after so much processor time. For the main thread of a process, as cells are."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise CpuLimitExceeded(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, TELL_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
