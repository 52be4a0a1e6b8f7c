"""KaaS, balance: one queue, any free GPU.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6. The oldest request goes to the GPU that has been free
longest. Work-conserving, blind to what a GPU has in its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.lease import Device
from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.policies._kaas import Kaas


@dataclass(slots=True)
class Policy(Kaas):
    """First come, first served, on whichever GPU has been free longest."""

    def next(self, view: View) -> tuple[Job, Device] | None:
        for job in sorted(self.heads(view), key=lambda job: job.id):
            device = self.first_free(view, job)
            if device is not None:
                return job, device
        return None
