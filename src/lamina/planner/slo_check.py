"""SLO check at a start and at a deployment: can a request that is alone on its device be answered within its SLO?

If not, every call would be refused, on a server with nothing to do. What a batch of one takes is known from a profile, or from
the first runs of an instance. Times vary and a machine may be busy, so only what takes twice its SLO is impossible; between the
two it is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lamina.types import FunctionSpec
from lamina.units import show_us

IMPOSSIBLE = 2.0
"""Times its SLO from which a request cannot be answered within it, whatever the noise of the measurement."""

Measured = tuple[str, int, float]
"""A measured time of a batch of one: function, units, microseconds."""


class SloShortfall(NamedTuple):
    """A function whose fastest time is over its SLO."""

    function: str
    slo_us: int
    takes_us: float
    units: int
    is_impossible: bool

    def __str__(self) -> str:
        alone = f"one request takes {show_us(self.takes_us)} on {self.units} unit{'s' if self.units > 1 else ''}"
        what = "all of its calls would be refused" if self.is_impossible else "most of its calls may be refused"
        return f"{self.function}: SLO {show_us(self.slo_us)}, and {alone} (measured): {what}"

    @property
    def hint(self) -> str:
        return f"slo={show_us(2 * self.takes_us)!r} leaves room for it; or SLO(..., on_miss='serve') answers late calls too"


def slo_shortfalls(specs: Iterable[FunctionSpec], measured: Iterable[Measured]) -> list[SloShortfall]:
    """Functions that miss their SLO alone and on their best slice. Without a time nothing is known against one."""
    best: dict[str, tuple[float, int]] = {}
    for function, units, us in measured:
        if us > 0:
            best[function] = min(best.get(function, (us, units)), (us, units))
    found = []
    for spec in specs:
        takes_us, units = best.get(spec.name, (0.0, 0))
        goal_us = spec.slo.latency_us
        if goal_us and spec.slo.on_miss == "shed" and takes_us > goal_us:
            found.append(SloShortfall(spec.name, goal_us, takes_us, units, takes_us >= IMPOSSIBLE * goal_us))
    return found
