"""KaaS, round robin: GPUs take turns.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6. There the oldest request waits for the GPU whose turn it
is even if all others are free, which is what makes it the worst of the five; `compat` keeps that. By default a busy GPU
loses its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.published.kaas.whole_gpu_policy import WholeGpuPolicy


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """The oldest request goes to the next GPU in turn that is free."""

    compat: bool = False  #: as published: wait for the GPU whose turn it is
    _turn: int = field(default=0, init=False)

    def choose(self, view: View) -> tuple[Job, Device] | None:
        names = list(view.devices)
        for job in sorted(self.oldest_requests(view), key=lambda job: job.id):
            for step in range(1 if self.compat else len(names)):
                device = view.devices[names[(self._turn + step) % len(names)]]
                if device.spec.id in self._free_order and self.can_run_on(view, job, device):
                    self._turn = (self._turn + step + 1) % len(names)
                    return job, device
            if self.compat:
                return None
        return None
