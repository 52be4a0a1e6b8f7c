"""A witness of a core's own pace: `python -m benchmarks.fidelity.pace CORE` does the same small piece of work again and again.

It runs only while nobody else wants the core, for a twentieth of a millisecond every few, and notes the processor time that
took. A virtual machine's core is another one from second to second; the simulator is told how fast it was, as it is told when
the host was away. The witness knows nothing of batches.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from lamina.live.timer import clock_us

WORK = bytes(64 << 10)
EVERY_S = 0.002
AROUND = 12
"""Samples to each side that a pace is the median of: some 50 ms."""


class Paces(NamedTuple):
    """Of one core over time."""

    at_us: list[int]
    took_ns: list[int]

    def level(self, since_us: int, until_us: int) -> float:
        return statistics.median(self.took_ns[bisect_left(self.at_us, since_us) : bisect_left(self.at_us, until_us)])

    def around(self, at_us: int) -> float:
        place = bisect_left(self.at_us, at_us)
        return statistics.median(self.took_ns[max(0, place - AROUND) : place + AROUND])


@dataclass(slots=True)
class Witness:
    """Of one core, until it is asked what it saw."""

    process: subprocess.Popen[str]

    @classmethod
    def of(cls, core: int) -> Witness:
        command = [sys.executable, "-m", "benchmarks.fidelity.pace", str(core)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def saw(self) -> Paces:
        told, _ = self.process.communicate("")
        rows = [line.split() for line in told.splitlines()]
        return Paces([int(at_us) for at_us, _ in rows], [int(ns) for _, ns in rows])


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    seen = []
    while not over.wait(EVERY_S):
        at_us, began_ns = clock_us(), time.thread_time_ns()
        hashlib.sha256(WORK).digest()
        seen.append((at_us, time.thread_time_ns() - began_ns))
    print("\n".join(f"{at_us} {ns}" for at_us, ns in seen))


if __name__ == "__main__":
    main()
