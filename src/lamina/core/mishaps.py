"""Failures and their handling: failed batches, lost workers and devices, hung batches and loads.

- When an instance is lost, its jobs run again if that is safe and can still be in time: a batch is halved each time it
  kills its worker, so that a poisonous job ends up alone; alone it may try once more, then its call fails. What had not
  begun, or ran beside others, is not blamed.
- A function whose loads keep dying is loaded less and less often; after a few in a row its callers are told.
- A hung batch or load has its instance killed, which is then lost like any other.
"""

from __future__ import annotations

from lamina.core.actions import Fail
from lamina.core.calls import Calls
from lamina.core.course import Course
from lamina.core.events import BatchFailed, DeviceLost, InstanceLost
from lamina.core.fleet import Fleet
from lamina.core.lifecycle import Phase
from lamina.core.lines import Lines
from lamina.core.policy import View
from lamina.core.renewal import Renewal
from lamina.core.slack import Slack
from lamina.core.state import Batch, Instance, State

BACKOFF_US = (0, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000, 6_400_000, 12_800_000, 30_000_000)

LOAD_LIMIT_US = 600_000_000
"""A load that takes longer hangs, and would hold its function's calls for ever."""

MAX_CRASHES = 5
"""Loads that die in a row before the calls waiting for the function are failed rather than kept."""


class Mishaps:
    def __init__(
        self,
        state: State,
        view: View,
        lines: Lines,
        fleet: Fleet,
        renewal: Renewal,
        slack: Slack,
        calls: Calls,
        course: Course,
        hang_floor_us: int,
    ) -> None:
        self._state = state
        self._view = view
        self._lines = lines
        self._fleet = fleet
        self._renewal = renewal
        self._slack = slack
        self._calls = calls
        self._course = course
        self._hang_floor_us = hang_floor_us

    def batch_failed(self, event: BatchFailed) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is not None:
            self._fleet.release(batch)
            self._retry(batch, event.reason, blamed=True)

    def instance_lost(self, event: InstanceLost) -> None:
        instance = self._state.instances.get(event.instance)
        if instance is None:
            return
        function = self._state.functions[instance.function]
        function.crashes += 1
        function.not_before_us = self._view.now_us + BACKOFF_US[min(function.crashes, len(BACKOFF_US)) - 1]
        lost_loading = instance.phase is Phase.LOADING
        self._lose([instance], event.reason)
        if lost_loading and function.crashes >= MAX_CRASHES and not function.instances:
            for job in function.queue.jobs():
                if job.id in job.run.jobs:
                    self._calls.drop(job.run, job)
                    self._course.job_failed(job.run, job, "load-failed")
        elif len(function.queue) or function.spec.scale.min:
            self._lines.cold[function.spec.name] = None

    def device_lost(self, event: DeviceLost) -> None:
        state = self._state
        device = state.devices.get(event.device)
        if device is None:
            return
        self._lose([state.instances[instance_id] for instance_id in device.instances], "device-lost")
        del state.devices[event.device]
        self._slack.forget()
        self._lines.cold.update(dict.fromkeys(state.functions))

    def _lose(self, instances: list[Instance], reason: str) -> None:
        for instance in instances:
            self._renewal.lost(instance, reason)
        crowd = {instance.id: instance.running for instance in instances}
        begun, booked = self._fleet.lose(instances)
        for batch in begun:
            alone = crowd[batch.instance.id] == 1
            if not alone:  # which of them was it? One at a time now, until all have been tried
                self._state.functions[batch.instance.function].suspects += len(batch.jobs)
            self._retry(batch, reason, blamed=alone)
        for batch in booked:
            self._unbook(batch)

    def end_what_hangs(self) -> None:
        now_us = self._view.now_us
        for batch in self._state.batches.values():
            if batch.started_us >= 0 and now_us - max(batch.started_us, batch.heard_us) >= self._hang_us(batch):
                self._fleet.kill(batch.instance, "hung")
        for instance in self._state.instances.values():
            if instance.phase is Phase.LOADING and now_us - instance.since_us >= LOAD_LIMIT_US:
                self._fleet.kill(instance, "load-hung")

    def _hang_us(self, batch: Batch) -> int:
        return max(5 * batch.predicted_us, self._hang_floor_us) if batch.predicted_us else 60_000_000

    def _retry(self, batch: Batch, reason: str, *, blamed: bool) -> None:
        """Retry the jobs of a failed batch: in batches half as large; alone, once more; then no more."""
        function = self._state.functions[batch.instance.function]
        company = len(batch.jobs)
        fastest_us = self._slack.fastest_us(function.spec.name)
        for job in batch.jobs:
            run = job.run
            if job.id not in run.jobs:
                continue
            job.batch_id = 0
            if company > 1:
                job.batch_limit = max(1, company // 2)
            elif blamed:
                job.strikes += 1
            run.retries += 1
            if not function.spec.idempotent or job.strikes > 1:
                function.suspects = max(0, function.suspects - 1)
                self._course.job_failed(run, job, reason)
            elif self._view.now_us + fastest_us > job.expires_us:
                del run.jobs[job.id]
                self._calls.end(run, Fail(run.call.id, "deadline", job.node, job.id))
            else:
                self._lines.join(function, job)

    def _unbook(self, batch: Batch) -> None:
        """Requeue the jobs of a batch that never began: they are not to blame."""
        for job in batch.jobs:
            if job.id in job.run.jobs:
                job.batch_id = 0
                self._lines.join(self._state.functions[job.function], job)
