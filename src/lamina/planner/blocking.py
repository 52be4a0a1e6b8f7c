"""Blocking rule: before a batch starts, every other function on the device keeps a way to start in time.

A batch cannot be taken back. So the question before a start is not only "is this one in time?" but "is every other function still
able to be?". Each function that is resident on the device and has an SLO tolerates a wait of

    tolerance = SLO - its own time on the units it needs - margin

until units are free for it. (A step of a workflow that is called has its part of the SLO of that, beside all that are no steps of
it: `StepGoals`.) A batch that holds its units for longer than that, the way to the device and back included, and for longer than
a few of the other's own batches take, may not take the units such a function would need: for each of them a block of the size it
runs on must be free, or become free within its tolerance, beside this batch and the blocks kept for the others. (What starts
there next is booked, and makes its own way while the batch before it runs.) How many blocks are kept for one follows its
demand: as many as its calls keep busy, rejected ones included, and at least one. A function whose jobs have most of their time
left takes what others do not need; after that it insists on an equal share of the device, so that under overload no function is
kept out by what others ask for. A function counts while it has been called lately or has a standing instance, and has no free
block on another device. Its home, if it has one, is the block that is kept: so a home is lent only to batches that end within the
owner's tolerance.

On a device that is asked for more than it can do, nothing is kept for those that ask for more than their share of it: not all of
their calls can be in time, whatever is kept, and units that are kept idle serve none. Those that ask for less are kept theirs.

What is kept is placed where it costs the batch least: on units that are not free yet but will be in time, else at the edge of the
free ones. Where longer batches run already and no block is free in time, the one that is free first is kept: else long batches
that end one after another would leave no whole block for ever. A function that fits on no part of the device beside what is kept
takes turns with the others: it may start once it has left the device alone for some times as long as it is about to hold it.

The rule gives way to a batch that has an SLO of its own and would be late by it, if others lose less than it does (`may_insist`):
on a device that is nearly idle, to be kept out for calls that hardly ever come is a promise broken for nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from lamina.core.lifecycle import WARM
from lamina.core.policy import Slot, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.slots import gives_way
from lamina.core.scheduling.state import Batch, FunctionState
from lamina.core.unit_blocks import aligned_starts, find_block
from lamina.planner.function_goals import StepGoals
from lamina.types import NEVER_US

FRESH_US = 20_000
"""How long what functions on a device tolerate is good for."""

MOST_AT_ONCE = 32
"""Functions whose claims are worked out at once: on a device with a thousand of them, all would take longer than a call has."""

LATELY_US = 10_000_000
"""A function without a standing instance counts for so long after its last call."""

HEADROOM = 1.5
"""Arrivals come in bursts: blocks for so many times the mean."""

MAX_CHECKS = 20_000
"""Blocks looked at when claims are placed anew, some milliseconds: on devices of many units all ways could take for ever."""

MAX_LIMITS = 8
"""Of the times from which on a batch blocks one function more, so many are tried."""

TURN = 4
"""A function that fits beside nothing leaves the device to others for so many times as long as it holds it."""

AMPLE = 10
"""Times what a batch takes: a job with less time than that left is in no position to wait for others."""

PATIENCE = 0.5
"""Part of its time that a job may wait before its function insists on an equal share of the device."""

PEER = 3
"""Times what the batches of a function take: batches that are no longer do not block it, they take turns by deadline."""

SAFETY = 0.05
"""Part of an SLO that is left out of the tolerance: predictions that are a little off."""


class Claim(NamedTuple):
    """What a function must find within its tolerance: so many blocks of so many units, or its home."""

    tolerance_us: int
    function: str
    units: int
    blocks: int
    home: int = 0
    own_us: int = 0  #: what its own batches take
    workflow: str = ""  #: whose step it is, where that is what the tolerance follows from


class Holding(NamedTuple):
    """Units that are held until then."""

    mask: int
    until_us: int


class BlockingRule:
    """Claims on each device, worked out anew every so often."""

    def __init__(self, is_shed: Callable[[str, str], bool] = lambda device, function: False) -> None:
        """`is_shed`: whether a device is asked for more than it can do, and a function for more of it than its share."""
        self._claims: dict[str, DeviceClaims] = {}
        self._is_shed = is_shed
        self.step_goals = StepGoals()  #: what functions are to keep as steps of workflows
        self.blocked_us = -1  #: when units were last kept from a function

    def kept_units(self, view: View, function: FunctionState, device: Device, free: int, at_us: int, time_us: int) -> int:
        """Units that a batch of the function, which holds its own from `at_us` on for `time_us`, must leave to others.

        One that gives way leaves all of them, a segment after it was asked for."""
        for one in function.instances.values():
            if one.segment_us and one.device == device.spec.id and gives_way(function, one):
                return 0
        known = self._claims_on(view, device)
        if not known.least_us or known.least_us[0][0] >= time_us:
            return 0
        urgent = self._urgent_claims(view, function, device, time_us)
        held = [Holding(batch.mask, _end_us(batch)) for batch in (view.batches[number] for number in device.running)]
        kept = keep_units(device.spec.units, device.spec.limits.aligned, held, urgent, free, at_us)
        if not kept & free or self._takes_turn(view, function, device, time_us):
            return 0
        self.blocked_us = view.now_us
        return kept

    def _urgent_claims(self, view: View, function: FunctionState, device: Device, time_us: int) -> Iterator[Claim]:
        """Claims that a batch of that time must leave units to, found as they are asked for: of thousands, the first few may want
        all units. A run does not wait for itself; and where all workflows are in a hurry, their steps take turns by due time."""
        known, name, host, is_shed = self._claims_on(view, device), function.spec.name, device.spec.id, self._is_shed
        step_us, _ = self.step_goals.tightest(view.now_us, name)
        is_hurried = 0 < step_us < AMPLE * time_us
        urgent: Iterator[Claim] = (
            claim
            for claim in known.blocked_by(time_us)
            if claim.function != name
            and (claim.home or not is_shed(host, claim.function))
            and not (claim.workflow and (is_hurried or self.step_goals.is_step(name, claim.workflow)))
        )
        urgent = _one_per_workflow(urgent)
        if len(view.devices) > 1:
            urgent = (claim for claim in urgent if not _has_room_elsewhere(view, claim, device))
        if not _has_time(view, function, time_us):
            share = device.spec.units / known.count_with(name)
            urgent = (claim._replace(blocks=max(1, min(claim.blocks, int(share / claim.units + 0.5)))) for claim in urgent)
        return urgent

    def limits_us(self, view: View, function: FunctionState, device: Device, longer_us: int, within_us: int) -> list[int]:
        """Times that a batch may hold its units for: up to each of them it blocks the same functions, so what must be left to
        others is the same (`kept_units`). The longest first, from `within_us` down to more than `longer_us`."""
        name, least_us = function.spec.name, self._claims_on(view, device).least_us
        first, last = bisect_left(least_us, (longer_us + 1,)), bisect_left(least_us, (within_us,))
        times = sorted({us for us, claim in least_us[first:last] if claim.function != name} | {within_us}, reverse=True)
        return times if len(times) <= MAX_LIMITS else times[:: -(-len(times) // MAX_LIMITS)]

    def may_insist(self, view: View, function: FunctionState, device: Device, time_us: int) -> bool:
        """Whether a batch that would else be late may take what is kept for others: at the rate of its calls they lose less of
        their time by it, all of them together, than the whole of its own that it would lose by leaving it to them. Not one of a
        function that asks for more than its share: that loses calls whatever it takes. And not where it would keep an owner from
        its home in time: that is a guarantee."""
        if self._is_shed(device.spec.id, function.spec.name):
            return False
        gap_us = max(time_us, function.arrivals.offered_gap_us)
        lost = 0.0
        for claim in self.claims(view, device):
            if claim.function != function.spec.name and claim.tolerance_us < time_us:
                if claim.home:
                    return False
                lost += (time_us - claim.tolerance_us) / gap_us
        return lost < 1.0

    def spared_slot(self, view: View, function: FunctionState, slot: Slot, time_us: int) -> Slot | None:
        """The slot for a batch of that time; moved to units that others can spare, if need be, and None if there are none. For
        policies that take what a function asks for. Its own home is the function's to use."""
        device, instance = slot.device, slot.instance
        home = device.homes.get(instance.id, 0)
        if not time_us or len(device.instances) < 2 or (home and not slot.mask & ~home):
            return slot
        if slot.behind is not None:
            free, from_us, held_us = slot.behind.mask, slot.at_us, time_us
        else:
            free = device.all_units & ~device.busy & ~(view.reserved_units(instance, device) if device.homes else 0)
            from_us, held_us = view.now_us, time_us + device.way_us
        kept = self.kept_units(view, function, device, free, from_us, held_us) & ~home
        if not kept & slot.mask:
            return slot
        left_us = function.queue.head().due_us - view.now_us
        if is_pressed(left_us, time_us, device.way_us) and self.may_insist(view, function, device, time_us):
            return slot
        mask = find_block(free & ~kept, slot.units, device.spec.limits.aligned, device.spec.units)
        return replace(slot, mask=mask) if device.is_valid_slice(mask) else None

    def claims(self, view: View, device: Device) -> list[Claim]:
        """Most urgent first."""
        return self._claims_on(view, device).found

    def _claims_on(self, view: View, device: Device) -> DeviceClaims:
        known = self._claims.get(device.spec.id)
        if known is None:
            known = self._claims[device.spec.id] = DeviceClaims()
        if known.until_us <= view.now_us:
            known.refresh(view, device, self.step_goals)
        return known

    def _takes_turn(self, view: View, function: FunctionState, device: Device, time_us: int) -> bool:
        """Whether it could never run beside what is kept, and has left the device alone for long enough."""
        mine = [one for one in function.instances.values() if one.device == device.spec.id]
        if any(one.running or one.last_used_us + TURN * time_us > view.now_us for one in mine):
            return False
        return not self._fits_beside(view, function, device, time_us)

    def _fits_beside(self, view: View, function: FunctionState, device: Device, time_us: int) -> bool:
        """Whether one of its jobs could run on the empty device beside what is kept. On fewer units it takes longer, so more may
        be kept from it, until nothing is left or no more is asked for."""
        spec, limits, name = device.spec, device.spec.limits, function.spec.name
        least = most = function.spec.units_on(spec)  # without an SLO it gets what it asks for
        if function.spec.slo.latency_us and view.picks_slice_size and not limits.soft:
            least, most = min(limits.sizes, default=1), spec.units
        sizes = [size for size in limits.sizes or range(least, most + 1) if least <= size <= most]
        cores = function.spec.cores_on(spec) if spec.cores else 0
        while True:
            urgent = self._urgent_claims(view, function, device, time_us)
            left = device.all_units & ~keep_units(spec.units, limits.aligned, (), urgent, device.all_units, view.now_us)
            units = next((size for size in reversed(sizes) if find_block(left, size, limits.aligned, spec.units)), 0)
            if not units:
                return False
            own_us = view.latency_us(name, device, 1, units, cores) + device.way_us
            if own_us <= time_us:
                return True
            time_us = own_us


