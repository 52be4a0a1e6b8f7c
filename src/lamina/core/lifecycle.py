"""Lifecycles as tables: the docs draw them, and a wrong move has a name."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phases of an instance."""

    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    GONE = "gone"


NEXT: dict[Phase, dict[str, Phase]] = {
    Phase.LOADING: {"ready": Phase.WARM, "lost": Phase.GONE, "unload": Phase.GONE},
    Phase.WARM: {"drain": Phase.DRAINING, "lost": Phase.GONE, "unload": Phase.GONE},
    Phase.DRAINING: {"lost": Phase.GONE, "unload": Phase.GONE},
    Phase.GONE: {},
}


def move(phase: Phase, event: str) -> Phase:
    to = NEXT[phase].get(event)
    assert to is not None, f"a {phase.value} instance cannot {event}"
    return to
