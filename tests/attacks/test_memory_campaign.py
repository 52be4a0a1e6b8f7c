"""The memory campaign in small, at a real server: others are answered throughout, and the memory comes back (C1, C2)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.attacks import memory
from benchmarks.report import Report

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("attack", "limit_bytes"),
    [
        (lambda port: memory.leavers(port, 12), 0),
        (lambda port: memory.endless(port, 10, 1.5), 0),
        (lambda port: memory.large_calls(port, 4), memory.LIMIT_BYTES),
    ],
    ids=["leavers", "endless bodies", "large calls"],
)
def test_c1_c2_others_are_answered_and_the_memory_comes_back(attack: Any, limit_bytes: int) -> None:
    """10,000 leavers, 1,000 endless bodies, 30 large calls: `python -m benchmarks.attacks.memory`."""
    report = Report()
    asyncio.run(memory.attacked(report, "attack", attack, limit_bytes))
    failed, grown = report.rows
    assert failed.value == 0, failed
    assert failed.details["calls"] > 0
    assert grown.met and grown.details["alive"], grown


HOLES = """
import ctypes
from lamina.server.process_status import HeapTrimmer, return_free_memory

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

trimmer = HeapTrimmer(ctypes.CDLL(None))
bodies = []
between = []  # small objects that live on: no block beside them can be given back by moving the end of the heap
for _ in range(2_000):
    bodies.append(bytearray(60_000))
    between.append(bytes(600))
assert not trimmer.trim()
before = resident_mib()
bodies.clear()
assert trimmer.trim() and not trimmer.trim()
print(before - resident_mib())
"""


def test_c2_holes_that_small_bodies_leave_in_the_heap_go_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 100
