"""Steepest descent over sizes (Orion, OSDI 2022, with ESG's three knobs in place of one).

Start with every step at its smallest size. In each round try one step up in every knob of every function, by itself, and
keep the one that lowers the end-to-end latency most; stop when that is within the goal. A size is small if it is slow: a
step up is a smaller batch, one core more, one unit more. What it costs is not looked at, which is how it ends up dear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamina.planner.configs import ConfigArrays

Picks = tuple[int, ...]
"""A place in the table of every step."""


class DescentResult(NamedTuple):
    picks: Picks
    latency_us: float
    rounds: int
    met: bool


class ConfigGrid:
    """A table of configurations as a grid: what is one step up in a knob. Combinations never measured are stepped over."""

    def __init__(self, configs: ConfigArrays) -> None:
        self._place = {
            (-batch, cpus, units): place
            for place, (batch, cpus, units) in enumerate(
                zip(configs.batch.tolist(), configs.cpus.tolist(), configs.units.tolist(), strict=True)
            )
        }
        self._at = {place: key for key, place in self._place.items()}
        self._levels = [sorted({key[knob] for key in self._place}) for knob in range(3)]

    @property
    def smallest(self) -> int:
        """The largest batch on the fewest cores and units."""
        return self._place[min(self._place, key=lambda key: (key[2], key[1], key[0]))]

    def steps_up(self, place: int) -> list[int]:
        key = self._at[place]
        found = []
        for knob, levels in enumerate(self._levels):
            for level in levels[levels.index(key[knob]) + 1 :]:
                other = (*key[:knob], level, *key[knob + 1 :])
                if other in self._place:
                    found.append(self._place[other])
                    break
        return found


def descend(
    stages: Sequence[ConfigArrays], latency_us: Callable[[Picks], float], goal_us: float, rounds: int, start: Picks | None = None
) -> DescentResult:
    """Steepest descent for at most so many rounds; the search is cut off wherever it is then."""
    ladders = [ConfigGrid(stage) for stage in stages]
    picks = start if start is not None else tuple(ladder.smallest for ladder in ladders)
    now_us = latency_us(picks)
    for done in range(rounds):
        if now_us <= goal_us:
            return DescentResult(picks, now_us, done, True)
        tries = [
            (*picks[:stage], place, *picks[stage + 1 :])
            for stage, ladder in enumerate(ladders)
            for place in ladder.steps_up(picks[stage])
        ]
        if not tries:
            return DescentResult(picks, now_us, done, False)
        best_us, picks = min((latency_us(other), other) for other in tries)
        if best_us >= now_us and all(latency_us(other) >= now_us for other in tries):
            return DescentResult(picks, best_us, done + 1, best_us <= goal_us)
        now_us = best_us
    return DescentResult(picks, now_us, rounds, now_us <= goal_us)