def _one_per_workflow(urgent: Iterable[Claim]) -> Iterator[Claim]:
    """The most urgent claim of each workflow: a run is at one step at a time."""
    seen = set()
    for claim in urgent:
        if not claim.workflow or claim.workflow not in seen:
            seen.add(claim.workflow)
            yield claim


def is_pressed(left_us: int, time_us: int, way_us: int) -> bool:
    """Whether a job with so much time left may ask for units that are kept for others (`may_insist`): a second batch like its own
    would no longer be in time after the one before it."""
    return left_us < 2 * time_us + way_us


def _has_time(view: View, function: FunctionState, time_us: int) -> bool:
    """Whether its most urgent job has most of its time left, and many times what it takes: until then it takes what others do not
    need."""
    if not function.spec.slo.latency_us or not len(function.queue):
        return False
    head = function.queue.head()
    return head.due_us - view.now_us > max(AMPLE * time_us, PATIENCE * (head.due_us - head.enqueued_us))


def keep_units(units: int, aligned: bool, held: Iterable[Holding], claims: Iterable[Claim], free: int, at_us: int) -> int:
    """Units to keep for these claims, most urgent first, at the least cost in free units.

    A claim is left out only if no way is found beside those before it: where taking the cheapest block for one leaves none
    for the next, all of them are placed anew. On devices of few units, such as a GPU in partitions, that search is complete.
    """
    held = list(held)
    everything = (1 << units) - 1
    kept, homes = 0, 0  #: all that is kept; and what of it has one place only
    placed: list[tuple[int, int]] = []  #: blocks that are kept: where they may be, and their size
    for claim in claims:
        if kept == everything:
            break
        if not claim.home and claim.units > (everything & ~kept).bit_count():
            continue  # in no order would all of them find a place
        left = everything & ~homes
        for one in held:
            if one.until_us > at_us + claim.tolerance_us:
                left &= ~one.mask
        if claim.home:
            if left & claim.home == claim.home and not kept & claim.home:
                homes |= claim.home
                kept |= claim.home
            continue
        for _ in range(claim.blocks):
            block = _cheapest_block(left & ~kept, free & ~kept, claim.units, units, aligned)
            wanted = tuple((where & ~homes, size) for where, size in (*placed, (left, claim.units)))
            if not block and (anew := _place(wanted, units, aligned)):
                kept = homes | anew
                placed.append((left, claim.units))
                continue
            if block:
                placed.append((left, claim.units))
            else:
                block = _soonest_block(held, everything & ~kept, free, claim.units, units, aligned)
                if not block:
                    break
                homes |= block
            kept |= block
    return kept


