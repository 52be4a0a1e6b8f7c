"""Draft of a plan while it is being made: GPUs cut into gpulets, models on them, and what a step must look up.

A GPU is whole or cut in two. Only the functions of this package change a draft; what leaves the package is frozen. `violations`
checks a finished draft from what is on the GPUs alone, not from how it came to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.planner.partitioning.catalogue import WHOLE, Catalogue, PlannerRules
from lamina.planner.partitioning.plan import RateDemand
from lamina.published.gpulet.capacity import GpuletCapacity
from lamina.published.gpulet.quirks import Quirks


@dataclass(slots=True, eq=False)
class PlacedModel:
    """A model's share of a gpulet."""

    model: int
    batch: int
    throughput: float
    rate: float  #: requests a second it was put here for
    slo_ms: float


@dataclass(slots=True, eq=False)
class Gpulet:
    gpu: int
    kind: str
    part: int
    dedup: int = 0  #: 1 for the second half of a GPU cut in the middle: part alone would not tell the two apart
    tasks: list[PlacedModel] = field(default_factory=list)
    duty_ms: float = 0.0  #: one round: every model on it gathers, and runs once
    occupancy: float = 0.0  #: share of the round in which something runs

    @property
    def label(self) -> tuple[int, int]:
        """What tells the gpulets of one GPU apart."""
        return self.part, self.dedup

    @property
    def saturated(self) -> bool:
        return self.occupancy == 1

    def has_model(self, model: int) -> bool:
        return any(task.model == model for task in self.tasks)

    def clear(self) -> None:
        self.tasks, self.duty_ms, self.occupancy = [], 0.0, 0.0

    def copy(self) -> Gpulet:
        tasks = [PlacedModel(task.model, task.batch, task.throughput, task.rate, task.slo_ms) for task in self.tasks]
        return Gpulet(self.gpu, self.kind, self.part, self.dedup, tasks, self.duty_ms, self.occupancy)


@dataclass(slots=True, eq=False)
class DraftGpu:
    index: int
    kind: str
    gpulets: list[Gpulet]
    used_mb: float = 0.0
    loaded: set[tuple[int, int]] = field(default_factory=set)  #: labels of gpulets that have a process

    @property
    def busy(self) -> bool:
        return any(gpulet.tasks for gpulet in self.gpulets)


@dataclass(slots=True, eq=False)
class OpenDemand:
    """What is still to be placed of one model."""

    model: int
    rate: float
    slo_ms: float
    slack: float  #: this much may stay unserved
    extra: float = 0  #: throughput others lost to it, which it must make up for (Q6)

    @property
    def is_open(self) -> bool:
        return self.rate + self.extra > self.slack


