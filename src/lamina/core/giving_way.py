"""Batches that give way: which do, and for how long they can.

A batch that runs in segments is paused for as long as others have units of its slice. So such units are free for others, and busy
for one another. Without an SLO it is paused whenever another function wants them. With one it gives way as far as its promise
goes: what is started on its units must have ended while its jobs, and those that wait behind it, can still be in time. A policy
says that it sees to that (`spares_paused`); under any other a function with an SLO has its units to itself.

- It begins so only with as much time to spare as it takes. With less it runs whole, on units of its own.
- What it is paused for is part of its expected end from the moment that it is decided, and what its device says is left replaces
  what had been predicted (`Pauses`).
- A function whose time is not known, or that shares units, has none of its units; nor has one that runs in segments with an SLO
  about as long (`patience_class`): its graphs work in the same memory as the one that is paused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from lamina.core.lifecycle import WARM
from lamina.types import NEVER_US, WHOLE_UNIT

if TYPE_CHECKING:
    from lamina.core.events import BatchPaused
    from lamina.core.policy import View
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch, FunctionState, Instance

SAFETY = 20
"""Of what a batch takes, such a part is not given to others: it may take longer than predicted, and each pause costs a little."""

MAX_WAITING = 8
"""Of the jobs of a function that wait behind a batch, so many are looked at."""

MAX_FUNCTIONS = 8
"""And of so many functions."""


@dataclass(slots=True, eq=False)
class Pauses:
    """Pauses of one batch, those to come included."""

    is_promised: bool = False  #: it gives way only as far as its jobs can wait
    us: int = 0  #: in all, as far as batches have been started on its units
    resumes_us: int = -1  #: it is paused, until then; -1: it is not
    remaining_segments: int = 0  #: when it was last paused

    def pause(self, now_us: int, until_us: int) -> None:
        """Others have units of its slice until then, as far as is known by now."""
        self.us += until_us - (self.resumes_us if self.resumes_us >= 0 else now_us)
        self.resumes_us = until_us

    def resume(self, now_us: int) -> None:
        """The last of them has ended."""
        self.pause(now_us, now_us)
        self.resumes_us = -1

    def on_told(self, now_us: int, batch: Batch, event: BatchPaused) -> None:
        """Its device has told how much of it is left; 0: it cannot say how long that takes."""
        self.remaining_segments = max(0, event.remaining_segments)
        if event.left_us > 0:
            self.us += max(now_us, self.resumes_us) + event.left_us + batch.device.way_us - batch.expected_end_us


NO_PAUSES = Pauses()
"""Of all batches that do not give way."""


def retime_yielding(view: View, device: Device, mask: int) -> None:
    """Batches there that give way go on when the last of those on their units has ended: when is that now?"""
    for batch_id, units in device.yielding.items():
        if units & mask:
            pauses = view.batches[batch_id].pauses
            ends_us = [view.batches[one].slice_free_us for one, taken in device.running.items() if taken & units]
            if ends_us:
                pauses.pause(view.now_us, max(view.now_us, *ends_us))
            elif pauses.resumes_us >= 0:
                pauses.resume(view.now_us)


def gives_way(function: FunctionState, instance: Instance) -> bool:
    """Do all batches of this instance give way? Those of a function without an SLO that run in segments do."""
    return instance.segment_us > 0 and not function.spec.slo.latency_us


def patience_class(slo_us: int) -> int:
    """Functions with SLOs of about the same length, to a factor of four; 0: without."""
    return slo_us.bit_length() // 2


def patient_slice(view: View, function: FunctionState, instance: Instance, device: Device) -> int:
    """A slice for the next batch of a function with an SLO, on which it would give way and still be in time; 0 if there is none,
    or nobody to give way to. It has the size that the function asks for: for that its graphs are cut. A home is its owner's
    at any time, and not given up."""
    spec = function.spec
    if not instance.segment_us or not spec.slo.latency_us or not view.spares_paused or not len(function.queue):
        return 0
    if instance.phase is not WARM or device.is_suspended or len(device.instances) < 2 or instance.id in device.homes:
        return 0
    if not instance.has_capacity(function.batches_at_once(device)):
        return 0
    cores = spec.cores_on(device.spec) if device.spec.cores else 0
    mask = device.find_yielding_slice(instance.id, instance.units)
    if not mask or spec.parts < WHOLE_UNIT or cores > device.cores_free or mask & device.reserved_units(instance.id, lent=True):
        return 0
    count = min(len(function.queue), spec.max_batch)
    time_us = view.latency_us(spec.name, device, count, mask.bit_count(), cores)
    free_us = [view.batches[one].slice_free_us for one in device.overlapping(mask, gives_way=True)]
    end_us = max(view.now_us + device.way_us, *free_us, 0) + time_us
    head = function.queue.head()
    left_us = min(min(head.due_us, head.expires_us) - end_us, _least_left_us(view, device, function, end_us, count))
    return mask if 0 < time_us <= left_us else 0


def pausable_us(view: View, batch: Batch) -> int:
    """For how long more a batch that gives way can be paused, and it and those that wait behind it be in time."""
    end_us = max(view.now_us, batch.expected_end_us)
    least_us = min([min(job.due_us, job.expires_us) for job in batch.jobs]) - end_us
    least_us = min(least_us, _least_left_us(view, batch.device, view.functions[batch.instance.function], end_us))
    return max(0, least_us - batch.instance.segment_us - batch.predicted_us // SAFETY)


def _least_left_us(view: View, device: Device, mine: FunctionState, end_us: int, count: int = 0) -> int:
    """The least time to spare of those that wait for the end of a batch that gives way, because they have none of its units: jobs
    of a function one batch after another, of `mine` behind the first so many. What is late anyway does not count."""
    least_us = NEVER_US
    for function in islice(view.backlogged.get(device.spec.id, {}).values(), MAX_FUNCTIONS):
        spec, waiting, ahead = function.spec, len(function.queue), count if function is mine else 0
        here = [one for one in function.instances.values() if one.device == device.spec.id]
        if waiting <= ahead or not spec.slo.latency_us or not all(shuts_out(view, mine, function, one, device) for one in here):
            continue
        each_us = view.latency_us(spec.name, device, spec.max_batch, spec.units_on(device.spec), spec.cores_on(device.spec))
        for place in range(waiting - 1, ahead - 1, -max(1, (waiting - ahead) // MAX_WAITING)):
            (job,) = function.queue.slice(place, 1)
            turns = (place - ahead) // (spec.max_batch * len(function.instances)) + 1
            left_us = min(job.due_us, job.expires_us) - end_us - turns * each_us
            least_us = left_us if 0 <= left_us < least_us else least_us
    return least_us


def promised_units(view: View, device: Device, until_us: int) -> int:
    """Units of batches that give way and would be late, were others to have them until then."""
    found = 0
    for batch_id, mask in device.yielding.items():
        batch = view.batches[batch_id]
        if batch.pauses.is_promised:
            longer_us = until_us - max(view.now_us, batch.pauses.resumes_us)
            found |= mask if longer_us > 0 and pausable_us(view, batch) < longer_us else 0
    return found


def shuts_out(view: View, first: FunctionState, function: FunctionState, instance: Instance, device: Device) -> bool:
    """Whether this instance has units of a batch of the `first` that gives way with a promise at no time."""
    spec, slo_us = function.spec, function.spec.slo.latency_us
    if instance.segment_us and slo_us and patience_class(slo_us) >= patience_class(first.spec.slo.latency_us):
        return True
    return spec.parts < WHOLE_UNIT or not view.latency_us(spec.name, device, 1, instance.units)


def closed_units(view: View, function: FunctionState, instance: Instance, device: Device) -> int:
    """Units of batches with a promise that this instance can have none of."""
    found = 0
    for batch_id, mask in device.yielding.items():
        batch = view.batches[batch_id]
        if batch.pauses.is_promised:
            first = view.functions[batch.instance.function]
            found |= mask if shuts_out(view, first, function, instance, device) else 0
    return found


def held_by_yielding(
    view: View, function: FunctionState, instance: Instance, device: Device, time_us: int
) -> list[tuple[int, int]]:
    """What is kept from a batch of that time by those that give way, as end and units: all that they have from one that gives way
    without end; from others what is promised."""
    if gives_way(function, instance):
        kept = device.yielding_units
    else:
        until_us = view.now_us + device.way_us + time_us
        kept = closed_units(view, function, instance, device) | promised_units(view, device, until_us)
    return [(view.batches[one].expected_end_us, mask) for one, mask in device.yielding.items() if mask & kept]
