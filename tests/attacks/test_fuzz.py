"""A slice of the fuzz campaign: requests drawn from their numbers, over all protocols."""

from __future__ import annotations

import pytest
from benchmarks.attacks import fuzz

from lamina.core.workflow import engine


def test_a_request_is_the_same_whenever_it_is_drawn() -> None:
    for number in range(60):
        kind = fuzz.KINDS[number % len(fuzz.KINDS)]
        if kind in fuzz.BUILDERS:
            assert fuzz.BUILDERS[kind](fuzz.drawn(number)) == fuzz.BUILDERS[kind](fuzz.drawn(number))
        else:
            assert fuzz.LOCAL[kind](fuzz.drawn(number)) == fuzz.LOCAL[kind](fuzz.drawn(number))


@pytest.mark.live
def test_fuzzed_requests_neither_crash_nor_hang_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them: `python -m benchmarks.attacks.fuzz`."""
    monkeypatch.setattr(engine, "MAX_DATA_REQUESTS", fuzz.ASL_LOOP)  # as the campaign does; and back afterwards
    found = fuzz.run(fuzz.Found(), 800)
    assert (found.crashes, found.hangs) == ([], [])
    assert found.outcomes.keys() == set(fuzz.KINDS)
    assert found.outcomes["http1"].keys() >= {"200", "400"}
    assert found.outcomes["asl"].keys() >= {"ok", "States.Runtime"}
    assert found.growth_mib[0] <= 20
