"""When would what arrives now be done, if batches and slices are chosen freely?

Behind the queue, batch by batch in the most economical way its goal allows, as running batches give their units back. If
that is too late, once more with batches as large as the goal allows, and with the fastest way there is: a goal that only a
large slice can meet is met by one. What other
functions have waiting is taken as a fluid over the devices they share. For a workflow everything is: what waits, runs or is
sure to come, then its own path, the faster the less there is to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lamina.core.flow import Flow
from lamina.core.lifecycle import Phase
from lamina.core.policy import View
from lamina.core.state import FunctionState, Instance
from lamina.planner.cheapest.ahead import Plans
from lamina.planner.cheapest.kinds import Kinds
from lamina.planner.cheapest.menu import Menu, Pick
from lamina.planner.cheapest.seats import Menus

FRESH_US = 1_000
"""How long a look at all queues is good for: one per arrival would cost as much as there are functions."""

WAYS_US = 5_000
"""Likewise for the ways in which a function can be run."""

PACKED = 0.7
"""Part of a device that work with a deadline can fill in time: what is left over comes from batches that do not fit together."""

HOSTS = 16
"""Instances looked at one by one; with more the first tell enough."""


@dataclass(slots=True)
class _Look:
    """Work that waits and is due within some time."""

    delay_us: dict[str, float] = field(default_factory=dict)  #: per device
    own_us: dict[str, float] = field(default_factory=dict)  #: per function, its part on each of its devices
    running_us: dict[str, float] = field(default_factory=dict)  #: per device, what runs there already


@dataclass(slots=True)
class _Ways:
    """How a function can be run where it stands."""

    until_us: int
    basis: tuple[int, int, int]
    cold: bool  #: it stands nowhere
    kinds: list[tuple[float, Menu, list[Instance], list[Pick]]] = field(default_factory=list)
    #: per kind of device: its part of the queue, the menu, the instances there, and the batches to count with


@dataclass(slots=True)
class Offers:
    menus: Menus
    plans: Plans
    kinds: Kinds
    _flows: int = -1  #: how many there were when these were collected
    _goals_us: dict[str, list[int]] = field(default_factory=dict)  #: per function, of the workflows that call it
    _parts_us: dict[str, int] = field(default_factory=dict)  #: per function in workflows, its part of the time of a call
    _ways: dict[str, _Ways] = field(default_factory=dict)
    _at_us: int = -1
    _looks: dict[tuple[int, bool], _Look] = field(default_factory=dict)  #: by the logarithm of how far ahead

    def finish_us(self, view: View, function: FunctionState, allowed_us: int, within_us: int) -> int:
        """Time until a job joining the queue now would be done, the first found `within_us` or the least there is; 0 if nobody
        knows how long it takes."""
        ahead = len(function.queue) + 1
        ways = self._ways_of(view, function, allowed_us)
        if not ways.kinds:
            return self._cold_us(view, function, ahead, allowed_us) if ways.cold else 0
        best_us = 0
        for part, menu, mine, picks in ways.kinds:
            others_us = self._others_us(view, function, mine, allowed_us)
            share = max(1, math.ceil(ahead * part))
            for pick in picks:
                us = others_us + self._behind_us(view, function, mine, menu, pick, share)
                best_us = min(best_us, us) if best_us else us
                if best_us <= within_us:
                    return best_us
        return best_us

    def _ways_of(self, view: View, function: FunctionState, allowed_us: int) -> _Ways:
        """As they were a moment ago, unless an instance has come or gone since. Calls have a few microseconds more or less, by
        how long they took to get here: that much does not matter."""
        name = function.spec.name
        basis = (allowed_us >> max(0, allowed_us.bit_length() - 5), function.loads, len(function.instances))
        ways = self._ways.get(name)
        if ways is None or view.now_us >= ways.until_us or ways.basis != basis:
            ways = self._ways[name] = self._make_ways(view, function, allowed_us, basis)
        return ways

    def _make_ways(self, view: View, function: FunctionState, allowed_us: int, basis: tuple[int, int, int]) -> _Ways:
        places = [i for i in function.instances.values() if i.phase is Phase.WARM or i.phase is Phase.LOADING][:HOSTS]
        found: dict[int, tuple[Menu, list[Instance]]] = {}
        for place in places:
            menu = self.menus.of(view, function, view.devices[place.device])
            found.setdefault(id(menu), (menu, []))[1].append(place)
        paces = [_pace(view, menu, menu.economical(allowed_us), mine) for menu, mine in found.values()]
        ways = _Ways(view.now_us + WAYS_US if all(paces) and places else 0, basis, not places)
        if all(paces):
            for pace, (menu, mine) in zip(paces, found.values(), strict=True):
                picks = (menu.economical(allowed_us), menu.best(menu.most, allowed_us), menu.fastest())
                ways.kinds.append((pace / sum(paces), menu, mine, [pick for pick in dict.fromkeys(picks) if pick is not None]))
        return ways

    def _behind_us(self, view: View, function: FunctionState, places: list[Instance], menu: Menu, pick: Pick, ahead: int) -> int:
        """Behind its own queue, in batches like this one; units come back as what runs now ends."""
        now_us, units = view.now_us, pick.units
        free = total = 0
        ends: list[tuple[int, int]] = []
        for instance in places:
            device = view.devices[instance.device]
            limit = device.spec.limits.batches_per_instance
            if instance.phase is Phase.LOADING:
                size = units * limit if limit else device.spec.units
                ends.append((instance.since_us + view.predictor.load_us(function.spec.name, device.spec.kind), size))
                total += size
            elif limit or not device.spec.limits.per_batch:
                lanes = max(1, limit)
                total += units * lanes
                free += units * max(0, lanes - instance.running)
                ends += [(batch.ends_us, units) for batch in instance.batches.values() if batch.started_us >= 0]
            else:
                total += device.spec.units
                free += device.spec.units - device.busy.bit_count()
                ends += [(view.batches[batch_id].ends_us, mask.bit_count()) for batch_id, mask in device.running.items()]
        most = min(menu.most, max(pick.batch, 1))
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
                    wait_us = max(0, ends_us - now_us)
                    break
        joined = ahead - before * most + int(wait_us / max(1.0, function.meter.gap_us))
        count = most if before or joined >= most else joined
        last_us = menu.latency_us(count, units, pick.cores) if count != pick.batch else pick.time_us
        return wait_us + rounds * pick.time_us + last_us

    def _cold_us(self, view: View, function: FunctionState, ahead: int, allowed_us: int) -> int:
        """With no instance: the load comes first."""
        best_us = 0
        seen: set[int] = set()
        for device in view.devices.values():
            if not function.spec.fits_family(device.spec.family):
                continue
            menu = self.menus.of(view, function, device)
            if id(menu) in seen or not menu.known:
                continue
            seen.add(id(menu))
            fastest = menu.fastest(ahead)
            if fastest is not None:
                us = view.predictor.load_us(function.spec.name, device.spec.kind) + fastest.time_us * -(-ahead // menu.most)
                best_us = min(best_us, us) if best_us else us
        return best_us

    # ---------------------------------------------------------------- workflows

    def flow_finish_us(self, view: View, flow: Flow, allowed_us: int, tight: bool) -> int:
        """Time until a run that starts now would be done; 0 while nobody knows how long a step takes.

        While there is more to do than can be done (`tight`), what runs in flight will bring is ahead of it as well; else that
        comes no faster than it is served.
        """
        whole = self.plans.whole(view, flow)
        if whole is None:
            return 0
        look = self._look(view, allowed_us, tight)
        work_us = block_us = load_us = 0.0
        unsure_us = sum(look.own_us.get(name, 0.0) for name, times in flow.visits.items() if times < 1)
        for name in flow.functions:
            function = view.functions[name]
            hosts = self._used(view, function)
            if hosts:
                behind_us = min(look.delay_us.get(host, 0.0) + _running_us(view, look, host) for host in hosts)
                work_us = max(work_us, behind_us - unsure_us) if flow.visits[name] >= 1 else work_us
                block_us = max(block_us, min(_until_free_us(view, host) for host in hosts))
            if not any(i.phase is Phase.WARM for i in function.instances.values()):
                kinds = {d.spec.kind for d in view.devices.values() if function.spec.fits_family(d.spec.family)}
                load_us = max(load_us, min((view.predictor.load_us(name, kind) for kind in kinds), default=0))
        path_us = whole.fastest_us
        if tight:
            least = 1.25 * whole.cost_within(allowed_us)
            path_us = (
                max(path_us, min(int(whole.time_us[int((whole.cost > least).sum())]), allowed_us // 2))
                if least < 1e300
                else path_us
            )
        return max(int(work_us / PACKED), int(block_us + load_us) + path_us)

    # ------------------------------------------------------------------ demand

    def hosts(self, view: View, flow: Flow) -> list[str]:
        """The devices of its heaviest function."""
        if not flow.functions:
            return []
        function = view.functions[flow.functions[0]]
        return list({instance.device: None for instance in function.instances.values()})

    def _used(self, view: View, function: FunctionState) -> dict[str, None]:
        """The devices it is served on: those of a kind that pays."""
        hosts = dict.fromkeys(one.device for one in function.instances.values() if one.phase is not Phase.DRAINING)
        dear = self.kinds.dear(function.spec.name)
        return {host: None for host in hosts if view.devices[host].spec.kind not in dear} if dear else hosts

    def work(self, view: View, flow: Flow) -> dict[str, float]:
        """Unit-microseconds one call takes on each device, in full batches."""
        total: dict[str, float] = {}
        for name, times in flow.visits.items():
            function = view.functions[name]
            paces = self._paces(view, function, self._part_us(view, flow, name))
            for host in paces:  # as much of each as it can do of it
                total[host] = total.get(host, 0.0) + times * view.devices[host].spec.units / sum(paces.values())
        return total

    def _part_us(self, view: View, flow: Flow, name: str) -> int:
        """What falls to one function of the time a call has: as much as its part of the fastest way through."""
        slo_us = flow.slo.latency_us
        whole = self.plans.whole(view, flow) if flow.single is None and slo_us else None
        if whole is None:
            return slo_us
        devices = [view.devices[instance.device] for instance in view.functions[name].instances.values()]
        fastest = [self.menus.of(view, view.functions[name], device).fastest() for device in devices[:1]]
        own_us = max((pick.time_us for pick in fastest if pick is not None), default=0)
        part_us = self._parts_us[name] = max(1, int(2 * slo_us * min(0.5, own_us / max(1, whole.fastest_us))))
        return part_us

    def _paces(self, view: View, function: FunctionState, allowed_us: int) -> dict[str, float]:
        """Per device it is on, how many jobs a microsecond all of it would do; none while nobody knows. Where no batch leaves
        half of the time for waiting, as many as run alone: who has waited for a slice has no time left for a larger one."""
        paces: dict[str, float] = {}
        for host in self._used(view, function):
            device = view.devices[host]
            menu = self.menus.of(view, function, device)
            pick = menu.economical(allowed_us)
            if pick is not None and 0 < allowed_us < 2 * pick.time_us:
                pick = menu.fastest()
            if pick is not None:
                paces[host] = device.spec.units / max(1.0, menu.work(pick))
        return paces

    # ------------------------------------------------------------------- fluid

    def _sooner(self, view: View, name: str, allowed_us: int) -> float:
        """What part of the jobs to come is due within this time: runs in flight are as likely at their start as near their end,
        and who has a later deadline gives way."""
        if self._flows != len(view.flows):
            self._flows = len(view.flows)
            self._goals_us.clear()
            for flow in view.flows.values():
                if flow.single is None:
                    for function in flow.functions:
                        self._goals_us.setdefault(function, []).append(flow.slo.latency_us or flow.slo.timeout_us)
        goals_us = self._goals_us.get(name, ())
        return sum(min(1.0, allowed_us / goal_us) for goal_us in goals_us) / len(goals_us) if goals_us else 1.0

    def _others_us(self, view: View, function: FunctionState, places: list[Instance], allowed_us: int) -> int:
        """What other functions have waiting on its devices that is due sooner, where that is least."""
        if len(view.waiting) + len(view.held) <= 1:
            return 0
        look = self._look(view, allowed_us, True)
        own_us = look.own_us.get(function.spec.name, 0.0)
        return max(0, int(min(look.delay_us.get(place.device, 0.0) for place in places) - own_us))

    def _look(self, view: View, allowed_us: int, coming: bool) -> _Look:
        if self._at_us < 0 or view.now_us - self._at_us >= FRESH_US:
            self._at_us = view.now_us
            self._looks.clear()
        scale = (allowed_us.bit_length(), coming)
        look = self._looks.get(scale)
        if look is None:
            look = self._looks[scale] = self._work(view, allowed_us, coming)
        return look

    def _work(self, view: View, allowed_us: int, coming: bool) -> _Look:
        due_us = view.now_us + allowed_us
        look = _Look()
        for name, function in view.functions.items():
            jobs = function.queue.due_before(due_us) if len(function.queue) else 0.0
            if coming and function.coming > 0:
                jobs += function.coming * self._sooner(view, name, allowed_us)
            if not jobs:
                continue
            paces = self._paces(view, function, self._parts_us.get(name, function.spec.slo.latency_us))
            if paces:
                look.own_us[name] = own_us = jobs / sum(paces.values())
                for host in paces:
                    look.delay_us[host] = look.delay_us.get(host, 0.0) + own_us
        return look


def _pace(view: View, menu: Menu, pick: Pick | None, places: list[Instance]) -> float:
    """How many jobs a microsecond these instances serve; 0 if nobody knows."""
    if pick is None or not menu.known:
        return 0.0
    lanes = 0
    for place in places:
        limits = view.devices[place.device].spec.limits
        limited = limits.batches_per_instance or not limits.per_batch
        lanes += max(1, limits.batches_per_instance) if limited else max(1, menu.spec.units // pick.units)
    return lanes * pick.batch / max(1, pick.time_us)


def _running_us(view: View, look: _Look, host: str) -> float:
    """What runs on this device, spread over all of it."""
    found = look.running_us.get(host)
    if found is None:
        device = view.devices[host]
        left = 0.0
        for batch_id, mask in device.running.items():
            batch = view.batches[batch_id]
            share = mask.bit_count() / device.spec.units
            if batch.cores:
                share = max(share, batch.cores / device.spec.cores)
            left += max(0, batch.ends_us - view.now_us) * share
        found = look.running_us[host] = left
    return found


def _until_free_us(view: View, host: str) -> int:
    """Until the device has a unit to spare."""
    device = view.devices[host]
    if device.busy != device.everything:
        return 0
    return max(0, min(view.batches[batch_id].ends_us for batch_id in device.running) - view.now_us)