def _place(wanted: tuple[tuple[int, int], ...], units: int, aligned: bool) -> int:
    """Disjoint blocks for all of them, as one mask; 0 if there is no way, or none is found within a bounded search."""
    checks = MAX_CHECKS

    def search(left_over: tuple[tuple[int, int], ...]) -> int | None:
        nonlocal checks
        anywhere = 0
        for left, _ in left_over:
            anywhere |= left
        if anywhere.bit_count() < sum(size for _, size in left_over):
            return None
        if not left_over:
            return 0
        options = [[block for block in _blocks(size, units, aligned) if left & block == block] for left, size in left_over]
        checks -= sum(len(_blocks(size, units, aligned)) for _, size in left_over)
        number = min(range(len(options)), key=lambda index: len(options[index]))
        others = left_over[:number] + left_over[number + 1 :]
        for block in options[number]:
            found = search(tuple((left & ~block, size) for left, size in others)) if checks > 0 else None
            if found is not None:
                return found | block
        return None

    return search(wanted) or 0


def _cheapest_block(left: int, free: int, size: int, units: int, aligned: bool) -> int:
    """The block that takes the fewest free units; among those the one that leaves the longest row of them, from the end."""
    best, best_key = 0, (math.inf, 0)
    for block in _blocks(size, units, aligned):
        if left & block == block:
            key = ((block & free).bit_count(), -_longest_row(free & ~block))
            if key < best_key:
                best, best_key = block, key
    return best


