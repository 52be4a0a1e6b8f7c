"""Independent ledger of leases, worked out a second time from events and actions alone.

It never looks into the controller. It believes what an engine would believe, and complains when an action asks for
something no engine could do: two slices that overlap, a job run twice at once, an answer given twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.types import Call, DeviceSpec, FunctionSpec


@dataclass
class Loaded:
    """An instance, as its engine knows it."""

    id: str
    function: str
    device: str
    memory_mib: int
    home: int = 0
    quota: float = 1.0
    lend: bool = True
    ready: bool = False


@dataclass
class Leased:
    """A batch an engine has been given: it runs, or waits for the one before it."""

    action: do.StartBatch
    running: bool
    next: Leased | None = None


@dataclass
class Ledger:
    devices: dict[str, DeviceSpec] = field(default_factory=dict)
    functions: dict[str, FunctionSpec] = field(default_factory=dict)
    instances: dict[str, Loaded] = field(default_factory=dict)
    batches: dict[int, Leased] = field(default_factory=dict)
    questions: list[do.ResolveData] = field(default_factory=list)
    open: dict[str, Call] = field(default_factory=dict)  #: accepted and not ended
    endings: list[do.Reply | do.FailCall | do.Reject] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    least_parts: dict[str, float] = field(default_factory=dict)  #: of what was predicted: the least a batch of a function took
    done: set[int] = field(default_factory=set)  #: jobs that have had their outcome
    adopted: set[str] = field(default_factory=set)  #: instances that had been loaded before
    ticks: list[int] = field(default_factory=list)  #: asked for, not delivered
    journal: deque[do.AppendJournal] = field(default_factory=deque)  #: entries on their way to the disk

    # ------------------------------------------------------------------ what happened

    def happened(self, event: ev.Event) -> None:
        match event:
            case ev.BatchFinished():
                lease = self.batches.get(event.batch_id)
                if lease is not None and lease.action.jobs:  # booked or begun: what has run has run, unless it was abandoned
                    jobs = lease.action.jobs
                    part = min(1.0, event.device_us / max(1, lease.action.predicted_us))
                    self.least_parts[lease.action.function] = min(part, self.least_parts.get(lease.action.function, 1.0))
                    told = event.outcomes if len(event.outcomes) == len(jobs) else (ev.JobOutcome(),) * len(jobs)
                    self.done |= {job.id for job, one in zip(jobs, told, strict=True) if not (one.is_stale or one.lost)}
                    self._end(lease)
            case ev.BatchFailed():
                lease = self.batches.get(event.batch_id)
                if lease is not None:
                    self._end(lease)
            case ev.InstanceReady():
                if event.instance in self.instances:
                    self.instances[event.instance].ready = True
            case ev.InstanceLost():
                self._lose([event.instance])
            case ev.DeviceLost():
                if self.devices.pop(event.device, None) is not None:
                    self._lose([loaded.id for loaded in self.instances.values() if loaded.device == event.device])
            case ev.DeviceJoined():
                self.devices.setdefault(event.device.id, event.device)
            case ev.Deployed():
                self.functions.update({spec.name: spec for spec in event.functions})
                for loaded in self.instances.values():
                    loaded.lend = self.functions[loaded.function].lend

    def _lose(self, names: list[str]) -> None:
        lost = [lease for lease in self.batches.values() if lease.action.instance in names]
        for lease in sorted(lost, key=lambda lease: lease.running):
            self._end(lease)
        for name in names:
            self.instances.pop(name, None)

    def _end(self, lease: Leased) -> None:
        del self.batches[lease.action.batch_id]
        if lease.running:
            if lease.next is not None:
                lease.next.running = True
        elif lease.action.behind in self.batches:
            self.batches[lease.action.behind].next = None

    # -------------------------------------------------------------- what is asked for

    def asked(self, now_us: int, event: ev.Event, actions: list[do.Action]) -> None:
        """Everything the controller said to this event."""
        arrival = event.call if isinstance(event, ev.CallArrived | ev.CallRecovered) else None
        refused = [action for action in actions if isinstance(action, do.Reject)]
        if arrival is not None:
            assert len(refused) <= 1, "refused twice"
            assert all(action.call_id == arrival.id for action in refused), "somebody else was refused"
            if not refused:
                assert arrival.id not in self.open, f"{arrival.id} was accepted twice"
                self.open[arrival.id] = arrival
        else:
            assert not refused, "only an arrival can be refused"
        for action in actions:
            self._one(now_us, action)

    def _one(self, now_us: int, action: do.Action) -> None:
        match action:
            case do.Reply() | do.FailCall():
                assert action.call_id in self.open, f"{action.call_id} ended twice, or was never accepted"
                del self.open[action.call_id]
                self.endings.append(action)
            case do.Reject():
                self.endings.append(action)
            case do.StartBatch():
                self._start(now_us, action)
            case do.Load():
                self._load(action)
            case do.Unload():
                loaded = self.instances.pop(action.instance)
                busy = [b for b in self.batches.values() if b.action.instance == loaded.id]
                assert not busy, f"{loaded.id} is unloaded under its batches"
            case do.Resize():
                loaded = self.instances[action.instance]
                loaded.home, loaded.quota = action.mask, action.quota
                loaded.lend = self.functions[loaded.function].lend
                self._check_homes(loaded.device)
            case do.ResolveData():
                assert action.call_id in self.open, "a question about a run that has ended"
                self.questions.append(action)
            case do.AppendJournal():
                assert self.open[action.call_id].durable, "a journal of a run that is not durable"
                self.journal.append(action)
            case do.DropJob():
                self.dropped.add(action.job_id)
            case do.Kill():
                assert action.instance in self.instances, "nobody to kill"
            case do.ReleaseDevice():
                assert not [i for i in self.instances.values() if i.device == action.device], "given back in use"
                del self.devices[action.device]
            case do.WakeAt():
                assert action.at_us > now_us, "woken in the past"
                self.ticks.append(action.at_us)

    def _load(self, action: do.Load) -> None:
        spec, device = self.functions[action.function], self.devices[action.device]
        assert action.instance not in self.instances, "one name for two instances"
        if action.adopts:
            self.adopted.add(action.instance)
        assert spec.fits_family(device.family), f"{spec.name} cannot be on a {device.family}"
        self.instances[action.instance] = Loaded(
            action.instance, spec.name, device.id, spec.memory_mib, action.mask, action.quota, spec.lend
        )
        used_mib = sum(loaded.memory_mib for loaded in self.instances.values() if loaded.device == device.id)
        assert used_mib <= device.memory_mib, f"{device.id} is over its memory"
        self._check_homes(device.id)

    def _check_homes(self, device: str) -> None:
        given: dict[int, float] = {}
        for loaded in self.instances.values():
            if loaded.device == device and loaded.home:
                assert not any(home & loaded.home for home in given if home != loaded.home), "homes overlap"
                self._check_shape(self.devices[device], loaded.home)
                given[loaded.home] = given.get(loaded.home, 0.0) + loaded.quota
        assert all(part <= 1 + 1e-9 for part in given.values()), "more than all the time of a slice is given away"

    def _check_shape(self, device: DeviceSpec, mask: int) -> None:
        units, start = mask.bit_count(), (mask & -mask).bit_length() - 1
        assert mask == ((1 << units) - 1) << start, f"{mask:b} is not one block"
        assert mask < 1 << device.units, f"{device.id} has no units {mask:b}"
        assert not device.limits.sizes or units in device.limits.sizes, f"{device.id} has no slices of {units}"
        from_above = device.units - start
        assert not device.limits.aligned or start % units == 0 or from_above % units == 0, f"{mask:b} does not start where it may"

    def _start(self, now_us: int, action: do.StartBatch) -> None:
        device, loaded = self.devices[action.device], self.instances[action.instance]
        assert loaded.ready, f"{loaded.id} is not ready"
        assert (loaded.function, loaded.device) == (action.function, action.device)
        self._check_jobs(now_us, action)
        self._check_shape(device, action.mask)
        lease = Leased(action, running=not action.behind)
        if action.behind:
            before = self.batches[action.behind]
            assert before.running, "booked behind a booked batch"
            assert before.next is None, "two batches booked behind one"
            assert before.action.device == action.device
            assert action.mask & ~before.action.mask == 0, "it does not inherit that slice"
            assert action.cores <= before.action.cores, "nor those cores"
            assert action.part == before.action.part == 1.0, "parts of units are not booked"
            before.next = lease
        else:
            self._check_parts(action)
            held = sum(b.action.cores for b in self.batches.values() if b.running and b.action.device == device.id)
            assert held + action.cores <= device.cores, "more cores than the host has"
            homes = [i for i in self.instances.values() if i.device == device.id and i.home != loaded.home]
            foreign = [i for i in homes if not i.lend]
            assert not any(i.home & action.mask for i in foreign), "a home that is not lent was leased"
        assert device.limits.per_batch or action.mask == loaded.home, "only its standing slice may be leased"
        self.batches[action.batch_id] = lease

    def _check_jobs(self, now_us: int, action: do.StartBatch) -> None:
        ids = [job.id for job in action.jobs]
        if not ids:  # its device has begun it for another controller
            assert action.instance in self.adopted and not action.behind, "an empty batch"
            return
        assert len(set(ids)) == len(ids), "a job twice in one batch"
        assert len(ids) <= self.functions[action.function].max_batch, "more than one batch takes"
        elsewhere = {job.id for lease in self.batches.values() for job in lease.action.jobs}
        assert not elsewhere & set(ids), "a job in two batches"
        assert not self.done & set(ids), "a job that has had its outcome"
        assert not self.dropped & set(ids), "a job that was dropped"
        assert all(job.call_id in self.open for job in action.jobs), "a job of a run that has ended"
        if action.predicted_us:
            latest_us = max(self.open[job.call_id].expires_us for job in action.jobs)
            usual_us = int(action.predicted_us * self.least_parts.get(action.function, 1.0))  # or more
            assert now_us + usual_us <= latest_us, "predicted to be too late for everybody"

    def _check_parts(self, action: do.StartBatch) -> None:
        """Of no unit more is leased than there is, beside a batch that has it whole nothing; but for batches that give way, which
        overlap others, and are named, and no other that gives way."""
        there = [lease.action for lease in self.batches.values() if lease.running and lease.action.device == action.device]
        running = [one for one in there if one.gives_way == action.gives_way]
        if action.gives_way:  # to what is booked too: it will be there without another word
            there = [lease.action for lease in self.batches.values() if lease.action.device == action.device]
        others = {one.batch_id for one in there if one.gives_way != action.gives_way and one.mask & action.mask}
        assert set(action.overlaps) == others, "it is not told what is on its units"
        for unit in range(action.mask.bit_length()):
            there = [one.part for one in (*running, action) if one.mask >> unit & 1] if action.mask >> unit & 1 else []
            assert sum(there) <= 1 + 1e-9, "slices overlap"
            assert len(there) <= 1 or max(there) < 1, "slices overlap"

    def _leased(self, device: str) -> int:
        leased = 0
        for lease in self.batches.values():
            if lease.running and lease.action.device == device:
                leased |= lease.action.mask
        return leased

    def check(self, now_us: int) -> None:
        """What must hold between any two events."""
        for device in self.devices.values():
            assert self._leased(device.id) < 1 << device.units
            for loaded in self.instances.values():
                own = [b.action for b in self.batches.values() if b.running and b.action.instance == loaded.id]
                limit = device.limits.batches_per_instance if all(one.part == 1 for one in own) else 0  # parts have no other
                if limit and loaded.device == device.id:
                    at_once = len(own)
                    assert at_once <= limit, f"{loaded.id} runs {at_once} batches at once"
        for lease in self.batches.values():
            assert lease.running or lease.action.behind in self.batches, "booked behind nothing"
        assert self.ticks, "nobody will ever look again"
