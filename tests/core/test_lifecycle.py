"""Lifecycle tables: the phases of an instance."""

from __future__ import annotations

import pytest

from lamina.core.lifecycle import NEXT, Phase, move


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_is_in_the_table(phase: Phase):
    assert phase in NEXT


def test_every_way_ends():
    for phase in Phase:
        seen = {phase}
        while NEXT[phase]:
            phase = list(NEXT[phase].values())[-1]
            assert phase not in seen
            seen.add(phase)
        assert phase is Phase.GONE


@pytest.mark.parametrize(
    ("phase", "event"),
    [(Phase.WARM, "ready"), (Phase.LOADING, "drain"), (Phase.DRAINING, "ready"), (Phase.GONE, "lost"), (Phase.GONE, "unload")],
)
def test_a_wrong_move_has_a_name(phase: Phase, event: str):
    with pytest.raises(AssertionError, match=f"a {phase.value} instance cannot {event}"):
        move(phase, event)
