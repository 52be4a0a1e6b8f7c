"""State of the controller: the clock, functions, instances and batches; `check()` verifies the invariants (`invariants.py`).

Fields are written by methods of the class that has them; each register of `ControllerState` by one module (`controller.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from lamina.core.giving_way import NO_PAUSES, Pauses
from lamina.core.invariants import check_quiet, check_state
from lamina.core.lifecycle import INSTANCE_TRANSITIONS, InstancePhase
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Queue
from lamina.core.token_bucket import TokenBucket
from lamina.types import NEVER_US, WHOLE_UNIT, DeviceSpec, FunctionSpec

if TYPE_CHECKING:
    from lamina.core.policy import Defer


@dataclass(slots=True, eq=False)
class Clock:
    """The two times of an event. They differ only while a durable run is recovered: see `controller.py`."""

    now_us: int = 0  #: event time: never runs backwards
    run_us: int = 0  #: run time: when what is being replayed happened first; else the event time

    def advance(self, now_us: int) -> None:
        """The next event. A clock that is behind is read as "no time has passed"."""
        if now_us > self.now_us:
            self.now_us = now_us
        self.run_us = self.now_us

    def replay_at(self, run_us: int) -> None:
        """For the rest of this event, runs move as they did at that time."""
        self.run_us = run_us


@dataclass(slots=True, eq=False)
class Instance:
    """A function loaded on a device."""

    id: str
    function: str
    device: str
    phase: InstancePhase
    created_us: int
    memory_mib: int = 0
    units: int = 1  #: of a batch, unless the policy says otherwise: its reserved slice, else what its function wants
    batches: dict[int, Batch] = field(default_factory=dict)  #: running and booked
    running: int = 0
    last_used_us: int = 0  #: when its last batch ended
    quota: float = 1.0  #: share of the time on its reserved slice that is its own
    bucket: TokenBucket | None = None  #: keeps it to that
    killed: bool = False  #: its end has been asked for and will be reported
    version: str = ""  #: of the code it was loaded with
    is_adopted: bool = False  #: it was loaded when its device joined
    segment_us: int = 0  #: its batches can be paused after so long; 0: they run in one go, as far as is known

    def on_segmented(self, segment_us: int) -> None:
        """Its batches run in segments of so long at most from now on."""
        self.segment_us = segment_us

    def has_capacity(self, limit: int) -> bool:
        """Whether it may run one batch more, when `limit` may run at once. What it has booked behind others comes on top."""
        if not limit:
            return True
        taken = self.running
        if taken < limit and len(self.batches) > taken:
            taken += sum(batch.behind is not None and batch.behind.instance is not self for batch in self.batches.values())
        return taken < limit

    def move(self, event: str) -> None:
        """To the next phase: ready, drain, lost or unload."""
        to = INSTANCE_TRANSITIONS[self.phase].get(event)
        assert to is not None, f"a {self.phase.value} instance cannot {event}"
        self.phase = to

    def kill(self) -> None:
        """Its end is asked for; until it is reported it takes no more batches."""
        self.killed = True
        if self.phase is InstancePhase.WARM:
            self.move("drain")

    def resize(self, units: int, quota: float, bucket: TokenBucket | None) -> None:
        self.units = units
        self.quota = quota
        self.bucket = bucket

    def add_batch(self, batch: Batch) -> None:
        self.batches[batch.id] = batch
        if batch.started_us >= 0:
            self.running += 1

    def on_booked_batch_began(self) -> None:
        self.running += 1

    def remove_batch(self, batch: Batch, now_us: int) -> None:
        """A batch has ended, or what was booked has been called off."""
        del self.batches[batch.id]
        if batch.started_us >= 0:
            self.running -= 1
            self.last_used_us = now_us


class Batch(Struct, eq=False):
    """Jobs of one function that run together: on a lease, or booked behind the batch whose slice they will have."""

    id: int
    instance: Instance
    device: Device
    mask: int
    jobs: list[Job]
    predicted_us: int
    started_us: int = -1  #: -1 while it is booked
    behind: Batch | None = None  #: whose slice it inherits
    follower: Batch | None = None  #: booked behind it
    planned_start_us: int = 0  #: start expected when it was decided
    sent_us: int = 0  #: when it was decided
    ready_us: int = 0  #: its time counts from then on at the earliest: it must get to its device, and its result back
    cores: int = 0  #: of the host
    transfer_us: int = 0  #: part of the prediction: bringing its inputs over
    early_us: int = 0  #: how much sooner than predicted batches of its function usually end
    part: float = 1.0  #: of each of its units; others have the rest
    heartbeat_us: int = -1  #: when one of its jobs last said that it is alive
    gives_way: bool = False  #: it pauses while others have units of its slice
    pauses: Pauses = NO_PAUSES  #: of one that gives way

    @property
    def expected_end_us(self) -> int:
        """When its result is expected here. A booked batch gets to its device while the one before it runs."""
        from_us = self.started_us if self.started_us >= 0 else self.planned_start_us
        return (from_us if from_us > self.ready_us else self.ready_us) + self.predicted_us + self.pauses.us

    @property
    def slice_free_us(self) -> int:
        """When its slice is expected to be free, after what is booked behind it too."""
        return self.expected_end_us if self.follower is None else self.follower.expected_end_us

    def handover_us(self, is_full: bool = False) -> int:
        """How long before its expected end the batch behind it must be sent, so that the slice does not wait: the way, and as
        much as it may end sooner than predicted. That is bounded by what such a wait costs; less so where it cannot grow."""
        way_us, early_us = self.device.way_us, self.early_us
        return way_us + (min(2 * early_us, 4 * way_us) if is_full else min(early_us, way_us))

    def begin(self, now_us: int) -> None:
        self.started_us = now_us

    def book_behind(self, other: Batch) -> None:
        self.behind = other
        other.follower = self

    def call_off(self) -> None:
        """Give up the place behind another."""
        assert self.behind is not None
        self.behind.follower = None

    def pass_on(self) -> Batch:
        """The batch booked behind it, which inherits its slice now."""
        follower = self.follower
        assert follower is not None
        self.follower = follower.behind = None
        return follower

    def on_heartbeat(self, now_us: int) -> None:
        self.heartbeat_us = now_us


def resubmit_window_us(device_us: int, direct: bool = True) -> int:
    """Time that clients have to call again: a quarter of the batch's time is as long as waiting for half of them could
    pay. From within a workflow they come back after its other steps, all of them or none, and waiting pays for longer."""
    return min(5_000, max(300, device_us // 4)) if direct else min(10_000, max(300, 3 * device_us // 4))


@dataclass(slots=True)
class ArrivalStats:
    """Arrival statistics of one function: `interarrival_us` follows bursts, `count` is for slower averages.

    `resubmit_share` is the part of a batch's clients that call again as soon as they have their answer: closed-loop clients do,
    and then the end of a batch is the best time to expect the next one.
    """

    count: int = 0
    last_us: int = -1
    interarrival_us: float = float(NEVER_US)
    offered: int = 0  #: calls, admitted or not
    offered_us: int = -1  #: the last of them
    offered_gap_us: float = float(NEVER_US)  #: calmer, with rejected calls: what is kept for them must not shrink by rejecting
    resubmit_share: float = 0.0
    resubmit_until_us: int = -1  #: until then an arrival counts as a resubmission after the last batch
    last_batch_size: int = 0
    resubmitted: int = 0  #: arrivals since

    def on_arrival(self, now_us: int) -> None:
        gap, known = now_us - self.last_us, self.interarrival_us
        if self.last_us >= 0:
            self.interarrival_us = gap if known >= NEVER_US else known + 0.3 * (gap - known)
        self.last_us = now_us
        self.count += 1
        self.on_offered(now_us)
        if now_us <= self.resubmit_until_us:
            self.resubmitted += 1

    def on_offered(self, now_us: int) -> None:
        gap, known = now_us - self.offered_us, self.offered_gap_us
        if self.offered_us >= 0:
            self.offered_gap_us = gap if known >= NEVER_US else known + 0.05 * (gap - known)
        self.offered_us = now_us
        self.offered += 1

    def on_batch_ended(self, now_us: int, size: int, device_us: int, direct: bool = True) -> None:
        if self.last_batch_size:
            self.resubmit_share += 0.2 * (min(1.0, self.resubmitted / self.last_batch_size) - self.resubmit_share)
        self.last_batch_size, self.resubmitted = size, 0
        self.resubmit_until_us = now_us + resubmit_window_us(device_us, direct)


REPEATED = 2
"""Failed loads in a row that are no accident."""


@dataclass(slots=True)
class FunctionState:
    """A deployed function: its queue, instances, and what has been learnt about it."""

    spec: FunctionSpec
    queue: Queue
    instances: dict[str, Instance] = field(default_factory=dict)
    instances_by_device: dict[str, int] = field(default_factory=dict)  #: how many of them on which device
    arrivals: ArrivalStats = field(default_factory=ArrivalStats)
    bucket: TokenBucket | None = None
    owed: TokenBucket | None = None  #: device time it is to have when it asks for it (`Quota(request=)`)
    consecutive_crashes: int = 0  #: a finished batch ends the row
    failed_loads: int = 0  #: in a row, by the function's own failure; a finished batch ends that row too
    load_not_before_us: int = 0  #: it crashed too often
    avoided: dict[str, int] = field(default_factory=dict)  #: nodes where a load failed, and until when others are preferred
    loads_started: int = 0  #: for instance names
    expected_jobs: float = 0.0  #: that runs in flight are yet to bring
    rejections: int = 0  #: since its last batch ended
    usual_part: float = 1.0  #: of the time predicted, which is seldom exceeded: what batches take on average
    jobs_in_quarantine: int = 0  #: ran beside others on a worker that died, and have not been tried since
    is_segmented: bool = False  #: batches of some instance can be paused
    placements: int = 0  #: changes of its instances or their phases: what was worked out about them holds until the next

    def batches_at_once(self, device: Device) -> int:
        """Batches one instance may run at once; 0: no limit. One at a time while it is not known which job kills."""
        spec, where = self.spec, device.spec
        limit = where.limits.batches_per_instance if spec.parts == WHOLE_UNIT else spec.batches_at_once(where)
        return 1 if self.jobs_in_quarantine else limit

    def redeploy(self, spec: FunctionSpec) -> None:
        """A new version, and a second chance if it kept crashing."""
        self.spec = spec
        self.forgive()
        self.placements += 1

    def set_quota(self, bucket: TokenBucket | None, owed: TokenBucket | None) -> None:
        self.bucket, self.owed = bucket, owed

    def replace_queue(self, queue: Queue) -> None:
        """With one of another kind, that has the same jobs."""
        self.queue = queue

    def next_instance_id(self) -> str:
        self.loads_started += 1
        return f"{self.spec.name}-{self.loads_started}"

    def on_segmented(self) -> None:
        self.is_segmented = True

    def on_instance_moved(self) -> None:
        """One of its instances is in another phase."""
        self.placements += 1

    def add_instance(self, instance: Instance) -> None:
        self.placements += 1
        self.instances[instance.id] = instance
        self.instances_by_device[instance.device] = self.instances_by_device.get(instance.device, 0) + 1

    def remove_instance(self, instance: Instance) -> None:
        self.placements += 1
        del self.instances[instance.id]
        self.instances_by_device[instance.device] -= 1
        if not self.instances_by_device[instance.device]:
            del self.instances_by_device[instance.device]

    def on_batch_finished(self, now_us: int, size: int, device_us: int, direct: bool) -> None:
        self.consecutive_crashes = self.failed_loads = self.rejections = 0
        if self.jobs_in_quarantine:
            self.release_quarantine(size)
        self.arrivals.on_batch_ended(now_us, size, device_us, direct)
        if self.bucket:
            self.bucket.charge(now_us, device_us)
        if self.owed:
            self.owed.charge(now_us, device_us)

    def on_prediction(self, predicted_us: int, took_us: int) -> None:
        """Learn how far predictions are on the safe side."""
        self.usual_part += 0.1 * (min(1.0, took_us / predicted_us) - self.usual_part)

    def on_crash(self, now_us: int, backoff_us: tuple[int, ...]) -> None:
        """An instance was lost: the next load waits longer, the more were lost in a row."""
        self.consecutive_crashes += 1
        self.load_not_before_us = now_us + backoff_us[min(self.consecutive_crashes, len(backoff_us)) - 1]

    def on_load_failed(self) -> None:
        self.failed_loads += 1

    def fails_to_load(self, now_us: int) -> bool:
        """Whether its loads are known to fail, and none is under way or due."""
        return self.failed_loads >= REPEATED and now_us < self.load_not_before_us and not self.instances

    def avoid(self, node: str, until_us: int, others: Set[str]) -> bool:
        """A load failed on a machine: `others` are to be tried first, as long as there is one that has not been. False: there is
        none, so it is the function's own failure."""
        self.avoided[node] = until_us
        if others <= self.avoided.keys():
            self.avoided.clear()
        return bool(self.avoided)

    def avoids(self, device: DeviceSpec) -> bool:
        return bool(self.avoided) and device.node in self.avoided

    def forget_avoided(self, now_us: int) -> None:
        self.avoided = {node: until_us for node, until_us in self.avoided.items() if until_us > now_us}

    def forgive(self) -> None:
        """A second chance, if it kept crashing."""
        self.consecutive_crashes = self.failed_loads = self.load_not_before_us = 0
        self.avoided.clear()

    def quarantine(self, jobs: int) -> None:
        """One of these killed a worker that ran several batches: one at a time, until all have been tried."""
        self.jobs_in_quarantine += jobs

    def release_quarantine(self, jobs: int) -> None:
        self.jobs_in_quarantine = max(0, self.jobs_in_quarantine - jobs)

    def on_rejection(self) -> None:
        self.rejections += 1

    def forget_rejections(self) -> None:
        self.rejections = 0

    def expect_jobs(self, change: float) -> None:
        """So many more, or fewer, are to come from runs in flight."""
        self.expected_jobs += change


@dataclass(slots=True)
class ControllerState:
    """All that the controller remembers."""

    functions: dict[str, FunctionState] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    runs: dict[str, ActiveCall] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    waiting: dict[str, FunctionState] = field(default_factory=dict)  #: functions with jobs, to be asked about
    deferred: dict[str, Defer] = field(default_factory=dict)  #: functions with jobs the policy has deferred
    backlogged: dict[str, dict[str, FunctionState]] = field(default_factory=dict)  #: by device: functions on it that have jobs
    booking_horizon_us: int = NEVER_US  #: no booking earlier than this before a slice is free: another tenant's turn may come
    next_job_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    next_batch_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    def limit_booking(self, horizon_us: int) -> None:
        self.booking_horizon_us = horizon_us

    def check(self) -> None:
        check_state(self)

    def check_quiet(self) -> None:
        check_quiet(self)
