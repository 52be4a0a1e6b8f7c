"""Completions and what is learnt from them: batches that finished, instances that are ready.

What comes back for an unknown batch is ignored, so a result delivered twice, or after a crash was reported, does nothing.
The end of a booked batch may be told before the end of the one it is behind: two ends may take different ways. What has run has
run, so it counts at once; the slice stays with the one before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from lamina.core.events import BatchFinished, BatchPaused, InstanceReady, InstanceSegmented, JobOutcome
from lamina.core.lifecycle import LOADING
from lamina.core.policy import PrepareRole, View
from lamina.core.rolling_update import RollingUpdate
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.failures import Failures
from lamina.core.scheduling.jobs import RunDefects, Tenancy
from lamina.core.scheduling.leases import Device, slice_label
from lamina.core.scheduling.state import Batch, ControllerState

PACE_SMOOTHING = 0.2  #: weight of the newest observation of the pace of a device
SLOWER = 2.0
"""So many times the pace of the fastest device of its kind makes one slow. Against each other: predictions have widened by
then."""

MIN_OBSERVATIONS = 5
LEAST_PACE = 0.1
"""A device is not so fast that all others are slow beside it."""


class DevicePace:
    """Pace of each device: mean of observed over predicted time. Those of one kind are in order: the fastest is found at once.

    Predictions are learnt per kind of device. A machine that is slow for reasons of its own (another user, a throttled clock, a
    failing disk) must not slow down the plans for the others: while they keep to the prediction it teaches nothing, and what it
    takes longer counts as part of the way there, which is its own. When all become slower, the function has changed: all teach.
    """

    def __init__(self) -> None:
        self._paces: dict[str, tuple[int, float]] = {}
        self._fastest: dict[str, list[tuple[float, str]]] = {}  #: by kind: paces and devices that have been seen often enough

    def usual_us(self, batch: Batch, devices: Mapping[str, Device], device_us: int) -> int:
        """Of the time that a batch took on its device, what it would have taken on another of that kind: all of it, unless its
        own is slow by itself."""
        if not batch.predicted_us:
            return device_us
        device = batch.device.spec
        seen, before = self._paces.get(device.id, (0, 0.0))
        seen, ratio = seen + 1, device_us / batch.predicted_us
        pace = before + max(PACE_SMOOTHING, 1 / seen) * (ratio - before)
        self._paces[device.id] = (seen, pace)
        if seen < MIN_OBSERVATIONS:
            return device_us
        paces = self._fastest.setdefault(device.kind, [])
        if (at := bisect_left(paces, (before, device.id))) < len(paces) and paces[at] == (before, device.id):
            del paces[at]
        fastest = self._fastest_other(paces, device.kind, devices)
        insort(paces, (pace, device.id))
        is_slow = fastest is not None and pace > SLOWER * max(LEAST_PACE, fastest)
        return min(device_us, batch.predicted_us) if is_slow else device_us

    def _fastest_other(self, paces: list[tuple[float, str]], kind: str, devices: Mapping[str, Device]) -> float | None:
        """Least of these paces; entries of devices that have left are dropped when they come first."""
        while paces:
            pace, name = paces[0]
            device = devices.get(name)
            if device is not None and device.spec.kind == kind and self._paces[name][1] == pace:
                return pace
            del paces[0]
        return None


class Completions:
    def __init__(
        self,
        state: ControllerState,
        view: View,
        cluster: Cluster,
        tenancy: Tenancy,
        rolling_update: RollingUpdate,
        failures: Failures,
        prepares: PrepareRole | None,
    ) -> None:
        self._state = state
        self._view = view
        self._cluster = cluster
        self._tenancy = tenancy
        self._failures = failures
        self._prepares = prepares
        self._rolling_update, self._pace = rolling_update, DevicePace()

    def on_batch_finished(self, event: BatchFinished) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is None or not batch.jobs:  # what was abandoned has no results
            return
        device_us = max(0, event.device_us)
        self._account(batch, device_us, learns=not event.is_warmup)
        self._cluster.release_batch(batch)
        if batch.started_us < 0:
            batch.begin(max(self._view.now_us - device_us, *[job.enqueued_us for job in batch.jobs]))
        device, count = batch.device.spec, len(batch.jobs)
        label = slice_label(device.id, batch.mask)
        cost = device_us * device.lease_price(batch.mask.bit_count(), batch.cores) * batch.part / count
        outcomes = event.outcomes
        if outcomes and len(outcomes) != count:  # which is which? No call gets an answer that may be another's
            outcomes = (JobOutcome(False, "bad-result"),) * count
        defects: dict[str, Exception] = {}
        for index, job in enumerate(batch.jobs):
            run = job.run
            if outcomes and outcomes[index].is_stale and job.id in run.jobs and self._failures.rerun_stale(batch, job, cost):
                continue
            if (
                outcomes
                and outcomes[index].lost
                and job.id in run.jobs
                and run.owner.on_inputs_lost(run, job, outcomes[index].lost)
            ):
                continue
            if outcomes and outcomes[index].is_final:
                job.on_state_changed()
            if not run.finish_job(job, batch.started_us, count, label, device.id, cost):
                continue  # its run has ended meanwhile
            try:
                if outcomes and not outcomes[index].ok:
                    run.owner.on_job_failed(run, job, outcomes[index].error, outcomes[index].name, batch)
                else:
                    run.owner.on_job_succeeded(run, job, batch)
            except Exception as error:  # the other jobs of the batch have outcomes too
                defects[run.call.id] = error
        if defects:
            raise RunDefects(defects)

    def _account(self, batch: Batch, device_us: int, *, learns: bool) -> None:
        """Account for the measured time: charges, and what it says about the function and the way to the device."""
        now_us, device, count = self._view.now_us, batch.device.spec, len(batch.jobs)
        function, instance = self._state.functions[batch.instance.function], batch.instance
        function.on_batch_finished(now_us, count, device_us, not batch.jobs[0].run.is_workflow)
        if device_us and learns:  # else it never ran, or as none after it will: it says nothing about how long they take
            usual_us = self._pace.usual_us(batch, self._state.devices, device_us) if device.node else device_us
            if usual_us == device_us:  # else its machine is slow: the others of its kind learn nothing from it
                self._view.predictor.observe(
                    function.spec.name, device.kind, count, batch.mask.bit_count(), device_us, batch.cores
                )
            if batch.predicted_us:
                function.on_prediction(batch.predicted_us, usual_us + batch.transfer_us)
            if batch.gives_way:
                pass  # it was paused meanwhile
            elif batch.started_us == batch.sent_us:  # not booked: then all the rest of its time was the way
                batch.device.observe_way(now_us - batch.sent_us - batch.transfer_us - usual_us)
            elif usual_us < device_us:
                batch.device.observe_way(device_us - usual_us)
        if instance.bucket:
            instance.bucket.charge(now_us, device_us)
        if self._tenancy.enabled:
            self._tenancy.on_batch_finished(now_us, batch, device_us)

    def on_instance_segmented(self, event: InstanceSegmented) -> None:
        instance = self._state.instances.get(event.instance)
        if instance is not None:
            instance.on_segmented(event.segment_us)
            self._state.functions[instance.function].on_segmented()
            self._cluster.on_segmented(instance)

    def on_batch_paused(self, event: BatchPaused) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is not None and batch.gives_way:
            batch.pauses.on_told(self._view.now_us, batch, event)

    def on_instance_ready(self, event: InstanceReady) -> None:
        instance = self._state.instances.get(event.instance)
        if instance is None or instance.phase is not LOADING:
            return
        self._cluster.on_ready(instance)
        predictor, kind = self._view.predictor, self._state.devices[instance.device].spec.kind
        if event.load_us:
            predictor.observe_load(instance.function, kind, event.load_us)
        for batch, units, device_us in event.probes:
            predictor.observe(instance.function, kind, batch, units, device_us)
        for job in self._state.functions[instance.function].queue.jobs():  # they have been waiting for this load
            job.run.on_cold_start(self._view.now_us - max(instance.created_us, job.enqueued_us))
        if self._prepares is not None:
            self._prepares.prepare(self._view, self._state.functions[instance.function])
        self._rolling_update.on_instance_ready(instance)
