"""Lifecycles as tables: the docs draw them, and a wrong move has a name."""

from __future__ import annotations

from enum import StrEnum


class InstancePhase(StrEnum):
    """Phases of an instance."""

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


def next_phase(phase: InstancePhase, event: str) -> InstancePhase:
    to = INSTANCE_TRANSITIONS[phase].get(event)
    assert to is not None, f"a {phase.value} instance cannot {event}"
    return to
