"""First come, first served: the plainest thing that batches. The baseline every other policy is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lamina.core.policy import Decision, Drop, Hold, Start, View
from lamina.core.queue import Order
from lamina.planner.batching import book_at_us, together
from lamina.types import NEVER_US


@dataclass(frozen=True, slots=True)
class Policy:
    """Oldest jobs first, as many as are there and fit; a job that cannot be in time any more is let go."""

    lead_us: int = 500  #: how long before a slice is free its next batch is committed
    order: Order = "arrival"

    def dispatch(self, view: View) -> Iterator[Decision]:
        now_us = view.now_us
        for function in list(view.waiting.values()):
            spec = function.spec
            queue = function.queue
            for opening in view.openings(function):
                count = min(len(queue), spec.max_batch)
                if not count:
                    break
                if opening.after is not None:
                    at_us = book_at_us(opening.at_us, count, spec.max_batch, self.lead_us)
                    if at_us > now_us:
                        yield Hold(spec.name, at_us, spec.max_batch)
                        break
                jobs = together(queue.first(count))
                late_from_us = opening.at_us + view.latency_us(spec.name, opening.device, len(jobs), opening.units)
                doomed = [job for job in jobs if job.expires_us < late_from_us]
                if doomed:
                    for job in doomed:
                        if job.id in job.run.jobs:
                            yield Drop(job)
                    jobs = [job for job in jobs if job.expires_us >= late_from_us and job.id in job.run.jobs]
                if jobs:
                    yield Start(jobs, opening)
            else:
                if len(queue):
                    # no opening until something ends or is loaded, except for the quota, which needs no event
                    bucket = function.bucket
                    yield Hold(spec.name, bucket.ready_us(now_us) if bucket else NEVER_US, NEVER_US)
