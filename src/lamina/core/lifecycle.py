"""Lifecycles as tables: of instances, jobs, runs and node executions. The docs draw them from here.

A state changes only by a method of the object that has it, named after the event in its table (`job.start`, `execution.retry`;
for instances `move`). `tests/core/test_lifecycle.py` watches these methods in worlds of chaos and holds every move against the
tables, so the hot path sets a state without looking it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class InstancePhase(StrEnum):
    """Phases of an instance: a function loaded on a device."""

    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    GONE = "gone"


INSTANCE_TRANSITIONS: dict[InstancePhase, dict[str, InstancePhase]] = {
    InstancePhase.LOADING: {"ready": InstancePhase.WARM, "lost": InstancePhase.GONE, "unload": InstancePhase.GONE},
    InstancePhase.WARM: {"drain": InstancePhase.DRAINING, "lost": InstancePhase.GONE, "unload": InstancePhase.GONE},
    InstancePhase.DRAINING: {"lost": InstancePhase.GONE, "unload": InstancePhase.GONE},
    InstancePhase.GONE: {},
}


class JobState(StrEnum):
    """States of a job: one step of one call."""

    QUEUED = "queued"  #: in the queue of its function
    IN_BATCH = "in-batch"  #: running, or booked behind a running batch: `Batch.is_running` says which
    AWAITING = "awaiting"  #: its function has returned, and its outcome is to be reported from outside
    PARKED = "parked"  #: its outcome is being journaled, or the journal is being replayed; or lost inputs of it are made again


JOB_TRANSITIONS: dict[JobState, dict[str, JobState]] = {
    JobState.QUEUED: {"start": JobState.IN_BATCH, "park": JobState.PARKED},
    JobState.IN_BATCH: {"requeue": JobState.QUEUED, "park": JobState.PARKED, "await": JobState.AWAITING},
    JobState.AWAITING: {"park": JobState.PARKED},
    JobState.PARKED: {"requeue": JobState.QUEUED, "await": JobState.AWAITING},
}
"""A job ends by leaving its call, from any state."""


class RunState(StrEnum):
    """States of a call in flight, be it of a function or a workflow."""

    REPLAYING = "replaying"  #: recovered after a restart: its journal is being applied, no work is started
    ACTIVE = "active"
    ENDED = "ended"  #: answered, failed, timed out or cancelled


RUN_TRANSITIONS: dict[RunState, dict[str, RunState]] = {
    RunState.REPLAYING: {"replay_done": RunState.ACTIVE, "end": RunState.ENDED},
    RunState.ACTIVE: {"recover": RunState.REPLAYING, "end": RunState.ENDED},
    RunState.ENDED: {},
}


LOADING, WARM, DRAINING = InstancePhase.LOADING, InstancePhase.WARM, InstancePhase.DRAINING
QUEUED, IN_BATCH, AWAITING, PARKED = JobState.QUEUED, JobState.IN_BATCH, JobState.AWAITING, JobState.PARKED
ACTIVE, ENDED = RunState.ACTIVE, RunState.ENDED
"""For the path of a call: a member of an enum takes ten times as long to look up by its class as by a global."""


class NodeState(StrEnum):
    """States of a node execution, by what it waits for. Those of a data request are also its `stage` on the wire."""

    BEGIN = "begin"  #: data it needs to start
    RUN = "run"  #: its job, or the scopes it has opened
    END = "end"  #: data to be made of its results
    CATCH = "catch"  #: data for the node that takes over after a failure
    PAUSE = "pause"  #: a timer: a wait, or the delay before a retry


NODE_TRANSITIONS: dict[NodeState, dict[str, NodeState]] = {
    NodeState.BEGIN: {"run": NodeState.RUN, "wait": NodeState.PAUSE, "retry": NodeState.PAUSE, "catch": NodeState.CATCH},
    NodeState.RUN: {"succeed": NodeState.END, "retry": NodeState.PAUSE, "catch": NodeState.CATCH},
    NodeState.END: {"retry": NodeState.PAUSE, "catch": NodeState.CATCH},
    NodeState.CATCH: {},
    NodeState.PAUSE: {"begin_attempt": NodeState.BEGIN},
}
"""An execution ends when its token moves on, from any state."""


def mermaid(transitions: Mapping[StrEnum, Mapping[str, StrEnum]]) -> str:
    """A table as a Mermaid state diagram, for the docs."""
    first = next(iter(transitions))
    lines = ["stateDiagram-v2", f"    [*] --> {_label(first)}"]
    for state, moves in transitions.items():
        lines += [f"    {_label(state)} --> {_label(to)}: {event}" for event, to in moves.items()]
        if not moves:
            lines.append(f"    {_label(state)} --> [*]")
    return "\n".join(lines)


def _label(state: StrEnum) -> str:
    return state.value.replace("-", "_")
