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
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lamina.core.giving_way import gives_way, patient_slice, promised_units, shuts_out
from lamina.core.lifecycle import WARM
from lamina.core.policy import Slot, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
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

SOON = 2
"""A batch that gives way is at the end of a segment within the time of so many."""

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


class Holding(Struct, frozen=True, gc=False):
    """Units that are held until then."""

    mask: int
    until_us: int


class Kept(Struct, frozen=True, gc=False):
    """Units that a batch must leave to others, and what that follows from."""

    units: int
    promised: int  #: of these, to batches that give way
    has_time: bool = False
    is_idle: bool = False
    longest_us: int = 0  #: batches longer than that block all the functions that it is kept for
    is_hurried: bool = False
    fits_us: int = 0  #: what one job takes beside it on an empty device, if that was asked for


@dataclass(slots=True)
class _Relevance:
    """Which claims count against a batch of a function, of those that tolerate less than its time and are not shed: those that it
    blocks, but not its own, nor those of its workflow or of what has room elsewhere; and not those that can wait until one that
    gives way does."""

    view: View
    function: FunctionState
    device: Device
    time_us: int  #: of the batch
    step_goals: StepGoals
    soon_us: int  #: in which a batch that gives way leaves its units; 0: it does not
    is_hurried: bool = False  #: its own workflows leave it little time: where all are in a hurry, steps take turns by due time
    longest_us: int = 0  #: batches longer than that block all those that counted
    workflows: set[str] = field(default_factory=set)  #: with a claim that was looked at: a run is at one step at a time

    def begin(self, time_us: int, is_hurried: bool) -> None:
        """Claims against a batch of that time are looked at from the first one on."""
        self.time_us, self.is_hurried = time_us, is_hurried
        self.workflows.clear()

    def __call__(self, claim: Claim) -> bool:
        name = self.function.spec.name
        if PEER * claim.own_us >= self.time_us or claim.function == name:
            return False
        if claim.workflow:
            if self.is_hurried or claim.workflow in self.workflows or self.step_goals.is_step(name, claim.workflow):
                return False  # a run does not wait for itself
            self.workflows.add(claim.workflow)
        if 0 < self.soon_us <= claim.tolerance_us and not _is_shut_out(self.view, self.function, claim, self.device):
            return False
        if len(self.view.devices) > 1 and _has_room_elsewhere(self.view, claim, self.device):
            return False
        self.longest_us = max(self.longest_us, _blocking_us(claim))
        return True


