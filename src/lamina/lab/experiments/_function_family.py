"""Family of synthetic functions that look like real ones, for experiments that need many.

Latency on an H200, whose units are groups of 8 SMs: a fixed part, and the work of the batch over units to the power 0.9.
That is the curve of ResNet-50 as measured at batch 8 (6.6, 3.7, 2.3, 1.5 and 1.1 ms on 1, 2, 4, 8 and 15 units, which are all
of it; the curve is within 15 % of all of them). Only `classify` is that measured model; the other members are the same curve for
heavier work, with stated numbers. They are synthetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamina.predict.profile import Point, Profile
from lamina.types import FunctionSpec, ScaleSpec, Slo

UNITS = (1, 2, 4, 8, 15)
BATCHES = (1, 2, 4, 8, 16)
CURVE = 0.9


@dataclass(frozen=True, slots=True)
class FunctionKind:
    name: str
    fixed_ms: float
    item_ms: float  #: of one item on one unit
    units: int  #: what its owner would ask for
    max_batch: int
    memory_mib: int
    load_ms: int

    def latency_us(self, batch: int, units: int) -> float:
        return 1e3 * (self.fixed_ms + self.item_ms * batch / math.pow(units, CURVE))


KINDS = (
    FunctionKind("classify", 0.45, 0.775, 1, 16, 600, 800),
    FunctionKind("embed", 1.5, 3.0, 1, 16, 1_500, 1_200),
    FunctionKind("detect", 4.0, 16.0, 2, 8, 2_500, 1_800),
    FunctionKind("speech", 20.0, 80.0, 4, 8, 6_000, 3_000),
    FunctionKind("complete", 60.0, 220.0, 4, 8, 16_000, 5_000),
)


def profile(name: str, kind: FunctionKind, *, few: bool = False) -> Profile:
    """`few`: the corners alone, for experiments with thousands of functions; between them the curve is nearly the same."""
    batches = (1, kind.max_batch) if few else tuple(batch for batch in BATCHES if batch <= kind.max_batch)
    points = [
        Point(batch=batch, units=units, p50_us=round(kind.latency_us(batch, units)))
        for batch in batches
        for units in (UNITS[::2] if few else UNITS)
    ]
    return Profile(function=name, device="h200", points=points, load_us=1_000 * kind.load_ms, memory_mib=kind.memory_mib)


def function(
    name: str, kind: FunctionKind, *, share: float = 0.0, slo_us: int = 0, idle_us: int, late: bool = True
) -> FunctionSpec:
    """`share`: of a GPU, in place of what the kind asks for. `late`: an answer after its goal is still worth having."""
    return FunctionSpec(
        name=name,
        max_batch=kind.max_batch,
        share=share or kind.units / UNITS[-1],
        gpu="must",
        memory_mib=kind.memory_mib,
        scale=ScaleSpec(max=4, idle_us=idle_us),
        slo=Slo(latency_us=slo_us or goal_us(kind), on_miss="serve" if late else "shed", timeout_us=20_000_000),
    )


def goal_us(kind: FunctionKind) -> int:
    """Four times what one call takes on the slice its owner asks for, and no less than 50 ms."""
    return max(50_000, int(round(4 * kind.latency_us(1, kind.units), -4)))
