"""Queues of jobs, per function in the order its policy serves them; and which functions the policy is to be asked about."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lamina.core.scheduling.jobs import Job
from lamina.types import NEVER_US

if TYPE_CHECKING:
    from lamina.core.policy import Defer
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import ControllerState, FunctionState

Order = Literal["arrival", "due"]


@dataclass(slots=True)
class Queue:
    """Queue of one function, a sorted list: jobs mostly arrive in order, so adding is appending, and taking is one slice."""

    function: str
    order: Order = "arrival"
    _entries: list[tuple[int, int, Job]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job: Job) -> None:
        entry = (job.due_us if self.order == "due" else job.id, job.id, job)
        entries = self._entries
        if not entries or entries[-1] < entry:
            entries.append(entry)
        else:
            insort(entries, entry)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._entries, (job.due_us if self.order == "due" else job.id, job.id))
        assert self._entries[at : at + 1] and self._entries[at][2] is job, f"job {job.id} is not waiting"
        del self._entries[at]

    def remove_all(self, jobs: list[Job]) -> None:
        """Take these jobs out; when they are the first ones, as they nearly always are, in one stroke."""
        entries = self._entries
        if len(jobs) == 1 and entries and entries[0][2] is jobs[0]:
            del entries[0]
            return
        if self.first(len(jobs)) == jobs:
            del entries[: len(jobs)]
            return
        for job in jobs:
            self.remove(job)

    def head(self) -> Job:
        return self._entries[0][2]

    def first(self, count: int) -> list[Job]:
        return [entry[2] for entry in self._entries[:count]]

    def count_due_before(self, due_us: int) -> int:
        """Number of jobs due sooner than that; of a queue kept by due time."""
        return bisect_left(self._entries, (due_us,))

    def slice(self, start: int, count: int) -> list[Job]:
        return [entry[2] for entry in self._entries[start : start + count]]

    def jobs(self) -> list[Job]:
        return [entry[2] for entry in self._entries]


class DispatchQueue:
    """Functions with jobs. Writer of `waiting` and `deferred` of the state, and of what is in queues.

    A function with jobs is in exactly one of two places: `waiting`, and the policy is asked about it after every event, or
    `deferred`, and it is not, until the time it named has come or something has changed that it could not foresee.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.starved: dict[str, None] = {}  #: functions without an instance: autoscaling does not wait for its period
        self._delays: dict[str, str] = {}  #: why functions were deferred since their last batch

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
            state.waiting.pop(function.spec.name, None)
            state.deferred.pop(function.spec.name, None)
            if state.deferred:  # a home its owner has no use for any more may be lent
                for instance in function.instances.values():
                    device = state.devices[instance.device]
                    if instance.id in device.lent:
                        self.device_changed(device)
        return self._delays.pop(function.spec.name, "") if self._delays else ""

    def defer(self, decision: Defer) -> None:
        function = self._state.waiting.pop(decision.function, None)
        if function is not None:
            self._state.deferred[decision.function] = decision
            if decision.why:
                self._delays[decision.function] = decision.why

    def undefer(self, function: FunctionState) -> None:
        if self._state.deferred.pop(function.spec.name, None) is not None:
            self._state.waiting[function.spec.name] = function

    def device_changed(self, device: Device) -> None:
        """Ask again about deferred functions with an instance on this device: something changed there."""
        deferred = self._state.deferred
        if deferred:
            for instance_id in device.instances:
                name = self._state.instances[instance_id].function
                decision = deferred.get(name)
                if decision is not None and not decision.ignore_devices:
                    self.undefer(self._state.functions[name])

    def undefer_due(self, now_us: int) -> int:
        """Ask again about deferred functions whose time has come; returns when the next one's will."""
        next_us = NEVER_US
        for name, decision in list(self._state.deferred.items()):
            if decision.until_us <= now_us:
                self.undefer(self._state.functions[name])
            elif decision.until_us < next_us:
                next_us = decision.until_us
        return next_us

    def move_to_end(self, functions: Iterable[str]) -> None:
        """Functions whose turn comes later stand behind those asked about before them."""
        waiting = self._state.waiting
        for name in functions:
            function = waiting.pop(name, None)
            if function is not None:
                waiting[name] = function