class BlockingRule:
    """Claims on each device, worked out anew every so often."""

    def __init__(self, shed_on: Callable[[str], Container[str]] = lambda device: ()) -> None:
        """`shed_on`: of a device that is asked for more than it can do, functions that ask for more of it than their share."""
        self._claims: dict[str, DeviceClaims] = {}
        self._shed_on = shed_on
        self.step_goals = StepGoals()  #: what functions are to keep as steps of workflows
        self.last_blocked = ("", -1)  #: the function that units were kept from last, and when

    def kept_units(
        self, view: View, function: FunctionState, device: Device, free: int, at_us: int, time_us: int, segment_us: int = 0
    ) -> int:
        """Units that a batch of the function, which holds its own from `at_us` on for `time_us`, must leave to others: to those
        that could not start in time, and to those that give way and would be late. One that gives way itself, after a segment,
        keeps out those alone that have none of its units, or cannot wait for its end."""
        if not device.yielding and self._claims_on(view, device).harmless_us >= time_us:  # it blocks none, as nearly all
            return 0
        return self._keep(view, function, device, free, at_us, time_us, segment_us).units

    def patient_slice(self, view: View, function: FunctionState, instance: Instance, device: Device) -> int:
        """A slice on which the next batch of a function with an SLO would give way, if functions that cannot wait for that can do
        without; 0 if there is none."""
        mask = patient_slice(view, function, instance, device)
        if not mask:
            return 0
        time_us = device.way_us + view.latency_us(function.spec.name, device, function.spec.max_batch, mask.bit_count())
        kept = self.kept_units(view, function, device, mask, view.now_us, time_us, instance.segment_us)
        return 0 if kept & mask else mask

    def spared_units(
        self, view: View, function: FunctionState, device: Device, free: int, at_us: int, longer_us: int, within_us: int
    ) -> Iterator[tuple[int, int]]:
        """What others can spare of the free units from `at_us` on, and for how long a batch may hold it: for `within_us` first,
        then the more the shorter, down to more than `longer_us`. Times at which the same claims are kept are left out."""
        kept = None
        for time_us in self.limits_us(view, function, device, longer_us, within_us):
            if kept is None or not self._holds_for(kept, view, function, device, time_us):
                kept = self._keep(view, function, device, free, at_us, time_us)
                yield free & ~kept.units, time_us

    def _keep(
        self, view: View, function: FunctionState, device: Device, free: int, at_us: int, time_us: int, segment_us: int = 0
    ) -> Kept:
        promised = promised_units(view, device, at_us + time_us) if device.yielding and not segment_us else 0
        if function.is_segmented and any(gives_way(function, one) for one in _here(function, device)):
            return Kept(promised, promised)
        known = self._claims_on(view, device)
        if known.harmless_us >= time_us:
            return Kept(promised, promised)
        mine = _here(function, device)
        soon_us = device.way_us + SOON * segment_us if segment_us else 0
        counts = _Relevance(view, function, device, time_us, self.step_goals, soon_us)
        held = [Holding(device.running[number], free_us) for free_us, number, _ in device.returns]
        kept = self._place(view, function, device, counts, held, free, at_us, time_us)
        is_idle = not segment_us and kept & free != 0 and _is_idle(view, mine, time_us)
        fits_us = self._fits_beside_us(view, function, device, counts, time_us) if is_idle else 0
        takes_turn = is_idle and not fits_us  # what could never run beside what is kept, unless it can give way
        if takes_turn and any(one.segment_us and self.patient_slice(view, function, one, device) for one in mine):
            takes_turn = False
        if not kept & free or takes_turn:
            kept = fits_us = 0
        else:
            self.last_blocked = (function.spec.name, view.now_us)
        rights = (_has_time(view, function, time_us), is_idle, counts.longest_us, self._is_hurried(view, function, time_us))
        return Kept(promised | kept, promised, *rights, fits_us)

    def _is_hurried(self, view: View, function: FunctionState, time_us: int) -> bool:
        """Whether a batch takes much of what the workflows of its function leave for it."""
        step_us, _ = self.step_goals.tightest(view.now_us, function.spec.name)
        return 0 < step_us < AMPLE * time_us

    def _holds_for(self, kept: Kept, view: View, function: FunctionState, device: Device, time_us: int) -> bool:
        """Whether a shorter batch must leave the same: it blocks the same functions, and has the same rights."""
        if kept.promised or kept.longest_us >= time_us or kept.fits_us > time_us:
            return False
        if kept.has_time != _has_time(view, function, time_us) or kept.is_hurried != self._is_hurried(view, function, time_us):
            return False
        return not kept.units or kept.is_idle == _is_idle(view, _here(function, device), time_us)

    def _place(
        self,
        view: View,
        function: FunctionState,
        device: Device,
        counts: _Relevance,
        held: Iterable[Holding],
        free: int,
        at_us: int,
        time_us: int,
    ) -> int:
        """Units kept for the claims that a batch of that time would block, where these are held."""
        known, spec = self._claims_on(view, device), device.spec
        share = 0.0 if _has_time(view, function, time_us) else spec.units / known.count_with(function.spec.name)
        counts.begin(time_us, self._is_hurried(view, function, time_us))
        claims: Iterable[Claim] = known.tolerating_less(time_us)
        if shed := self._shed_on(spec.id):  # nearly all of them, where there is too much to do
            claims = (claim for claim in claims if claim.home or claim.function not in shed)
        return keep_units(spec.units, spec.limits.aligned, held, claims, free, at_us, share=share, counts=counts)

    def _fits_beside_us(self, view: View, function: FunctionState, device: Device, counts: _Relevance, time_us: int) -> int:
        """What one of its jobs takes on the empty device beside what is kept; 0 if it has no place there. On fewer units it takes
        longer, so more may be kept from it, until nothing is left or no more is asked for."""
        spec, limits, name = device.spec, device.spec.limits, function.spec.name
        least = most = function.spec.units_on(spec)  # without an SLO it gets what it asks for
        if function.spec.slo.latency_us and view.picks_slice_size and not limits.soft:
            least, most = min(limits.sizes, default=1), spec.units
        sizes = [size for size in limits.sizes or range(least, most + 1) if least <= size <= most]
        cores = function.spec.cores_on(spec) if spec.cores else 0
        while True:
            left = device.all_units & ~self._place(view, function, device, counts, (), device.all_units, view.now_us, time_us)
            units = next((size for size in reversed(sizes) if find_block(left, size, limits.aligned, spec.units)), 0)
            if not units:
                return 0
            own_us = view.latency_us(name, device, 1, units, cores) + device.way_us
            if own_us <= time_us:
                return max(1, own_us)
            time_us = own_us

    def limits_us(self, view: View, function: FunctionState, device: Device, longer_us: int, within_us: int) -> list[int]:
        """Times that a batch may hold its units for: up to each of them it blocks the same functions, so what must be left to
        others is the same (`kept_units`). The longest first, from `within_us` down to more than `longer_us`."""
        times = self._claims_on(view, device).limits_us(function.spec.name, longer_us, within_us)
        times.append(within_us)
        times.reverse()
        return times if len(times) <= MAX_LIMITS else times[:: -(-len(times) // MAX_LIMITS)]

    def may_insist(self, view: View, function: FunctionState, device: Device, time_us: int) -> bool:
        """Whether a batch that would else be late may take what is kept for others: at the rate of its calls they lose less of
        their time by it, all of them together, than the whole of its own that it would lose by leaving it to them. Not one of a
        function that asks for more than its share: that loses calls whatever it takes. And not where it would keep an owner from
        its home in time: that is a guarantee."""
        if function.spec.name in self._shed_on(device.spec.id):
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
        if slot.gives_way and function.spec.slo.latency_us:
            return slot if self.patient_slice(view, function, instance, device) else None
        if not time_us or len(device.instances) < 2:
            return slot
        if home and not slot.mask & ~home:
            is_promised = device.yielding and promised_units(view, device, slot.at_us + time_us) & slot.mask
            return None if is_promised else slot
        if slot.behind is not None:
            free, from_us, held_us = slot.behind.mask, slot.at_us, time_us
        else:
            free = device.all_units & ~device.busy & ~(view.reserved_units(instance, device) if device.homes else 0)
            from_us, held_us = view.now_us, time_us + device.way_us
        kept = self.kept_units(view, function, device, free, from_us, held_us) & ~home
        if not kept & slot.mask:
            return slot
        left_us = function.queue.head().due_us - view.now_us
        is_free = not device.yielding or not promised_units(view, device, from_us + held_us) & slot.mask
        if is_free and is_pressed(left_us, time_us, device.way_us) and self.may_insist(view, function, device, time_us):
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


def _here(function: FunctionState, device: Device) -> list[Instance]:
    return [one for one in function.instances.values() if one.device == device.spec.id]


def _is_shut_out(view: View, first: FunctionState, claim: Claim, device: Device) -> bool:
    """Whether the function of a claim has no units of a batch of the `first` that gives way as far as its promise goes."""
    function = view.functions[claim.function]
    return all(shuts_out(view, first, function, one, device) for one in _here(function, device))


def is_pressed(left_us: int, time_us: int, way_us: int) -> bool:
    """Whether a job with so much time left may ask for units that are kept for others (`may_insist`): a second batch like its own
    would no longer be in time after the one before it."""
    return pressed_from_us(left_us, time_us, way_us) <= 0


def pressed_from_us(due_us: int, time_us: int, way_us: int) -> int:
    """From when on it is."""
    return due_us - 2 * time_us - way_us + 1


def _has_time(view: View, function: FunctionState, time_us: int) -> bool:
    """Whether its most urgent job has most of its time left, and many times what it takes: until then it takes what others do not
    need."""
    if not function.spec.slo.latency_us or not len(function.queue):
        return False
    head = function.queue.head()
    return head.due_us - view.now_us > max(AMPLE * time_us, PATIENCE * (head.due_us - head.enqueued_us))


def _is_idle(view: View, mine: list[Instance], time_us: int) -> bool:
    """Whether a function has left a device alone for some times as long as a batch of that time holds it."""
    return all(not one.running and one.last_used_us + TURN * time_us <= view.now_us for one in mine)


def keep_units(
    units: int,
    aligned: bool,
    held: Iterable[Holding],
    claims: Iterable[Claim],
    free: int,
    at_us: int,
    *,
    share: float = 0.0,
    counts: Callable[[Claim], bool] = lambda claim: True,
) -> int:
    """Units to keep for these claims, most urgent first, at the least cost in free units.

    A claim is left out only if no way is found beside those before it: where taking the cheapest block for one leaves none
    for the next, all of them are placed anew. On devices of few units, such as a GPU in partitions, that search is complete.
    No function gets more than `share` units, unless it is 0, or one block. Whether a claim `counts` is asked only while there
    is room for it: of a thousand, a few take all units.
    """
    held = list(held)
    everything = (1 << units) - 1
    kept, homes, room = 0, 0, units  #: all that is kept; what of it has one place only; units that are left
    placed: list[tuple[int, int]] = []  #: blocks that are kept: where they may be, and their size
    for claim in claims:
        if not room:
            break
        if (claim.units > room and not claim.home) or not counts(claim):
            continue
        left = everything & ~homes
        for one in held:
            if one.until_us > at_us + claim.tolerance_us:
                left &= ~one.mask
        if claim.home:
            if left & claim.home == claim.home and not kept & claim.home:
                homes |= claim.home
                kept |= claim.home
                room = units - kept.bit_count()
            continue
        blocks = max(1, min(claim.blocks, int(share / claim.units + 0.5))) if share else claim.blocks
        for _ in range(blocks):
            block = _cheapest_block(left & ~kept, free & ~kept, claim.units, units, aligned)
            if block:
                placed.append((left, claim.units))
                kept |= block
            elif anew := _place(((where & ~homes, size) for where, size in (*placed, (left, claim.units))), units, aligned):
                placed.append((left, claim.units))
                kept = homes | anew
            elif block := _soonest_block(held, everything & ~kept, free, claim.units, units, aligned):
                homes |= block
                kept |= block
            else:
                break
        room = units - kept.bit_count()
    return kept


def _place(wanted: Iterable[tuple[int, int]], units: int, aligned: bool) -> int:
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

    return search(tuple(wanted)) or 0


@lru_cache(maxsize=65536)
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

    __slots__ = ("_by_function", "_count_at", "_to_do", "found", "harmless_us", "times_us", "until_us")

    def __init__(self) -> None:
        self.until_us = -1
        self.found: list[Claim] = []  #: most urgent first
        self.times_us: list[int] = []  #: from each of which on a batch blocks one of them or more, least first
        self.harmless_us = NEVER_US  #: the first of these: batches that take no longer block none
        self._count_at: dict[int, int] = {}  #: how many of them, by such a time
        self._by_function: dict[str, Claim] = {}
        self._to_do: list[str] = []  #: functions that have not been looked at in this round

    def tolerating_less(self, time_us: int) -> list[Claim]:
        """Claims that a batch of this time may block, most urgent first."""
        return self.found[: bisect_left(self.found, (time_us,))]

    def limits_us(self, name: str, longer_us: int, within_us: int) -> list[int]:
        """Times between these, least first, from which on a batch of this function blocks others besides."""
        times = self.times_us[bisect_left(self.times_us, longer_us + 1) : bisect_left(self.times_us, within_us)]
        own = self._by_function.get(name)
        if own is not None and self._count_at[_blocking_us(own)] == 1 and longer_us < _blocking_us(own) < within_us:
            times.remove(_blocking_us(own))
        return times

    def count_with(self, name: str) -> int:
        """How many functions have claims, with this one."""
        return len(self.found) + (name not in self._by_function)

    def refresh(self, view: View, device: Device, step_goals: StepGoals) -> None:
        self.until_us = view.now_us + FRESH_US
        if not self._to_do:
            there = dict.fromkeys(reversed(device.instances.values()))
            self._to_do = list(there)
            for name in self._by_function.keys() - there.keys():
                self.replace(name, None)
        for name in self._to_do[-MOST_AT_ONCE:]:
            function, claim = view.functions[name], None
            if function.spec.slo.latency_us or name in step_goals.by_function:
                claim = _claim(view, function, device, step_goals)
            if claim is not None or name in self._by_function:
                self.replace(name, claim)
        del self._to_do[-MOST_AT_ONCE:]

    def replace(self, name: str, claim: Claim | None) -> None:
        """What a function claims from now on; None: nothing."""
        before = self._by_function.get(name)
        if claim == before:  # as most of them, each time
            return
        if before is not None:
            del self.found[bisect_left(self.found, before)]
            self._count(_blocking_us(before), -1)
        if claim is not None:
            insort(self.found, claim)
            self._count(_blocking_us(claim), 1)
            self._by_function[name] = claim
        else:
            del self._by_function[name]

    def _count(self, time_us: int, more: int) -> None:
        count = self._count_at[time_us] = self._count_at.get(time_us, 0) + more
        if count == more:
            insort(self.times_us, time_us)
        elif not count:
            del self._count_at[time_us]
            del self.times_us[bisect_left(self.times_us, time_us)]
        self.harmless_us = self.times_us[0] if self.times_us else NEVER_US


def _blocking_us(claim: Claim) -> int:
    """The time of the longest batch that does not block it: within its tolerance, or no longer than a few of its own."""
    return max(claim.tolerance_us, PEER * claim.own_us)


def _claim(view: View, function: FunctionState, device: Device, step_goals: StepGoals) -> Claim | None:
    """On the slice it asks for, or a larger one where that takes more than half of the SLO for one job: its own SLO, or its part
    of that of a workflow. None without an SLO or a warm instance, or if it was not called lately; and none if it would be late
    even alone: what cannot be kept blocks nothing."""
    spec, where, arrivals = function.spec, device.spec, function.arrivals
    if not spec.scale.min and (arrivals.last_us < 0 or view.now_us - arrivals.last_us > LATELY_US):
        return None
    slo_us, workflow = spec.slo.latency_us, ""
    step_us, of_workflow = step_goals.tightest(view.now_us, spec.name)
    if step_us and (not slo_us or step_us < slo_us):
        slo_us, workflow = step_us, of_workflow
    if not slo_us:
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
