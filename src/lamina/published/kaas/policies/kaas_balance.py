"""KaaS, balance: one queue, any free GPU.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6. The oldest request goes to the GPU that has been free
longest. Work-conserving, blind to what a GPU has in its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.published.kaas.whole_gpu_policy import WholeGpuPolicy


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """First come, first served, on whichever GPU has been free longest."""

    def choose(self, view: View) -> tuple[Job, Device] | None:
        for job in sorted(self.oldest_requests(view), key=lambda job: job.id):
            device = self.first_free(view, job)
            if device is not None:
                return job, device
        return None
