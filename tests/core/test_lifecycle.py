"""Lifecycle tables: the phases of an instance."""

from __future__ import annotations

import pytest

from lamina.core.lifecycle import INSTANCE_TRANSITIONS, InstancePhase, next_phase


@pytest.mark.parametrize("phase", list(InstancePhase))
def test_every_phase_is_in_the_table(phase: InstancePhase):
    assert phase in INSTANCE_TRANSITIONS


def test_every_way_ends():
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
def test_a_wrong_move_has_a_name(phase: InstancePhase, event: str):
    with pytest.raises(AssertionError, match=f"a {phase.value} instance cannot {event}"):
        next_phase(phase, event)