def _soonest_block(held: list[Holding], left: int, free: int, size: int, units: int, aligned: bool) -> int:
    """The block that is free first; among those the one that takes the fewest free units."""
    best, best_key = 0, (NEVER_US, units)
    for block in _blocks(size, units, aligned):
        if left & block == block:
            key = (max([one.until_us for one in held if one.mask & block], default=0), (block & free).bit_count())
            if key < best_key:
                best, best_key = block, key
    return best


@lru_cache(maxsize=4096)
def _blocks(size: int, units: int, aligned: bool) -> tuple[int, ...]:
    """Slices of this size, from the end of the device."""
    block = (1 << size) - 1
    starts: Iterable[int] = aligned_starts(size, units) if aligned else range(units - size + 1)
    return tuple(block << start for start in sorted(starts, reverse=True))


def _longest_row(mask: int) -> int:
    length = 0
    while mask:
        mask &= mask << 1
        length += 1
    return length


def _end_us(batch: Batch) -> int:
    """Expected end of a running batch, with what is booked behind it."""
    return batch.expected_end_us + (batch.follower.predicted_us if batch.follower is not None else 0)


def _has_room_elsewhere(view: View, claim: Claim, device: Device) -> bool:
    """Whether the function of a claim stands on another device too, and has a free block there: it need not start here."""
    function = view.functions[claim.function]
    for host in function.instances_by_device:
        other = view.devices[host]
        if other is not device:
            free = other.all_units & ~other.busy
            if free.bit_count() >= claim.units and find_block(free, claim.units, other.spec.limits.aligned, other.spec.units):
                return any(one.device == host and one.phase is WARM for one in function.instances.values())
    return False


