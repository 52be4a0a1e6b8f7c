"""KaaS, shortest remaining time first.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6. Of all that wait, the request that takes least goes
first; a long one waits as long as short ones come. The published trace needs more: there the queue was loaded before the
clock started, so a short request that has not arrived yet blocks a long one that has. `compat` does that, with the
requests in `preloaded`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.published.kaas.whole_gpu_policy import PreloadedRequests, WholeGpuPolicy, request_us


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """The shortest first, on whichever GPU has been free longest."""

    compat: bool = False  #: as published: the queue holds `preloaded` from the start
    preloaded: tuple[tuple[str, int], ...] = ()  #: (function, arrival in microseconds)
    _book: PreloadedRequests = field(default_factory=lambda: PreloadedRequests([]), init=False)

    def __post_init__(self) -> None:
        self._book = PreloadedRequests(list(self.preloaded))

    def choose(self, view: View) -> tuple[Job, Device] | None:
        if self.compat:
            return self._as_published(view)
        for job in sorted(self.oldest_requests(view), key=lambda job: (self._needs_us(view, job.function), job.id)):
            device = self.first_free(view, job)
            if device is not None:
                return job, device
        return None

    def _needs_us(self, view: View, function: str) -> int:
        spec = view.functions[function].spec
        times = [request_us(view, function, d) for d in view.devices.values() if spec.fits_family(d.spec.family)]
        return min(times, default=0)

    def _as_published(self, view: View) -> tuple[Job, Device] | None:
        if not self._book.left:
            return None
        entry = min(self._book.left, key=lambda entry: (self._needs_us(view, entry[0]), entry[1]))
        job = next((job for job in self.oldest_requests(view) if job.function == entry[0]), None)
        device = self.first_free(view, job) if job is not None else None
        if job is None or device is None or entry[1] > view.now_us:
            return None
        self._book.left.remove(entry)
        return job, device
