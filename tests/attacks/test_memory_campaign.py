"""The memory campaign in small, at a real server: others are answered throughout, and the memory comes back (C1, C2)."""

from __future__ import annotations

import asyncio
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