class DraftPlan:
    def __init__(self, catalogue: Catalogue, capacity: GpuletCapacity, kinds: Sequence[str]) -> None:
        self.catalogue = catalogue
        self.capacity = capacity
        self.may_split = True
        self.gpus = [DraftGpu(index, kind, [Gpulet(index, kind, WHOLE)]) for index, kind in enumerate(kinds)]
        self.kinds = tuple(sorted(set(kinds)))

    @property
    def rules(self) -> PlannerRules:
        return self.capacity.rules

    @property
    def quirks(self) -> Quirks:
        return self.capacity.quirks

    # ------------------------------------------------------------------ looking

    def gpulets(self) -> Iterator[Gpulet]:
        for gpu in self.gpus:
            yield from gpu.gpulets

    def neighbours(self, gpulet: Gpulet) -> list[Gpulet]:
        return [other for other in self.gpus[gpulet.gpu].gpulets if other.label != gpulet.label]

    def served(self, model: int) -> float:
        """Requests a second of a model that the plan takes."""
        single, total = self.quirks.single, 0.0
        for gpulet in self.gpulets():
            for task in gpulet.tasks:
                if task.model == model:
                    total = single(total + (task.throughput if self.quirks.whole_rates else task.rate))
        return total

    def latency(self, gpulet: Gpulet, model: int) -> Callable[[int], float]:
        """Milliseconds by batch on this gpulet, next to the neighbours it has now."""
        table = self.capacity.latency
        solo = table.solo_ms(gpulet.kind, model, gpulet.part)
        if not self.rules.interference or gpulet.gpu >= len(self.gpus):
            return solo.__getitem__
        interference = self.capacity.interference
        beside = [(task.model, other.part, task.batch) for other in self.neighbours(gpulet) for task in other.tasks]
        if not beside:
            return solo.__getitem__
        slowdown = interference.slowdown_beside(gpulet.kind, model, gpulet.part, beside)
        run, gather = table.profiled_ms(gpulet.kind, model, gpulet.part), table.gather_ms(model)
        single, ratio = self.quirks.single, table.ratio

        def latency_ms(batch: int) -> float:
            more = single(run[batch] * single(slowdown(batch) - 1))
            return single(single(single(run[batch] + gather[batch]) + more) * ratio)

        return latency_ms

    def busy_ms(self, gpulet: Gpulet, leave_out: PlacedModel | None = None) -> float:
        """How long one round of a gpulet runs."""
        single, total = self.quirks.single, 0.0
        for task in gpulet.tasks:
            if task is not leave_out:
                total = single(total + self.latency(gpulet, task.model)(task.batch))
        return total

    # ------------------------------------------------------------------- memory

    def has_memory_for(self, gpulet: Gpulet, model: int) -> bool:
        gpu = self.gpus[gpulet.gpu]
        loaded = gpulet.label in gpu.loaded if self.quirks.books_first_model_only else bool(gpulet.tasks)
        kind = self.catalogue.kinds[gpu.kind]
        need = self.catalogue.models[model].memory_mb + (0 if loaded else kind.process_mb)
        usable = self.quirks.single(kind.usable_memory) * kind.memory_mb
        return usable - self.used_mb(gpu) > need

    def used_mb(self, gpu: DraftGpu) -> float:
        """As booked by the original, which never books a second model on a gpulet; or as it is."""
        if self.quirks.books_first_model_only:
            return gpu.used_mb
        models = self.catalogue.models
        held = [gpulet for gpulet in gpu.gpulets if gpulet.tasks]
        process_mb = self.catalogue.kinds[gpu.kind].process_mb
        return sum(process_mb + sum(models[task.model].memory_mb for task in gpulet.tasks) for gpulet in held)

    def book_memory(self, gpulet: Gpulet, model: int) -> None:
        gpu = self.gpus[gpulet.gpu]
        if gpulet.label not in gpu.loaded:
            gpu.loaded.add(gpulet.label)
            gpu.used_mb += self.catalogue.kinds[gpu.kind].process_mb + self.catalogue.models[model].memory_mb

    def recount_memory(self) -> None:
        """From what is on the GPUs, before a plan is changed step by step."""
        for gpu in self.gpus:
            held = [gpulet for gpulet in gpu.gpulets if gpulet.tasks]
            gpu.loaded = {gpulet.label for gpulet in held}
            models = [task.model for gpulet in held for task in gpulet.tasks]
            gpu.used_mb = self.catalogue.kinds[gpu.kind].process_mb * len(held) + sum(
                self.catalogue.models[model].memory_mb for model in models
            )

    # ------------------------------------------------------------------ changes

    def split(self, gpulet: Gpulet, part: int) -> Gpulet:
        """Cut a whole GPU in two; the gpulet keeps `part`, the rest is returned."""
        rest = Gpulet(gpulet.gpu, gpulet.kind, WHOLE - part, dedup=1 if 2 * part == WHOLE else 0)
        gpulet.part = part
        gpulets = self.gpus[gpulet.gpu].gpulets
        gpulets.insert(gpulets.index(gpulet) + 1, rest)
        return rest

    def rejoin_idle(self) -> None:
        """GPUs that are cut but not used become whole again."""
        for gpu in self.gpus:
            if len(gpu.gpulets) > 1 and not gpu.busy:
                gpu.gpulets = [Gpulet(gpu.index, gpu.kind, WHOLE)]

    def snapshot(self, gpus: Iterable[int]) -> Callable[[], None]:
        """Call the result to bring these GPUs back to where they are now.

        The gpulets keep their identity, so lists of them that a step holds stay true.
        """
        saved = [
            (gpu, gpu.used_mb, set(gpu.loaded), [(gpulet, gpulet.copy()) for gpulet in gpu.gpulets])
            for gpu in (self.gpus[index] for index in set(gpus))
        ]

        def restore() -> None:
            for gpu, used_mb, loaded, gpulets in saved:
                gpu.used_mb, gpu.loaded, gpu.gpulets = used_mb, loaded, [gpulet for gpulet, _ in gpulets]
                for gpulet, copy in gpulets:
                    gpulet.part, gpulet.dedup = copy.part, copy.dedup
                    gpulet.tasks, gpulet.duty_ms, gpulet.occupancy = copy.tasks, copy.duty_ms, copy.occupancy

        return restore


