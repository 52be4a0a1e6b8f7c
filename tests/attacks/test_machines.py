"""A leader, its standby and three agents under faults: a quick round of `benchmarks/attacks/machines.py`."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.attacks.machines import play

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_faults_of_machines_lose_double_and_forget_nothing():
    kinds = ("agent-kill", "agent-cut", "leader-kill", "agent-freeze", "leader-freeze", "drain")
    found = asyncio.run(play("sqlite", "", len(kinds), 6, kinds))
    assert [event.kind for event in found.events] == list(kinds)
    assert found.verdict.is_good, (
        found.verdict.summary(),
        found.verdict.lost[:5],
        found.verdict.doubled[:5],
        found.verdict.odd[:5],
    )
    assert sum(event.failed for event in found.events) == 0
