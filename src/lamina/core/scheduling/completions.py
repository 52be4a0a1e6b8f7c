"""Completions and what is learnt from them: batches that finished, instances that are ready.

What comes back for an unknown batch is ignored, so a result delivered twice, or after a crash was reported, does nothing.
The end of a booked batch may be told before the end of the one it is behind: two ends may take different ways. What has run has
run, so it counts at once; the slice stays with the one before it.
"""

from __future__ import annotations

from lamina.core.events import BatchFinished, InstanceReady, JobOutcome
from lamina.core.lifecycle import InstancePhase, next_phase
from lamina.core.policy import View
from lamina.core.scheduling.call_registry import CallRegistry
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.leases import slice_label
from lamina.core.scheduling.rolling_update import RollingUpdate
from lamina.core.scheduling.state import Batch, ControllerState
from lamina.core.tenancy.fair_share import FairShare
from lamina.core.workflow.engine import WorkflowEngine


class Completions:
    def __init__(
        self,
        state: ControllerState,
        view: View,
        lines: DispatchQueue,
        fleet: Cluster,
        fair: FairShare,
        renewal: RollingUpdate,
        calls: CallRegistry,
        course: WorkflowEngine,
    ) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = lines
        self._cluster = fleet
        self._fair_share = fair
        self._rolling_update = renewal
        self._call_registry = calls
        self._engine = course

    def on_batch_finished(self, event: BatchFinished) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is None:
            return
        device_us = max(0, event.device_us)
        self._account(batch, device_us)
        self._cluster.release_batch(batch)
        if batch.started_us < 0:
            batch.started_us = max(self._view.now_us - device_us, *[job.enqueued_us for job in batch.jobs])
        device, count = batch.device.spec, len(batch.jobs)
        label = slice_label(device.id, batch.mask)
        cost = device_us * device.lease_price(batch.mask.bit_count(), batch.cores) / count
        outcomes = event.outcomes
        if outcomes and len(outcomes) != count:  # which is which? No call gets an answer that may be another's
            outcomes = (JobOutcome(False, "bad-result"),) * count
        for index, job in enumerate(batch.jobs):
            run = job.run
            if run.jobs.pop(job.id, None) is None:
                continue  # its run has ended meanwhile
            run.queue_us += batch.started_us - job.enqueued_us
            if count > run.batch:
                run.batch = count
            run.slice = label
            run.cost += cost
            run.last_device = device.id
            if outcomes and not outcomes[index].ok:
                self._engine.on_job_failed(run, job, outcomes[index].error, outcomes[index].name, batch)
            elif run.flow.sole_task is not None:
                run.is_complete = True
                self._call_registry.reply(run)
            else:
                self._engine.on_job_succeeded(run, job, batch)

    def _account(self, batch: Batch, device_us: int) -> None:
        """Account for the measured time: charges, and what it says about the function."""
        now_us, device, count = self._view.now_us, batch.device.spec, len(batch.jobs)
        function = self._state.functions[batch.instance.function]
        function.consecutive_crashes = function.rejections = 0
        function.jobs_in_quarantine = max(0, function.jobs_in_quarantine - count)
        function.arrivals.on_batch_ended(now_us, count, device_us, batch.jobs[0].run.flow.sole_task is not None)
        if device_us:  # else it never ran, and says nothing about how long it takes
            self._view.predictor.observe(function.spec.name, device.kind, count, batch.mask.bit_count(), device_us, batch.cores)
        for bucket in (function.bucket, batch.instance.bucket):
            if bucket:
                bucket.charge(now_us, device_us)
        if self._fair_share.enabled:
            self._fair_share.on_batch_finished(now_us, batch, device_us)

    def on_instance_ready(self, event: InstanceReady) -> None:
        instance = self._state.instances.get(event.instance)
        if instance is None or instance.phase is not InstancePhase.LOADING:
            return
        instance.phase = next_phase(instance.phase, "ready")
        device = self._state.devices[instance.device]
        self._dispatch_queue.device_changed(device)
        predictor = self._view.predictor
        if event.load_us:
            predictor.observe_load(instance.function, device.spec.kind, event.load_us)
        for batch, units, device_us in event.probes:
            predictor.observe(instance.function, device.spec.kind, batch, units, device_us)
        for job in self._state.functions[instance.function].queue.jobs():  # they have been waiting for this load
            job.run.cold_us = max(job.run.cold_us, self._view.now_us - max(instance.created_us, job.enqueued_us))
        self._rolling_update.on_instance_ready(instance)