_CLOSE = 1e-6


def gbits(draft: DraftPlan, gpu: DraftGpu) -> float:
    """Per second; a gpulet that runs more often than requests come still receives only those."""
    single, total = draft.quirks.single, 0.0
    for gpulet in gpu.gpulets:
        for task in gpulet.tasks:
            rate = task.throughput if draft.quirks.checks_network_once else min(task.rate, task.throughput)
            total = single(total + single(rate * draft.catalogue.models[task.model].gbits_per_request))
    return total


def violations(draft: DraftPlan, session: Iterable[RateDemand]) -> Iterator[str]:
    """Violations of a plan, one sentence each; none for a sound plan."""
    for wanted in session:
        served = sum(min(task.rate, task.throughput) for task in _tasks(draft, wanted.model))
        if served < wanted.rate - wanted.slack - _CLOSE:
            yield f"{_name(draft, wanted.model)}: {wanted.rate - served:.3g} requests/s are not served"
    for gpu in draft.gpus:
        if sum(gpulet.part for gpulet in gpu.gpulets) > WHOLE:
            yield f"GPU {gpu.index}: more than all of it is given away"
        kind = draft.catalogue.kinds[gpu.kind]
        if draft.used_mb(gpu) > kind.usable_memory * kind.memory_mb:
            yield f"GPU {gpu.index}: {draft.used_mb(gpu):,.0f} MB do not fit"
        if gbits(draft, gpu) > draft.rules.network_gbits * (1 + _CLOSE):
            yield f"GPU {gpu.index}: {gbits(draft, gpu):.3g} Gbit/s of input"
        for gpulet in gpu.gpulets:
            yield from _late(draft, gpulet)


def _late(draft: DraftPlan, gpulet: Gpulet) -> Iterator[str]:
    place, busy_ms = f"GPU {gpulet.gpu}, {gpulet.part} %", draft.busy_ms(gpulet)
    if busy_ms > gpulet.duty_ms * (1 + _CLOSE):
        yield f"{place}: runs {busy_ms:.3g} ms in a round of {gpulet.duty_ms:.3g} ms"
    if len(gpulet.tasks) > draft.rules.max_models:
        yield f"{place}: {len(gpulet.tasks)} models take turns"
    for task in gpulet.tasks:
        end_ms = busy_ms + gpulet.duty_ms
        if end_ms > task.slo_ms * (1 + _CLOSE):
            yield f"{place}: {_name(draft, task.model)} takes {end_ms:.4g} ms, allowed are {task.slo_ms:g}"
        if task.rate * gpulet.duty_ms / 1000 > task.batch + _CLOSE:
            yield f"{place}: {_name(draft, task.model)} gathers more than its batch of {task.batch}"


def _tasks(draft: DraftPlan, model: int) -> Iterator[PlacedModel]:
    return (task for gpulet in draft.gpulets() for task in gpulet.tasks if task.model == model)


def _name(draft: DraftPlan, model: int) -> str:
    return draft.catalogue.models[model].name
