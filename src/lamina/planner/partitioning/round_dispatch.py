"""Dispatch by duty cycle: batches of the planned size, closed at the latest after one round.

A function with several places is served by the idle one that has done least of its share. On a slice that several
functions use, the most urgent one that is ready has its turn. A job that cannot be in time any more is let go; while more
wait than fit into a batch, so is one for which the batch would have to shrink. Functions the plan leaves out are served by
`planner/partitioning/unplanned.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, Defer, Drop, Slot, Start, View
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.batching import batchable_prefix, largest_batch_within
from lamina.planner.partitioning.plan_rollout import PlanRollout
from lamina.planner.partitioning.slice_placement import PlacedTurn
from lamina.planner.partitioning.unplanned import serve_unplanned
from lamina.types import NEVER_US


@dataclass(slots=True)
class RoundDispatcher:
    _served: dict[str, float] = field(default_factory=dict)  #: instance -> requests served, over its planned rate

    def dispatch(self, view: View, rollout: PlanRollout) -> Iterator[Decision]:
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().due_us, f.queue.head().id)):
            while len(function.queue):
                ready_us = function.bucket.ready_at_us(view.now_us) if function.bucket else 0
                if ready_us > view.now_us:
                    yield Defer(function.spec.name, ready_us, NEVER_US)
                    break
                idle = self._idle(view, function, rollout)
                if not idle:
                    yield from serve_unplanned(view, function, rollout.turn_of)
                    break
                held = yield from self._serve(view, function, idle)
                if held:
                    break

    def reset(self) -> None:
        """A new plan: shares are counted anew."""
        self._served.clear()

    def _idle(self, view: View, function: FunctionState, rollout: PlanRollout) -> list[tuple[Instance, PlacedTurn]]:
        found = []
        for instance in function.instances.values():
            place = rollout.turn_of.get(instance.id)
            if place is None or instance.phase is not InstancePhase.WARM:
                continue
            device = view.devices[instance.device]
            home = device.homes.get(instance.id, 0)
            cores = function.spec.cores_on(device.spec)
            able = home and not home & device.busy and cores <= device.cores_free and instance.has_capacity(1)
            if able and home.bit_count() <= view.max_units_by_bandwidth(function, device):
                found.append((instance, place))
        return found

    def _serve(
        self, view: View, function: FunctionState, idle: list[tuple[Instance, PlacedTurn]]
    ) -> Generator[Decision, None, bool]:
        """One batch, or a hold (then it returns True)."""
        waiting, head = len(function.queue), function.queue.head()
        idle.sort(key=lambda pair: (pair[1].turn.batch > waiting, self._served.get(pair[0].id, 0.0), pair[0].id))
        instance, place = idle[0]
        batch = min(place.turn.batch, function.spec.max_batch)
        if waiting < batch:
            way_us = view.devices[instance.device].way_us
            by_us = min(head.due_us, head.expires_us) - place.cut.busy_us - way_us
            close_us = min(head.enqueued_us + place.cut.duty_us, by_us)
            if close_us > view.now_us:
                yield Defer(function.spec.name, close_us, batch)
                return True
        device = view.devices[instance.device]
        cores = function.spec.cores_on(device.spec)
        jobs = batchable_prefix(function.queue.first(batch))

        def latency_us(count: int) -> int:
            return view.latency_us(function.spec.name, device, count, instance.units, cores) + view.transfer_us(
                jobs[:count], device
            )

        first = jobs[0]  # in a fair queue that need not be the head
        count = largest_batch_within(len(jobs), first.expires_us - view.reach_us(device), latency_us)
        if not count or (count < len(jobs) and waiting > batch):
            yield Drop(first)
            return False
        self._served[instance.id] = self._served.get(instance.id, 0.0) + count / max(1e-9, place.turn.per_s)
        opening = Slot(instance, device, device.homes[instance.id], None, view.reach_us(device), cores)
        why = f"planned batch {batch} every {place.cut.duty_us} us" if view.explain else ""
        yield Start(jobs[:count], opening, why)
        return False
