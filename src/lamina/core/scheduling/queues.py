"""Queues of jobs, per function in the order its policy serves them; and which functions the policy is to be asked about."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Literal

from lamina.core.lifecycle import WARM
from lamina.core.scheduling.jobs import Job
from lamina.core.waiting_lines import WaitingLines
from lamina.types import NEVER_US

if TYPE_CHECKING:
    from lamina.core.policy import Defer
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import ControllerState, FunctionState

Order = Literal["arrival", "due"]

GROUP = 4
"""So many of a line are asked about at once."""


class Queue(list[tuple[int, int, Job]]):
    """Queue of one function, a sorted list: jobs mostly arrive in order, so adding is appending, and taking is one slice.

    It is a list rather than has one because its length is asked for several times per call, by every part of the scheduler.
    """

    __slots__ = ("function", "order")

    def __init__(self, function: str, order: Order = "arrival") -> None:
        super().__init__()
        self.function = function
        self.order = order

    def add(self, job: Job) -> None:
        entry = (job.due_us if self.order == "due" else job.id, job.id, job)
        if not self or self[-1] < entry:
            self.append(entry)
        else:
            insort(self, entry)

    def remove_job(self, job: Job) -> None:
        at = bisect_left(self, (job.due_us if self.order == "due" else job.id, job.id))
        assert self[at : at + 1] and self[at][2] is job, f"job {job.id} is not waiting"
        del self[at]

    def remove_all(self, jobs: list[Job]) -> None:
        """Take these jobs out; when they are the first ones, as they nearly always are, in one stroke."""
        if len(jobs) == 1 and self and self[0][2] is jobs[0]:
            del self[0]
            return
        if self.first(len(jobs)) == jobs:
            del self[: len(jobs)]
            return
        for job in jobs:
            self.remove_job(job)

    def head(self) -> Job:
        return self[0][2]

    def first(self, count: int) -> list[Job]:
        return [entry[2] for entry in self[:count]]

    def count_due_before(self, due_us: int) -> int:
        """Number of jobs due sooner than that; of a queue kept by due time."""
        return bisect_left(self, (due_us,))

    def due_from(self, due_us: int, start: int, count: int) -> list[Job]:
        """Jobs due at that time or later, without the first of them; of a queue kept by due time."""
        first = bisect_left(self, (due_us,)) + start
        return [entry[2] for entry in self[first : first + count]]

    def slice(self, start: int, count: int) -> list[Job]:
        return [entry[2] for entry in self[start : start + count]]

    def jobs(self) -> list[Job]:
        return [entry[2] for entry in self]


class DispatchQueue:
    """Functions with jobs. Writer of `waiting`, `deferred` and `backlogged` of the state, and of what is in queues.

    A function with jobs is in exactly one of two places: `waiting`, and the policy is asked about it after every event, or
    `deferred`, and it is not, until the time it named has come or something has changed that it could not foresee. What changes
    on a device concerns those deferred there: those without a place in line (`Defer.rank`) at once; of the others the first
    few, and the next only if those took all they could or units are still free. So too when a slot may be committed.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.starved: dict[str, None] = {}  #: functions without an instance: autoscaling does not wait for its period
        self._delays: dict[str, str] = {}  #: why functions were deferred since their last batch
        self._due: list[tuple[int, str]] = []  #: when whose deferral ends, a heap; entries of deferrals that are over are skipped
        self._slots: list[tuple[int, int]] = []  #: when the slot behind which batch may be committed, a heap
        self._lines = WaitingLines()  #: by device: functions deferred there by rank
        self._unranked: set[str] = set()  #: deferred without a place in line, until something changes on a device
        self.changed: dict[str, set[str]] = {}  #: by device that has changed: those in line that have been asked since

    def needs_instance(self, *functions: str) -> None:
        """These functions lack an instance, or may have one sooner than the next period."""
        for name in functions:
            self.starved[name] = None

    def take_starved(self) -> dict[str, None]:
        starved, self.starved = self.starved, {}
        return starved

    def enqueue(self, function: FunctionState, job: Job) -> None:
        queue, state, name = function.queue, self._state, job.function
        queue.add(job)
        if len(queue) == 1:
            for host in function.instances_by_device:
                state.backlogged.setdefault(host, {})[name] = function
        deferred = state.deferred.get(name)
        if deferred is None:
            state.waiting[name] = function
        elif len(queue) >= deferred.count or queue.head() is job:
            self.undefer(function)
        if not function.instances:
            self.starved[name] = None

    def dequeue(self, function: FunctionState, jobs: list[Job]) -> str:
        """Take jobs out; returns why the function was deferred since it was last asked for, "" if it was not."""
        function.queue.remove_all(jobs)
        if not len(function.queue):
            state = self._state
            for host in function.instances_by_device:
                del state.backlogged[host][function.spec.name]
            state.waiting.pop(function.spec.name, None)
            if function.spec.name in state.deferred:
                self._end_deferral(function.spec.name)
            if state.deferred:  # a home its owner has no use for any more may be lent
                for instance in function.instances.values():
                    device = state.devices[instance.device]
                    if instance.id in device.lent:
                        self.device_changed(device)
        return self._delays.pop(function.spec.name, "") if self._delays else ""

    def device_removed(self, host: str) -> None:
        self._state.backlogged.pop(host, None)

    def instance_added(self, function: FunctionState, host: str) -> None:
        """Its jobs may be served there too."""
        if len(function.queue):
            self._state.backlogged.setdefault(host, {})[function.spec.name] = function

    def instance_removed(self, function: FunctionState, host: str) -> None:
        if len(function.queue) and host not in function.instances_by_device:
            del self._state.backlogged[host][function.spec.name]

    def defer(self, decision: Defer) -> None:
        name = decision.function
        function = self._state.waiting.pop(name, None)
        if function is None:
            return
        self._state.deferred[name] = decision
        if decision.until_us < NEVER_US:
            heappush(self._due, (decision.until_us, name))
        if decision.slot is not None:
            heappush(self._slots, decision.slot)
        if decision.rank is not None:
            warm = dict.fromkeys([one.device for one in function.instances.values() if one.phase is WARM])
            self._lines.add(name, decision.rank, warm)  # where it loads, nothing that changes is for it
        elif not decision.ignore_devices:
            self._unranked.add(name)
        if decision.why:
            self._delays[name] = decision.why

    def undefer(self, function: FunctionState) -> None:
        if self._end_deferral(function.spec.name):
            self._state.waiting[function.spec.name] = function

    def _end_deferral(self, name: str) -> bool:
        decision = self._state.deferred.pop(name, None)
        if decision is None:
            return False
        self._unranked.discard(name)
        if decision.rank is not None:
            self._lines.remove(name)
        return True

    def instance_ready(self, function: FunctionState, device: Device) -> None:
        """It has one more instance, on a device that it may not be in line for."""
        decision = self._state.deferred.get(function.spec.name)
        if decision is not None and not decision.ignore_devices:
            self.undefer(function)
        self.device_changed(device)

    def device_changed(self, device: Device) -> None:
        """Something changed on this device: ask again about deferred functions with an instance there, those in line in turn."""
        state = self._state
        if self._unranked:
            for name in list(filter(self._unranked.__contains__, device.instances.values())):
                self.undefer(state.functions[name])
        if self._lines.lines.get(device.spec.id):
            self.changed[device.spec.id] = set()

    def wake_in_line(self, everyone: bool = False) -> bool:
        """Undefer the next in line on devices that have changed, once those before them have been asked; False: there are none,
        or nothing is left to them. `everyone`: all at once, where it is not for the line to say whose turn it is."""
        state, woken = self._state, False
        for host, asked in list(self.changed.items()):
            device, group = state.devices.get(host), list[str]()
            is_left = device is not None and (device.busy != device.all_units or bool(device.shared.parts))
            if device is not None and (is_left or state.deferred.keys().isdisjoint(asked)):
                names = self._lines.names(host, without=asked)
                group = list(names if everyone else islice(names, GROUP))
            if not group:
                del self.changed[host]
            woken = woken or bool(group)
            for name in group:
                asked.add(name)
                self.undefer(state.functions[name])
        return woken

    def undefer_due(self, now_us: int) -> int:
        """Ask again about deferred functions whose time has come; returns when the next one's will."""
        due, deferred, slots = self._due, self._state.deferred, self._slots
        while slots:
            at_us, batch_id = slots[0]
            batch = self._state.batches.get(batch_id)
            if batch is not None and batch.follower is None:  # else the slot is gone
                if at_us > now_us:
                    break
                if self._lines.lines.get(batch.device.spec.id):
                    self.changed.setdefault(batch.device.spec.id, set())
            heappop(slots)
        next_us = slots[0][0] if slots else NEVER_US
        while due:
            until_us, name = due[0]
            decision = deferred.get(name)
            if decision is not None and decision.until_us == until_us:
                if until_us > now_us:
                    return min(next_us, until_us)
                self.undefer(self._state.functions[name])
            heappop(due)
        return next_us

    def move_to_end(self, functions: Iterable[str]) -> None:
        """Functions whose turn comes later stand behind those asked about before them."""
        waiting = self._state.waiting
        for name in functions:
            function = waiting.pop(name, None)
            if function is not None:
                waiting[name] = function
