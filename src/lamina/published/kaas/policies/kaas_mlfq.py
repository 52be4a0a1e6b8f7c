"""KaaS, multi-level feedback queues: a bucket per model, and one is drawn.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6. Each time a GPU is free one of the buckets that hold
requests is drawn, all alike, and its oldest request goes: models with few requests are served soonest. The draws are
`random.Random(seed)`, so a run repeats. The published trace is one outcome of sixteen of the variant behind `compat`:
queues loaded before the clock starts, one draw per step and free GPU, and a drawn request that has not arrived yet costs
the step.

`by_run_time` is the classic form, which the thesis names and does not play: a bucket sinks a level each time its run time
doubles, the oldest request of the highest level goes first, and every `boost_us` all start again at the top.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, RecheckAt, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.published.kaas.whole_gpu_policy import PreloadedRequests, WholeGpuPolicy, request_us


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """A bucket of those that wait is drawn; its oldest request goes to the GPU that has been free longest."""

    seed: int = 0
    compat: bool = False  #: as published: the buckets hold `preloaded` from the start, and time goes in steps
    preloaded: tuple[tuple[str, int], ...] = ()  #: (function, arrival in microseconds)
    step_us: int = 1_000  #: of the published simulator
    by_run_time: bool = False  #: levels by the run time of a bucket, instead of draws
    quantum_us: int = 100_000  #: run time on the highest level
    levels: int = 8
    boost_us: int = 60_000_000
    _rng: random.Random = field(default_factory=lambda: random.Random(0), init=False)
    _requests: PreloadedRequests = field(default_factory=lambda: PreloadedRequests([]), init=False)
    _drawn: str = field(default="", init=False)  #: a bucket whose request is due in this very instant
    _ran_us: dict[str, int] = field(default_factory=dict, init=False)  #: by bucket, since the last boost
    _boosted_us: int = field(default=0, init=False)
    _spent: int = field(default=-1, init=False)  #: the step that was lost to a request that has not arrived

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._requests = PreloadedRequests(list(self.preloaded))

    def choose(self, view: View) -> tuple[Job, Device] | None:
        if self.compat:
            return self._as_published(view)
        heads = [(job, self.first_free(view, job)) for job in sorted(self.oldest_requests(view), key=lambda job: job.function)]
        able = [(job, device) for job, device in heads if device is not None]
        if not able:
            return None
        return self._highest(view, able) if self.by_run_time else self._rng.choice(able)

    def _highest(self, view: View, able: list[tuple[Job, Device]]) -> tuple[Job, Device]:
        if view.now_us - self._boosted_us >= self.boost_us:
            self._boosted_us = view.now_us
            self._ran_us.clear()
        job, device = min(able, key=lambda found: (self._level(found[0].function), found[0].enqueued_us, found[0].id))
        self._ran_us[job.function] = self._ran_us.get(job.function, 0) + request_us(view, job.function, device)
        return job, device

    def _level(self, function: str) -> int:
        return min(self.levels - 1, (self._ran_us.get(function, 0) // self.quantum_us).bit_length())

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from WholeGpuPolicy.dispatch(self, view)
        if self.compat and self._free_order and self._requests.left:
            yield RecheckAt((view.now_us // self.step_us + 1) * self.step_us)

    def _as_published(self, view: View) -> tuple[Job, Device] | None:
        step = view.now_us // self.step_us
        if self._spent == step or not self._requests.left:
            return None
        if not self._drawn:
            self._drawn = self._rng.choice(self._requests.functions())
        entry = self._requests.head(self._drawn)
        assert entry is not None, "only buckets that hold something are drawn"
        if entry[1] > view.now_us:
            self._spent, self._drawn = step, ""
            return None
        job = next((job for job in self.oldest_requests(view) if job.function == self._drawn), None)
        device = self.first_free(view, job) if job is not None else None
        if job is None or device is None:
            return None  # it arrives in this instant, and we are asked again then
        self._requests.left.remove(entry)
        self._drawn = ""
        return job, device
