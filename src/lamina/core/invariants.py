"""Invariants of the controller's state: all that a single moment can show. Checked after every event of every test and by
`lamina sim --check`; a server does not look at them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lamina.core.lifecycle import InstancePhase

if TYPE_CHECKING:
    from lamina.core.scheduling.jobs import Job
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import ControllerState


def check_state(state: ControllerState) -> None:
    """Check every invariant that a single moment can show."""
    for device in state.devices.values():
        check_device(device)
        assert device.memory_used_mib == sum(state.instances[i].memory_mib for i in device.instances)
    in_batch = {job.id: batch for batch in state.batches.values() for job in batch.jobs}
    assert len(in_batch) == sum(len(batch.jobs) for batch in state.batches.values()), "a job is in two batches"
    queued = _check_functions(state)
    assert not in_batch.keys() & queued.keys(), "a job is queued or in a batch, never both"
    for call_id, run in state.runs.items():
        assert run.call.id == call_id
        assert not run.is_ended, f"{call_id} has ended and is still here"
        run.check()
        for job in run.jobs.values():
            assert job.is_queued == (job.id in queued), f"job {job.id} of {call_id} is {job.state} and its queue disagrees"
            assert bool(job.batch_id) == (job.id in in_batch), f"job {job.id} of {call_id} is in no batch, or not in its own"
    for job in queued.values():
        assert state.runs.get(job.run.call.id) is job.run, "a queued job has no run"
        assert job.id in job.run.jobs, "a queued job its run does not know"
    _check_batches(state)
    for instance in state.instances.values():
        assert instance.running == sum(batch.started_us >= 0 for batch in instance.batches.values())
        limit = state.devices[instance.device].spec.limits.batches_per_instance
        is_shared = any(batch.part < 1 for batch in instance.batches.values())  # the parts are its limit
        assert not limit or is_shared or instance.running <= limit, f"{instance.id} runs {instance.running} batches at once"
        serves = instance.phase in (InstancePhase.WARM, InstancePhase.DRAINING)
        assert not instance.batches or serves, "it cannot run batches yet"
        assert state.functions[instance.function].instances.get(instance.id) is instance
        assert state.devices[instance.device].instances.get(instance.id) == instance.function, f"{instance.id} is on no device"
    if not state.runs:
        assert not state.waiting, "quiet, and jobs still wait"
        assert not state.deferred, "quiet, and jobs are still put off"


def _check_functions(state: ControllerState) -> dict[int, Job]:
    queued: dict[int, Job] = {}
    for name, function in state.functions.items():
        assert not (name in state.waiting and name in state.deferred), f"{name} is to be asked about and put off"
        assert (len(function.queue) > 0) == (name in state.waiting or name in state.deferred), f"{name} is not listed right"
        hosts = Counter(i.device for i in function.instances.values())
        listed = {host for host, those in state.backlogged.items() if name in those}
        assert listed == (hosts.keys() if len(function.queue) else set()), f"{name} is not counted where it waits"
        assert function.instances_by_device == hosts, f"{name} is not where it is said to be"
        jobs = function.queue.jobs()
        assert len({job.id for job in jobs}) == len(jobs), f"{name} queues a job twice"
        queued |= {job.id: job for job in jobs}
        if function.bucket:
            assert function.bucket.level_us <= function.bucket.burst_us, f"{name} has saved more than its bucket holds"
        expected = sum(run.expected_jobs.get(name, 0.0) for run in state.runs.values())
        assert abs(function.expected_jobs - expected) < 1e-6 * (1 + expected), f"{name} expects jobs no run will bring"
    return queued


def _check_batches(state: ControllerState) -> None:
    for batch in state.batches.values():
        assert batch.instance.batches.get(batch.id) is batch, "a batch its instance does not know"
        assert state.instances.get(batch.instance.id) is batch.instance, "a batch on an instance that is gone"
        if batch.started_us >= 0:
            leases = batch.device.yielding if batch.gives_way else batch.device.running
            assert leases.get(batch.id) == batch.mask, "a running batch without a lease"
            expected = ((batch.expected_end_us, batch.device.ends), (batch.slice_free_us, batch.device.returns))
            for at_us, index in expected if not batch.gives_way else ():
                assert (at_us, batch.id, batch.mask.bit_count()) in index, "its device expects it at another time"
            assert batch.behind is None
        else:
            assert batch.behind is not None, "a booked batch behind nothing"
            assert batch.behind.follower is batch, "a booked batch the one before it does not know"
            assert state.batches.get(batch.behind.id) is batch.behind, "booked behind a batch that is over"
            assert batch.behind.started_us >= 0, "booked behind a booked batch"
            assert batch.mask & ~batch.behind.mask == 0, "booked for units it will not inherit"


def check_quiet(state: ControllerState) -> None:
    """Check that with nothing left to do, everything is given back."""
    assert not state.runs, f"{len(state.runs)} calls never ended"
    assert not state.batches
    idle = [device.busy == 0 and not device.yielding for device in state.devices.values()]
    assert all(idle), "quiet, and units are still leased"


def check_device(device: Device) -> None:
    device.shared.check(device.running)
    busy = 0
    for batch_id, mask in device.running.items():
        assert batch_id in device.shared.parts or not busy & mask, f"slices overlap on {device.spec.id}"
        busy |= mask
    assert busy == device.busy, f"{device.spec.id} counts units that no batch holds"
    for index in (device.ends, device.returns):
        assert index == sorted(index) and len(index) == len(device.running), f"ends on {device.spec.id} are out of order"
    assert busy | device.all_units == device.all_units, f"more units leased than {device.spec.id} has"
    assert device.cores_busy == sum(device.cores.values()) <= device.spec.cores, f"cores of {device.spec.id} are over-committed"
    assert device.cores.keys() <= {*device.running, *device.yielding}, "cores outlived their batch"
    assert device.yielding_units.bit_count() == sum(mask.bit_count() for mask in device.yielding.values()), (
        "overlap gives way twice"
    )
    kept = 0
    for mask in set(device.homes.values()):
        assert not kept & mask, f"homes overlap on {device.spec.id}"
        assert device.time_share_given(mask) <= 1 + 1e-9, f"more than all the time of a slice of {device.spec.id} is given away"
        kept |= mask
    assert device.time_shares.keys() == device.homes.keys()
    assert 0 <= device.memory_used_mib <= device.spec.memory_mib, f"memory of {device.spec.id} is over its cap"
    assert device.homes.keys() <= device.instances.keys(), "a home outlived its instance"
    assert device.lent <= device.homes.keys(), "nothing is lent where there is no home"
