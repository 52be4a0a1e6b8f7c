"""Catalogue of an offline plan: models, GPU kinds, rules, tasks. Frozen, and free of file formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.errors import BadValue

MAX_BATCH = 32
WHOLE = 100
PARTS = (20, 40, 50, 60, 80, WHOLE)
"""Shares of a GPU, in percent, that a gpulet may have."""

SLACK_RPS = 15
"""Requests a second that gpu-let leaves unserved without a second thought."""

PROCESS_MB = 1230
"""What a process of its own costs on the device, before any model is loaded."""

USABLE_MEMORY = 0.9
INFEASIBLE_MS = 1e12
"""How long a batch takes that cannot be. Not infinite: a difference of two must stay a number."""

NETWORK_GBITS = 3.0
"""Input one GPU may receive per second in gpu-let's testbed, in units of 2^30 bits."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    id: int
    name: str
    memory_mb: int
    input_bytes: int
    gather_scale: float  #: times `gather_ms[batch]`: how long collecting a batch takes
    gather_ms: tuple[float, ...]  #: by batch; place 0 is not used

    @property
    def gbits_per_request(self) -> float:
        return self.input_bytes * 8 / 2**30


@dataclass(frozen=True, slots=True)
class PartProfile:
    """One model on one kind of GPU."""

    latency_ms: Mapping[tuple[int, int], float]  #: by (batch, part)
    l2: Mapping[int, float]  #: share of the L2 cache's bandwidth in use, by batch
    dram: Mapping[int, float]

    @property
    def extreme_parts(self) -> tuple[int, int]:
        """The parts of the smallest and of the largest entry; anything in between is blended from these two."""
        keys = sorted(self.latency_ms, key=lambda key: key[0] * 1000 + key[1])
        return keys[0][1], keys[-1][1]


@dataclass(frozen=True, slots=True)
class InterferenceWeights:
    """A model slows down by `own_l2*l2 + other_l2*l2' + own_dram*dram + other_dram*dram' + base`, dashes for its neighbour."""

    own_l2: float
    other_l2: float
    own_dram: float
    other_dram: float
    base: float


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU."""

    name: str
    memory_mb: int
    weights: InterferenceWeights
    profiles: Mapping[int, PartProfile]  #: by model id
    cuts: Mapping[int, int] = field(default_factory=lambda: {part: part for part in PARTS})  #: part -> its units
    process_mb: int = PROCESS_MB
    usable_memory: float = USABLE_MEMORY
    aligned: bool = False  #: a slice starts at a multiple of its size, from either end

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(sorted(self.cuts))


@dataclass(frozen=True, slots=True)
class Catalogue:
    models: Mapping[int, PlannedModel]
    kinds: Mapping[str, GpuKind]
    max_batch: int = MAX_BATCH

    def profile(self, kind: str, model: int) -> PartProfile:
        """A missing profile is an error: planning it as latency 0, as gpu-let does, would promise anything."""
        found = self.kinds[kind].profiles.get(model)
        if found is None:
            name = self.models[model].name
            raise BadValue(f"model {name!r}: no latency profile on {kind}", hint="measure it, or leave the model out")
        return found


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """The scheduler's flags."""

    partitioning: bool = True  #: cut GPUs into parts; else share whole GPUs in time only
    interference: bool = True  #: predict how neighbours slow each other down
    self_tuning: bool = False  #: smallest sufficient part for each model, no sharing in time
    max_models: int = 3  #: models that may take turns on one gpulet
    latency_ratio: float = 1.1  #: safety factor on every latency
    network_gbits: float = math.inf  #: input one GPU may receive per second, in units of 2^30 bits


RULES_BY_POLICY: dict[str, PlannerRules] = {
    "gpulet": PlannerRules(),
    "gpulet-noint": PlannerRules(interference=False),
    "greedy_part": PlannerRules(interference=False, self_tuning=True),
    "timesharing": PlannerRules(partitioning=False, interference=False),
}


@dataclass(frozen=True, slots=True)
class PlanTask:
    """A model, how often it is called, and how fast it must answer."""

    model: int
    rate: float  #: requests a second on average; bursts come on top
    slo_ms: float
