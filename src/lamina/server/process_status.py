"""Status of a serving process: whether it takes work, and its loop lag.

Under more load than a process can read, requests wait in the system's buffers, where no clock sees them; how late a timer of the
event loop fires shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from lamina.errors import Cancelled, LaminaError

INTERVAL_S = 0.005
BUDGET_SHARE = 0.25
"""Part of the memory there is that clients may make a server hold, unless told otherwise; the rest is for workers and models."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 2**20
TRIM_EVERY_S = 1.0
TRIM_BYTES = 4 * 2**20
"""How often the heap is looked at, and how much of it must have become free to be given back: a gigabyte takes some 60 ms."""

_CGROUPS = Path("/sys/fs/cgroup")


class ProcessStatus:
    """Shared by all that serve in one process."""

    def __init__(self) -> None:
        self.lag_us = 0  #: how long bytes lie unread while this process is busy; part of every call's time
        self._peak_lag_us = 0
        self.is_closing = False  #: nothing new is accepted
        self.is_standby = False  #: another server leads: nothing is known here, and nothing done
        self.refusal: Callable[[], LaminaError] | None = None  #: why no work is taken

    def close(self) -> None:
        self.is_closing = True
        if not self.is_standby:
            self.refusal = lambda: Cancelled("shutting down", hint="try another server")

    def stand_by(self, refusal: Callable[[], LaminaError]) -> None:
        """Take no work, as long as another server leads."""
        self.is_standby, self.refusal = True, refusal

    def lead(self) -> None:
        """Take work from now on."""
        self.is_standby, self.refusal = False, None

    def track_lag(self) -> None:
        """Measure the lag with a timer: the figure rises at once and falls slowly."""
        loop = asyncio.get_running_loop()

        def tick(due_s: float) -> None:
            late_us = int((loop.time() - due_s) * 1e6) - 1_000
            self.lag_us = max(late_us, int(0.8 * self.lag_us), 0)
            if late_us > self._peak_lag_us:
                self._peak_lag_us = late_us
            if not self.is_closing:
                again_s = loop.time() + INTERVAL_S
                loop.call_at(again_s, tick, again_s)

        tick(loop.time())

    def take_peak_lag_us(self) -> int:
        """The longest lag since the last question: a figure that falls within milliseconds is missed by looking once a second."""
        found, self._peak_lag_us = self._peak_lag_us, 0
        return found


def return_free_memory() -> None:
    """Give memory back to the system once it is free, for as long as the running loop lives.

    glibc raises the size from which a block is mapped by itself to 32 MiB as soon as such a block has been freed; from then on
    bodies lie among small objects, and what a flood of them took stays with the process. So large blocks are always mapped one by
    one. The holes that smaller ones leave behind are given back when enough of them has gathered."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)
        HeapTrimmer(libc).start()


class HeapTrimmer:
    """Trims the heap of this process when more of it has become free, and is still resident, than since it was trimmed last.

    What is free is not what is resident: pages that were given back stay free. So neither the level of free bytes counts nor its
    rise: what was given back may be taken and become free again between two looks, and none would see it. What counts is the rise
    of what is resident beyond the blocks in use.
    """

    def __init__(self, libc: ctypes.CDLL, private_bytes: Callable[[], int] | None = None) -> None:
        """`private_bytes`: of memory of this process' own that is resident."""
        self._info: Callable[[], _Mallinfo] = libc.mallinfo2
        self._info.restype = _Mallinfo
        self._trim: Callable[[int], int] = libc.malloc_trim
        self._private_bytes = private_bytes or _private_bytes
        self._least_bytes = self._unused_bytes()

    def start(self) -> None:
        """Look now and then, on the running loop."""
        asyncio.get_running_loop().call_later(TRIM_EVERY_S, self.start)
        self.trim()

    def trim(self) -> bool:
        unused_bytes = self._unused_bytes()
        self._least_bytes = min(self._least_bytes, unused_bytes)
        if unused_bytes - self._least_bytes < TRIM_BYTES:
            return False
        self._trim(0)
        self._least_bytes = self._unused_bytes()
        return True

    def _unused_bytes(self) -> int:
        """Resident and in no block: free, or not of the heap at all."""
        info = self._info()
        return self._private_bytes() - info.uordblks - info.hblkhd


def _private_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`: bytes of blocks in use, in all arenas (`uordblks`) and mapped one by one (`hblkhd`)."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]
    uordblks: int
    hblkhd: int


def limit_address_space(most_bytes: int) -> None:
    """Limit the memory of this process for good, to less where the one it was started with is lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def default_memory_budget() -> int:
    return int(memory_limit_bytes() * BUDGET_SHARE)


def memory_limit_bytes() -> int:
    """Memory this process may use: the machine's, or less where its cgroup, one above it, or a resource limit says so."""
    with open("/proc/meminfo") as lines:
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found = min(found, soft)
    return min([found, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    places = [(_CGROUPS, "memory.max"), (_CGROUPS / "memory", "memory.limit_in_bytes")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUPS / "memory" if "memory" in controllers.split(",") else _CGROUPS
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = root / path.lstrip("/")
            places += [(at, name) for at in (group, *group.parents) if at.is_relative_to(root)]
    for folder, name in places:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max": no limit
            yield int((folder / name).read_text())
