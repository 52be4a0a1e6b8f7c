"""Lifecycle tables of instances, jobs, runs and node executions: every move a controller makes is in them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest

from lamina.core.lifecycle import (
    IN_BATCH,
    INSTANCE_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    RUN_TRANSITIONS,
    InstancePhase,
    mermaid,
)
from lamina.core.scheduling import cluster
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.jobs import start as enter_batch
from lamina.core.scheduling.state import Instance
from lamina.core.workflow.runs import NodeExecution, WorkflowRun
from tests.core.chaos import play

TABLES: dict[str, Mapping[StrEnum, Mapping[str, StrEnum]]] = {
    "instance": INSTANCE_TRANSITIONS,
    "job": JOB_TRANSITIONS,
    "run": RUN_TRANSITIONS,
    "node": NODE_TRANSITIONS,
}
OBJECTS: tuple[tuple[str, type, str], ...] = (
    ("job", Job, "state"),
    ("run", ActiveCall, "state"),
    ("run", WorkflowRun, "state"),
    ("node", NodeExecution, "stage"),
)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_state_is_in_its_table(table: Mapping[StrEnum, Mapping[str, StrEnum]]):
    states = type(next(iter(table)))
    assert set(table) == set(states)
    assert {to for moves in table.values() for to in moves.values()} <= set(states)


def test_every_instance_comes_to_an_end():
    for phase in InstancePhase:
        seen = {phase}
        while INSTANCE_TRANSITIONS[phase]:
            phase = list(INSTANCE_TRANSITIONS[phase].values())[-1]
            assert phase not in seen
            seen.add(phase)
        assert phase is InstancePhase.GONE


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (InstancePhase.WARM, "ready"),
        (InstancePhase.LOADING, "drain"),
        (InstancePhase.DRAINING, "ready"),
        (InstancePhase.GONE, "lost"),
        (InstancePhase.GONE, "unload"),
    ],
)
def test_a_wrong_move_of_an_instance_is_named(phase: InstancePhase, event: str):
    instance = Instance("f-1", "f", "gpu0", phase, 0)
    with pytest.raises(AssertionError, match=f"a {phase.value} instance cannot {event}"):
        instance.move(event)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str, str, str]]:
    """Every move that is made while the test runs: table, state before, event, state after."""
    seen: set[tuple[str, str, str, str]] = set()
    for name, kind, field in OBJECTS:
        for event in {event for events in TABLES[name].values() for event in events}:
            if event in vars(kind):
                monkeypatch.setattr(kind, event, _watched(vars(kind)[event], name, field, event, seen))

    def start(jobs: list[Job], batch_id: int) -> None:
        seen.update(("job", job.state, "start", IN_BATCH) for job in jobs)
        enter_batch(jobs, batch_id)

    monkeypatch.setattr(cluster, "start", start)
    return seen


def _watched(method: Any, name: str, field: str, event: str, seen: set[tuple[str, str, str, str]]) -> Any:
    def watched(self: Any, *args: Any, **more: Any) -> Any:
        before = getattr(self, field)
        result = method(self, *args, **more)
        seen.add((name, before, event, getattr(self, field)))
        return result

    return watched


def test_every_move_in_worlds_of_chaos_is_in_the_tables(moves: set[tuple[str, str, str, str]]):
    for seed in range(32):
        world = play(seed, "chaos-due" if seed % 2 else "fifo", 80, faults=(0.15, 0.4)[seed % 2], watched=False)
        world.drain()
    known = {
        (name, state, event, to)
        for name, table in TABLES.items()
        for state, events in table.items()
        for event, to in events.items()
    }
    assert moves <= known
    assert len(moves) >= 10, "this chaos is too calm to show anything"


def test_a_table_is_drawn_with_all_its_moves():
    drawn = mermaid(JOB_TRANSITIONS)
    assert drawn.splitlines()[:2] == ["stateDiagram-v2", "    [*] --> queued"]
    assert "    queued --> in_batch: start" in drawn
    assert "    gone --> [*]" in mermaid(INSTANCE_TRANSITIONS)
