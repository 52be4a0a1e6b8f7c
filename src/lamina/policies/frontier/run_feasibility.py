"""Feasibility of a run: if the slowest item of a map cannot meet the deadline, drop the run before spending time on the others.

Jobs of one run that wait for the same function, such as the lines of a page, are all needed. So a run is asked about as a
whole. The answer is generous: nothing but what is running or committed already is in its way, and its slices are of whatever
size lets most of its jobs end in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import largest_batch_within
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.config_table import ConfigTable

HOPE = 0.75
"""Of the times that are planned with: those are seldom exceeded, so with less there is still something to be hoped for."""

AGAIN = 16
"""A run that can be in time is asked about again when such a part of the time it has left is gone: counting a thousand items
for each of their batches would take longer than choosing the batch."""


@dataclass(slots=True)
class RunFeasibility:
    menus: ConfigTables
    _asked: dict[str, tuple[str, int]] = field(default_factory=dict)  #: by function: the call last asked about, and until when

    def is_infeasible(self, view: View, function: FunctionState, head: Job) -> bool:
        """Whether the jobs of its run that wait here cannot all end in time any more."""
        name, call, now_us = function.spec.name, head.run.call.id, view.now_us
        if len(head.run.jobs) < 2:
            return False
        asked, until_us = self._asked.get(name, ("", 0))
        if asked == call and now_us < until_us:
            return False
        if self._too_many(view, function, head):
            return True
        self._asked[name] = (call, now_us + (head.expires_us - now_us) // AGAIN)
        return False

    def _too_many(self, view: View, function: FunctionState, head: Job) -> bool:
        missing = sum(not job.batch_id and job.function == head.function for job in head.run.jobs.values())
        if missing < 2:
            return False
        standing: dict[str, int] = {}  #: how many instances, by device
        for instance in function.instances.values():
            if instance.phase is InstancePhase.WARM:
                standing[instance.device] = standing.get(instance.device, 0) + 1
        for device_id, count in standing.items():
            device = view.devices[device_id]
            lanes = count * (function.batches_at_once(device) or device.spec.units)
            missing -= _in_time(view, device, self.menus.table_for(view, function, device), lanes, missing, head.expires_us)
            if missing <= 0:
                return False
        return True


def _in_time(view: View, device: Device, menu: ConfigTable, lanes: int, wanted: int, until_us: int) -> int:
    """How many of so many jobs can end here by then, in so many batches side by side at most."""
    free_us = sorted(_free_us(view, device))
    most = min(wanted, menu.max_batch)
    best = 0 if menu.is_known else wanted
    for size in menu.unit_counts:
        latency_us = partial(_latency_us, menu, size)
        full_us = latency_us(most)
        if not full_us:
            continue  # nobody knows how long it takes, so no batch will have that slice
        found = 0
        for last in range(size - 1, min(lanes * size, len(free_us)), size):
            rounds, left_us = divmod(max(0, until_us - free_us[last]), full_us)
            found += rounds * most + largest_batch_within(most, left_us, latency_us)
        best = max(best, found)
        if best >= wanted:
            break
    return best


def _latency_us(menu: ConfigTable, units: int, batch: int) -> int:
    return int(HOPE * menu.latency_us(batch, units, menu.core_counts[-1]))


def _free_us(view: View, device: Device) -> list[int]:
    """Of every unit, when what is running on it, and booked behind that, has ended."""
    free_us = [view.now_us] * device.spec.units
    for batch_id in device.running:
        batch = view.batches[batch_id]
        mask, ends_us = batch.mask, batch.expected_end_us
        while batch.follower is not None:
            batch = batch.follower
            ends_us = max(view.now_us, ends_us) + batch.predicted_us
        for unit in range(device.spec.units):
            if mask >> unit & 1:
                free_us[unit] = max(free_us[unit], ends_us)
    return free_us
