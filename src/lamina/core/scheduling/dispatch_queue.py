"""Dispatch queue: functions with jobs, those the policy has deferred, and those that need an instance.

A function with jobs is in exactly one of two places: `waiting`, and the policy is asked about it after every event, or
`deferred`, and it is not, until the time it named has come or something has changed that it could not foresee.
"""

from __future__ import annotations

from lamina.core.policy import Defer
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.types import NEVER_US


class DispatchQueue:
    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.needs_instance: dict[str, None] = {}  #: functions without an instance: autoscaling does not wait for its period

    def enqueue(self, function: FunctionState, job: Job) -> None:
        queue, state, name = function.queue, self._state, job.function
        queue.add(job)
        held = state.deferred.get(name)
        if held is None:
            state.waiting[name] = function
        elif len(queue) >= held.count or queue.head() is job:
            self.undefer(function)
        if not function.instances:
            self.needs_instance[name] = None

    def dequeue(self, function: FunctionState, jobs: list[Job]) -> None:
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

    def defer(self, hold: Defer) -> None:
        function = self._state.waiting.pop(hold.function, None)
        if function is not None:
            self._state.deferred[hold.function] = hold

    def undefer(self, function: FunctionState) -> None:
        if self._state.deferred.pop(function.spec.name, None) is not None:
            self._state.waiting[function.spec.name] = function

    def device_changed(self, device: Device) -> None:
        """Ask again about deferred functions with an instance on this device: something changed there."""
        held = self._state.deferred
        if held:
            for instance_id in device.instances:
                name = self._state.instances[instance_id].function
                hold = held.get(name)
                if hold is not None and not hold.ignore_devices:
                    self.undefer(self._state.functions[name])

    def undefer_due(self, now_us: int) -> int:
        """Ask again about deferred functions whose time has come; returns when the next one's will."""
        next_us = NEVER_US
        for name, hold in list(self._state.deferred.items()):
            if hold.until_us <= now_us:
                self.undefer(self._state.functions[name])
            elif hold.until_us < next_us:
                next_us = hold.until_us
        return next_us
