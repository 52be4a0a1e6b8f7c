"""KaaS, affinity: completely fair queueing over models, which prefer the GPUs they are on.

Source: the scheduler of KaaS. Every model has a virtual time, which grows by the GPU time it is given; the one that is
furthest behind goes next. On a GPU that is not one of its own it is weighed as if it were ten requests further on, so
it goes there only when the others have been served well. A model that was idle starts at the time of the one furthest
behind: idle time is no credit. Each model is given to the GPU with fewest models (least memory taken), until every GPU has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.published.kaas.whole_gpu_policy import WholeGpuPolicy, can_host, request_us


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """The model that has had least goes next, on its own GPU if that is free."""

    penalty: float = 10.0  #: requests that a model counts as further on where it is not at home
    _used_us: dict[str, float] = field(default_factory=dict, init=False)  #: virtual time of each model that is not idle
    _served: dict[str, int] = field(default_factory=dict, init=False)  #: when it was last served, as a count
    _homes: dict[str, set[str]] = field(default_factory=dict, init=False)  #: model -> GPUs
    _dealt: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), init=False)

    def choose(self, view: View) -> tuple[Job, Device] | None:
        self._assign_homes(view)
        heads = {job.function: job for job in self.oldest_requests(view)}
        busy = {name for name, function in view.functions.items() if len(function.queue) or _runs(view, name)}
        self._used_us = {name: had for name, had in self._used_us.items() if name in busy}
        least_us = min(self._used_us.values(), default=0.0)
        for name in heads:
            self._used_us.setdefault(name, least_us)
        best: tuple[float, int, int] | None = None
        choice: tuple[Job, Device] | None = None
        for place, device in enumerate(self.free_gpus(view)):
            for name, job in heads.items():
                if self.can_run_on(view, job, device):
                    away = self.penalty if device.spec.id not in self._homes[name] else 0.0
                    key = (self._used_us[name] + away * request_us(view, name, device), self._served.get(name, 0), place)
                    if best is None or key < best:
                        best, choice = key, (job, device)
        if choice is not None:
            job, device = choice
            self._used_us[job.function] += request_us(view, job.function, device)
            self._served[job.function] = self._count + 1
        return choice

    def _assign_homes(self, view: View) -> None:
        dealt = (tuple(view.functions), tuple(view.devices))
        if dealt == self._dealt:
            return
        self._dealt = dealt
        self._homes = {name: set() for name in view.functions}
        models = dict.fromkeys(view.devices, 0)
        taken = dict.fromkeys(view.devices, 0.0)

        def give(name: str, gpu: str) -> None:
            self._homes[name].add(gpu)
            models[gpu] += 1
            taken[gpu] += view.functions[name].spec.memory_mib / max(1, view.devices[gpu].spec.memory_mib)

        for name, function in view.functions.items():
            able = [gpu for gpu, device in view.devices.items() if can_host(function.spec, device.spec)]
            if able:
                give(name, min(able, key=lambda gpu: (models[gpu], taken[gpu])))
        for gpu, device in view.devices.items():
            able = [name for name, function in view.functions.items() if can_host(function.spec, device.spec)]
            if able and not models[gpu]:
                give(min(able, key=lambda name: len(self._homes[name])), gpu)


def _runs(view: View, name: str) -> bool:
    return any(instance.batches for instance in view.functions[name].instances.values())