class DeviceClaims:
    """Claims on one device, in order. Where many functions are on it, they are worked out anew a part at a time."""

    __slots__ = ("_by_function", "_to_do", "found", "least_us", "until_us")

    def __init__(self) -> None:
        self.until_us = -1
        self.found: list[Claim] = []  #: most urgent first
        self.least_us: list[tuple[int, Claim]] = []  #: with the time from which on a batch blocks them, least first
        self._by_function: dict[str, Claim] = {}
        self._to_do: list[str] = []  #: functions that have not been looked at in this round

    def blocked_by(self, time_us: int) -> Iterator[Claim]:
        """Those that a batch of this time would keep from being in time, most urgent first."""
        for claim in self.found:
            if claim.tolerance_us >= time_us:
                return  # and so have all the others
            if _blocking_us(claim) < time_us:
                yield claim

    def count_with(self, name: str) -> int:
        """How many functions have claims, with this one."""
        return len(self.found) + (name not in self._by_function)

    def refresh(self, view: View, device: Device, step_goals: StepGoals) -> None:
        self.until_us = view.now_us + FRESH_US
        if not self._to_do:
            self._to_do = list(dict.fromkeys(view.instances[instance].function for instance in reversed(device.instances)))
            for name in self._by_function.keys() - set(self._to_do):
                self.replace(name, None)
        for name in self._to_do[-MOST_AT_ONCE:]:
            self.replace(name, _claim(view, view.functions[name], device, step_goals.tightest(view.now_us, name)))
        del self._to_do[-MOST_AT_ONCE:]

    def replace(self, name: str, claim: Claim | None) -> None:
        """What a function claims from now on; None: nothing."""
        before = self._by_function.get(name)
        if claim == before:  # as most of them, each time
            return
        if before is not None:
            del self.found[bisect_left(self.found, before)]
            del self.least_us[bisect_left(self.least_us, (_blocking_us(before), before))]
        if claim is not None:
            insort(self.found, claim)
            insort(self.least_us, (_blocking_us(claim), claim))
            self._by_function[name] = claim
        else:
            del self._by_function[name]


def _blocking_us(claim: Claim) -> int:
    """The time of the longest batch that does not block it: within its tolerance, or no longer than a few of its own."""
    return max(claim.tolerance_us, PEER * claim.own_us)


def _claim(view: View, function: FunctionState, device: Device, as_step: tuple[int, str]) -> Claim | None:
    """On the slice it asks for, or a larger one where that takes more than half of the SLO for one job. `as_step`: its part of
    the SLO of a workflow, and which one. None without an SLO or a warm instance, or if it was not called lately; and none if it
    would be late even alone: what cannot be kept blocks nothing."""
    spec, where, arrivals = function.spec, device.spec, function.arrivals
    slo_us, workflow = spec.slo.latency_us, ""
    if as_step[0] and (not slo_us or as_step[0] < slo_us):
        slo_us, workflow = as_step
    called = arrivals.last_us >= 0 and view.now_us - arrivals.last_us <= LATELY_US
    if not slo_us or not (called or spec.scale.min > 0):
        return None
    warm = [one for one in function.instances.values() if one.device == where.id and one.phase is WARM]
    if not warm:
        return None
    home = next((device.homes[one.id] for one in warm if one.id in device.homes), 0)
    wish = home.bit_count() or spec.units_on(where)
    cores = spec.cores_on(where) if where.cores else 0
    units, alone_us = wish, view.latency_us(spec.name, device, 1, wish, cores)
    if alone_us > slo_us // 2 or not alone_us:
        sizes = [wish]
        if view.picks_slice_size and not home and where.limits.per_batch and not where.limits.soft:
            sizes += [size for size in where.limits.sizes or range(wish + 1, where.units + 1) if size > wish]
        times = [(size, us) for size in sizes if (us := view.latency_us(spec.name, device, 1, size, cores))]
        if not times:
            return None
        units, alone_us = next(((size, us) for size, us in times if us <= slo_us // 2), min(times, key=lambda one: one[1]))
    if alone_us + device.way_us > slo_us:
        return None
    gap_us = max(1.0, arrivals.offered_gap_us, float(view.now_us - arrivals.offered_us))  # it grows while none arrives
    batch, batch_us = 1, alone_us
    if gap_us < NEVER_US:
        batch = max(1, min(spec.max_batch, round(slo_us / 2 / gap_us)))
        batch_us = view.latency_us(spec.name, device, batch, units, cores) or alone_us
        while batch > 1 and batch_us > slo_us // 2:
            batch //= 2
            batch_us = view.latency_us(spec.name, device, batch, units, cores) or alone_us
    blocks = max(1, math.ceil(HEADROOM * (batch_us + device.way_us) / (batch * gap_us))) if gap_us < NEVER_US else 1
    tolerance_us = int(slo_us * (1 - SAFETY)) - batch_us
    return Claim(max(0, tolerance_us), spec.name, units, min(blocks, max(1, where.units // units)), home, batch_us, workflow)
