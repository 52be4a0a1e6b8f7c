"""Completion-time estimate of the default policy: when would a call that arrives now be done, if slices are chosen freely?

Behind the queue, batch by batch in the most economical way its goal allows, as running batches give their units back. If
that is too late, once more with batches as large as the goal allows, and with the fastest way there is: a goal that only a
large slice can meet is met by one. What other functions have waiting is taken as a fluid over the devices they share. For a
workflow everything is: what waits, runs or is sure to come, then its own path, the faster the less there is to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.workflow.flow import Flow
from lamina.planner.frontier import Frontier
from lamina.policies.frontier.backlog_model import BacklogModel
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.capacity_cache import CapacityCache
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import PlanCache

PACKING_EFFICIENCY = 0.7
"""Part of a device that work with a deadline can fill in time: what is left over comes from batches that do not fit together."""


@dataclass(frozen=True, slots=True)
class CompletionEstimator:
    menus: ConfigTables
    plans: PlanCache
    fluid: BacklogModel
    ways: CapacityCache

    def estimate_us(self, view: View, function: FunctionState, allowed_us: int, within_us: int) -> int:
        """Time until a job joining the queue now would be done, the first found `within_us` or the least there is; 0 while its
        latency is unknown."""
        ahead = len(function.queue) + 1
        known = self.ways.capacity_of(view, function, allowed_us)
        if not known.ways:
            return self._cold_us(view, function, ahead) if known.cold else 0
        best_us = 0
        for part, menu, places, picks in known.ways:
            others_us = self.fluid.competing_work_us(view, function, places, allowed_us)
            share = max(1, math.ceil(ahead * part))
            for pick in picks:
                us = others_us + self._queue_delay_us(view, function, places, menu, pick, share)
                best_us = min(best_us, us) if best_us else us
                if best_us <= within_us:
                    return best_us
        return best_us

    def _queue_delay_us(
        self, view: View, function: FunctionState, places: list[Instance], menu: ConfigTable, pick: BatchConfig, ahead: int
    ) -> int:
        """Behind its own queue, in batches like this one; units come back as what runs now ends."""
        units = pick.units
        free, total, ends = _supply(view, function, places, units)
        most = min(menu.max_batch, max(pick.batch, 1))
        before = (ahead - 1) // most
        per_round = max(1, total // units)
        rounds, place = divmod(before, per_round)
        need = (place + 1) * units
        wait_us = 0
        if need > free:
            ends.sort()
            for ends_us, count in ends:
                free += count
                if need <= free:
                    wait_us = max(0, ends_us - view.now_us)
                    break
        joined = ahead - before * most + int(wait_us / max(1.0, function.arrivals.interarrival_us))
        count = most if before or joined >= most else joined
        last_us = menu.latency_us(count, units, pick.cores) if count != pick.batch else pick.time_us
        return wait_us + rounds * pick.time_us + last_us

    def _cold_us(self, view: View, function: FunctionState, ahead: int) -> int:
        """With no instance: the load comes first."""
        best_us = 0
        seen: set[int] = set()
        for device in view.devices.values():
            if not function.spec.fits_family(device.spec.family):
                continue
            menu = self.menus.table_for(view, function, device)
            if id(menu) in seen or not menu.is_known:
                continue
            seen.add(id(menu))
            fastest = menu.fastest(ahead)
            if fastest is not None:
                us = view.predictor.load_us(function.spec.name, device.spec.kind) + fastest.time_us * -(-ahead // menu.max_batch)
                best_us = min(best_us, us) if best_us else us
        return best_us

    def workflow_estimate_us(self, view: View, flow: Flow, allowed_us: int, tight: bool) -> int:
        """Time until a run that starts now would be done; 0 while the latency of a step is unknown.

        In overload (`tight`), what runs in flight will bring is ahead of it as well; else that comes no faster than it is served.
        """
        whole = self.plans.whole_frontier(view, flow)
        if whole is None:
            return 0
        hosts = {name: self.fluid.paying_hosts(view, view.functions[name]) for name in flow.functions}
        work_us = self._work_ahead_us(view, flow, hosts, allowed_us, tight)
        block_us = max([min([_until_free_us(view, host) for host in those]) for those in hosts.values() if those], default=0)
        load_us = max([_load_us(view, view.functions[name]) for name in flow.functions], default=0)
        return max(int(work_us / PACKING_EFFICIENCY), block_us + load_us + _path_us(whole, allowed_us, tight))

    def _work_ahead_us(self, view: View, flow: Flow, hosts: dict[str, dict[str, None]], allowed_us: int, tight: bool) -> float:
        """What is to be done before it where that is most, of the steps that every run comes to."""
        look = self.fluid.snapshot(view, allowed_us, tight)
        unsure_us = sum(look.own_us.get(name, 0.0) for name, times in flow.expected_jobs.items() if times < 1)
        work_us = 0.0
        for name, those in hosts.items():
            if those and flow.expected_jobs[name] >= 1:
                work_us = max(work_us, min([look.backlog_us(view, host) for host in those]) - unsure_us)
        return work_us


def _supply(view: View, function: FunctionState, places: list[Instance], units: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Units that are free where it stands, units there are, and when how many come back."""
    free = total = 0
    ends: list[tuple[int, int]] = []
    for instance in places:
        device = view.devices[instance.device]
        limit = device.spec.limits.batches_per_instance
        if instance.phase is InstancePhase.LOADING:
            size = units * limit if limit else device.spec.units
            ends.append((instance.created_us + view.predictor.load_us(function.spec.name, device.spec.kind), size))
            total += size
        elif limit or not device.spec.limits.per_batch:
            lanes = max(1, limit)
            total += units * lanes
            free += units * max(0, lanes - instance.running)
            ends += [(batch.expected_end_us, units) for batch in instance.batches.values() if batch.started_us >= 0]
        else:
            total += device.spec.units
            free += device.spec.units - device.busy.bit_count()
            ends += [(view.batches[batch_id].expected_end_us, mask.bit_count()) for batch_id, mask in device.running.items()]
    return free, total, ends


def _until_free_us(view: View, host: str) -> int:
    """Until the device has a unit to spare."""
    device = view.devices[host]
    if device.busy != device.all_units:
        return 0
    return max(0, min(view.batches[batch_id].expected_end_us for batch_id in device.running) - view.now_us)


def _load_us(view: View, function: FunctionState) -> int:
    """Until it stands somewhere, if it does not."""
    if any(instance.phase is InstancePhase.WARM for instance in function.instances.values()):
        return 0
    kinds = {device.spec.kind for device in view.devices.values() if function.spec.fits_family(device.spec.family)}
    return min((view.predictor.load_us(function.spec.name, kind) for kind in kinds), default=0)


def _path_us(whole: Frontier, allowed_us: int, tight: bool) -> int:
    """Its own path: the fastest there is, or, where there is no room for that, one that costs little more than it must."""
    least = 1.25 * whole.cost_within(allowed_us) if tight else math.inf
    if least >= 1e300:
        return whole.fastest_us
    return max(whole.fastest_us, min(int(whole.time_us[int((whole.cost > least).sum())]), allowed_us // 2))
