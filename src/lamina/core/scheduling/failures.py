"""Failures and their handling: failed batches, lost workers and devices, hung batches and loads.

- When an instance is lost, its jobs run again if that is safe and can still be in time: a batch is halved each time it
  kills its worker, so that a poisonous job ends up alone; alone it may try once more, then its call fails. What had not
  begun, or ran beside others, is not blamed.
- A function whose loads keep dying is loaded less and less often; after a few in a row its callers are told. Other machines are
  tried before one where it failed: a full disk or a broken driver is that machine's failure.
- A load that fails by what the function itself does (`load-failed`: its constructor raised, its process ended) is tried once more
  at once, because a download or a memory peak passes. A second failure in a row is no accident: its callers are told then, and
  those that come before the next try is due are told on arrival. A caller whose time is over before that try could end is told
  after the first. A worker that was killed, a lost device and other machines are no failures of the function, and are waited for.
- A hung batch or load has its instance killed, which is then lost like any other.
- A job that has read state which was changed before its end runs again, without those that were in its batch.
"""

from __future__ import annotations

from lamina.core.actions import FailCall
from lamina.core.events import BatchFailed, InstanceLost
from lamina.core.hang_rule import is_to_be_ended
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.rolling_update import RollingUpdate
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.jobs import CallRegistry, Job
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import REPEATED, Batch, ControllerState, FunctionState, Instance

BACKOFF_US = (0, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000, 6_400_000, 12_800_000, 30_000_000)

LOAD_TIMEOUT_US = 600_000_000
"""A load that takes longer hangs, and would hold its function's calls for ever."""

AVOID_US = 60_000_000
"""How long other machines are preferred to one where a load failed."""

MAX_CRASHES = 5
"""Loads that die in a row before the calls waiting for the function are failed rather than kept."""


MAX_STALE_READS = 16
"""Of a job: each time another has committed, so it ends; but it may be the same one for ever."""


class Failures:
    def __init__(
        self,
        state: ControllerState,
        view: View,
        dispatch_queue: DispatchQueue,
        cluster: Cluster,
        rolling_update: RollingUpdate,
        calls: CallRegistry,
        hang_floor_us: int,
    ) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = dispatch_queue
        self._cluster = cluster
        self._rolling_update = rolling_update
        self._calls = calls
        self._hang_floor_us = hang_floor_us

    def on_batch_failed(self, event: BatchFailed) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is not None:
            self._cluster.release_batch(batch)
            self._retry_jobs(batch, event.reason, blamed=True)

    def on_instance_lost(self, event: InstanceLost) -> None:
        instance = self._state.instances.get(event.instance)
        if instance is None:
            return
        function = self._state.functions[instance.function]
        function.on_crash(self._view.now_us, BACKOFF_US)
        lost_loading = instance.phase is InstancePhase.LOADING
        is_machines_failure = lost_loading and not instance.killed and self._avoid_machine(function, instance)
        self.remove_lost([instance], "device-failed" if is_machines_failure else event.reason)
        if is_machines_failure:
            self._rolling_update.resume(function)
        if lost_loading and event.reason == "load-failed" and not instance.killed and not is_machines_failure:
            function.on_load_failed()
        if lost_loading and not function.instances:
            self._fail_waiting(function, self._view.now_us - instance.created_us)
        if len(function.queue) or function.spec.scale.min:
            self._dispatch_queue.needs_instance(function.spec.name)

    def _fail_waiting(self, function: FunctionState, load_us: int) -> None:
        """Tell callers that the function cannot be loaded: all of them if that is known, else those whose time is over before
        one more load could end."""
        is_known = function.consecutive_crashes >= MAX_CRASHES or function.failed_loads >= REPEATED
        retried_us = function.load_not_before_us + load_us if function.failed_loads else 0
        for job in function.queue.jobs():
            if job.id in job.run.jobs and (is_known or job.expires_us < retried_us):
                self._calls.drop_job(job.run, job)
                job.run.owner.on_job_failed(job.run, job, "load-failed")

    def _avoid_machine(self, function: FunctionState, instance: Instance) -> bool:
        devices = self._state.devices
        family = function.spec.fits_family
        machines = {one.spec.node for one in devices.values() if one.takes_instances and family(one.spec.family)}
        return function.avoid(devices[instance.device].spec.node, self._view.now_us + AVOID_US, machines)

    def remove_lost(self, instances: list[Instance], reason: str, *, blames: bool = True) -> None:
        for instance in instances:
            self._rolling_update.on_instance_lost(instance, reason)
        crowd = {instance.id: instance.running for instance in instances}
        begun, booked = self._cluster.remove_lost(instances)
        for batch in begun:
            alone = crowd[batch.instance.id] == 1
            if not alone and blames:  # which of them was it? One at a time now, until all have been tried
                self._state.functions[batch.instance.function].quarantine(len(batch.jobs))
            self._retry_jobs(batch, reason, blamed=alone, caused=blames)
        for batch in booked:
            self._requeue_unstarted(batch)

    def kill_hung(self) -> None:
        now_us = self._view.now_us
        for batch in self._state.batches.values():
            if is_to_be_ended(self._view, batch, self._hang_floor_us):
                self._cluster.kill_instance(batch.instance, "hung" if batch.jobs else "abandoned")
        for instance in self._state.instances.values():
            if instance.phase is InstancePhase.LOADING and now_us - instance.created_us >= LOAD_TIMEOUT_US:
                self._cluster.kill_instance(instance, "load-hung")

    def _retry_jobs(self, batch: Batch, reason: str, *, blamed: bool, caused: bool = True) -> None:
        """Retry the jobs of a failed batch: in batches half as large; alone, once more; then no more, if any `caused` it."""
        function = self._state.functions[batch.instance.function]
        fastest_us = self._view.fastest_us(function.spec.name)
        for job in batch.jobs:
            run = job.run
            if job.id not in run.jobs:
                continue
            job.requeue()
            if caused:
                job.blame(len(batch.jobs), alone=blamed)
            run.on_retry()
            if not function.spec.idempotent or job.solo_crashes > 1:
                function.release_quarantine(1)
                run.owner.on_job_failed(run, job, reason)
            elif self._view.now_us + fastest_us > job.expires_us:
                run.remove_job(job)
                if not run.jobs or run.flow.sole_task is None:  # else another body of the function is under way for it
                    self._calls.fail(run, FailCall(run.call.id, "deadline", job.node, job.id))
            else:
                self._dispatch_queue.enqueue(function, job)

    def rerun_stale(self, batch: Batch, job: Job, cost: float) -> bool:
        """Queue a job again that has read what was changed meanwhile; False: it may not run again, or could not be in time."""
        function, run = self._state.functions[job.function], job.run
        fastest_us = self._view.fastest_us(function.spec.name)
        is_hopeless = job.stale_reads >= MAX_STALE_READS or self._view.now_us + fastest_us > job.expires_us
        if is_hopeless or not function.spec.idempotent:
            return False
        job.requeue()
        job.on_stale_read(len(batch.jobs))
        run.on_retry(cost)
        self._dispatch_queue.enqueue(function, job)
        return True

    def _requeue_unstarted(self, batch: Batch) -> None:
        """Requeue the jobs of a batch that never began: they are not to blame."""
        for job in batch.jobs:
            if job.id in job.run.jobs:
                job.requeue()
                self._dispatch_queue.enqueue(self._state.functions[job.function], job)
