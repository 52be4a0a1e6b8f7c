"""SLO check at a start and at a deployment: can a request that is alone on its devices be answered within its SLO?

If not, every call would be refused, on a server with nothing to do. What a batch of one takes is known from a profile, or from
the first runs of an instance; what a workflow takes is its longest path through such batches, which is what admission counts
with. Times vary and a machine may be busy, so only what takes twice its SLO is impossible; between the two it is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lamina.core.workflow.flow import Flow
from lamina.types import FunctionSpec
from lamina.units import show_us

IMPOSSIBLE = 2.0
"""Times its SLO from which a request cannot be answered within it, whatever the noise of the measurement."""

Measured = tuple[str, int, float]
"""A measured time of a batch of one: function, units, microseconds."""


class SloShortfall(NamedTuple):
    """A function or workflow whose fastest time is over its SLO."""

    target: str
    slo_us: int
    takes_us: float
    units: int  #: of the slice that a function is fastest on; 0: it is a workflow

    def __str__(self) -> str:
        alone = f"one request takes {show_us(self.takes_us)} on {self.units} unit{'s' if self.units > 1 else ''}"
        if not self.units:
            alone = f"its longest path takes {show_us(self.takes_us)} on idle devices"
        what = "all of its calls would be refused" if self.is_impossible else "most of its calls may be refused"
        return f"{self.target}: SLO {show_us(self.slo_us)}, and {alone} (measured): {what}"

    @property
    def is_impossible(self) -> bool:
        return self.takes_us >= IMPOSSIBLE * self.slo_us

    @property
    def hint(self) -> str:
        return f"slo={show_us(2 * self.takes_us)!r} leaves room for it; or SLO(..., on_miss='serve') answers late calls too"


def slo_shortfalls(specs: Iterable[FunctionSpec], measured: Iterable[Measured], flows: Iterable[Flow] = ()) -> list[SloShortfall]:
    """Functions and workflows that miss their SLO alone and on their best slices. What was never timed counts as nothing."""
    best: dict[str, tuple[float, int]] = {}
    for function, units, us in measured:
        if us > 0:
            best[function] = min(best.get(function, (us, units)), (us, units))
    found = [(spec.name, spec.slo, *best.get(spec.name, (0.0, 1))) for spec in specs]
    found += [(flow.name, flow.slo, _longest_path_us(flow, best), 0) for flow in flows]
    return [
        SloShortfall(name, slo.latency_us, takes_us, units)
        for name, slo, takes_us, units in found
        if slo.latency_us and slo.on_miss == "shed" and takes_us > slo.latency_us
    ]


def _longest_path_us(flow: Flow, best: dict[str, tuple[float, int]]) -> float:
    """Of a function with competing bodies: the fastest of them."""
    ways = [flow.path_us(first, lambda function: int(best.get(function, (0.0, 0))[0])) for first in flow.start]
    return min(ways) if flow.competing else max(ways)
