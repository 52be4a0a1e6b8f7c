"""Feasibility of a run: if the slowest item of a map cannot meet the deadline, drop the run before spending time on others.

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
from lamina.policies.frontier.config_table import ConfigTable, ConfigTables

HOPE = 0.75
"""Of the times that are planned with: those are seldom exceeded, so with less there is still something to be hoped for."""

RECHECK_PART = 16
"""A feasible run is checked again when such a part of the time it has left is gone: counting a thousand items for each of their
batches would take longer than choosing the batch."""


@dataclass(slots=True)
class RunFeasibility:
    """Whether a run is still worth its time."""

    tables: ConfigTables
    _checked: dict[str, tuple[str, int]] = field(default_factory=dict)  #: by function: the call last asked about, and until when

    def is_infeasible(self, view: View, function: FunctionState, head: Job) -> bool:
        """Whether the jobs of its run that wait here cannot all end in time any more."""
        name, call, now_us = function.spec.name, head.run.call.id, view.now_us
        if len(head.run.jobs) < 2:
            return False
        checked, until_us = self._checked.get(name, ("", 0))
        if checked == call and now_us < until_us:
            return False
        if self._too_many(view, function, head):
            return True
        self._checked[name] = (call, now_us + (head.expires_us - now_us) // RECHECK_PART)
        return False

    def _too_many(self, view: View, function: FunctionState, head: Job) -> bool:
        missing = sum(job.is_queued and job.function == head.function for job in head.run.jobs.values())
        if missing < 2:
            return False
        instances: dict[str, int] = {}  #: by device
        for instance in function.instances.values():
            if instance.phase is InstancePhase.WARM:
                instances[instance.device] = instances.get(instance.device, 0) + 1
        for device_id, count in instances.items():
            device = view.devices[device_id]
            at_once = count * (function.batches_at_once(device) or device.spec.units)
            table = self.tables.table_for(view, function, device)
            missing -= _in_time(view, device, table, at_once, missing, head.expires_us)
            if missing <= 0:
                return False
        return True


def _in_time(view: View, device: Device, table: ConfigTable, at_once: int, wanted: int, until_us: int) -> int:
    """How many of so many jobs can end here by then, in so many batches side by side at most."""
    free_us = sorted(_free_us(view, device))
    most = min(wanted, table.max_batch)
    best = 0 if table.is_known else wanted
    for size in table.unit_counts:
        latency_us = partial(_hoped_us, table, size)
        full_us = latency_us(most)
        if not full_us:
            continue  # its latency is unknown, so no batch will have that slice
        found = 0
        for last in range(size - 1, min(at_once * size, len(free_us)), size):
            rounds, left_us = divmod(max(0, until_us - free_us[last]), full_us)
            found += rounds * most + largest_batch_within(most, left_us, latency_us)
        best = max(best, found)
        if best >= wanted:
            break
    return best


def _hoped_us(table: ConfigTable, units: int, batch: int) -> int:
    return int(HOPE * table.latency_us(batch, units, table.core_counts[-1]))


def _free_us(view: View, device: Device) -> list[int]:
    """Of every unit, when what is running on it, and booked behind that, has ended."""
    free_us = [view.reach_us(device)] * device.spec.units
    for batch_id in device.running:
        batch = view.batches[batch_id]
        mask, end_us = batch.mask, batch.expected_end_us
        while batch.follower is not None:
            batch = batch.follower
            end_us = max(view.now_us, end_us) + batch.predicted_us
        for unit in range(device.spec.units):
            if mask >> unit & 1:
                free_us[unit] = max(free_us[unit], end_us)
    return free_us
