"""Shortest batch first: the batch that is done soonest goes first. Mean latencies are short; long batches wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lamina.core.policy import Decision, Defer, Drop, Start, View
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.types import NEVER_US


@dataclass(frozen=True, slots=True)
class Policy:
    """Shortest batch first."""

    most: int = 8  #: jobs in a batch, at most
    order: Order = "arrival"

    def dispatch(self, view: View) -> Iterator[Decision]:
        for function in sorted(view.waiting.values(), key=lambda function: self._time_us(view, function)):
            yield from self._serve(view, function)

    def _serve(self, view: View, function: FunctionState) -> Iterator[Decision]:
        for opening in view.slots(function):
            while len(function.queue) and function.queue.head().expires_us <= view.now_us:
                yield Drop(function.queue.head())
            jobs = function.queue.first(min(self.most, function.spec.max_batch))
            if not jobs:
                return
            us = view.latency_us(function.spec.name, opening.device, len(jobs), opening.units)
            in_time = [job for job in jobs if opening.at_us + us <= job.expires_us]
            if opening.behind is None and in_time:
                yield Start(in_time, opening, why=f"{len(in_time)} jobs, {us} us" if view.explain else "")
        if len(function.queue):  # ask again when something changes on one of its devices, or the first job is lost
            yield Defer(function.spec.name, min(function.queue.head().expires_us, NEVER_US), NEVER_US)

    def _time_us(self, view: View, function: FunctionState) -> int:
        """On the first device that has an instance of it; without one there is no opening either."""
        for instance in function.instances.values():
            count = min(len(function.queue), self.most, function.spec.max_batch)
            return view.latency_us(function.spec.name, view.devices[instance.device], count, instance.units)
        return 0
