"""Events: what may happen. A crash and a timer are events too, so a test can make anything happen at any instant."""

from __future__ import annotations

from msgspec import Struct

from lamina.core.workflow.flow import Flow
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.types import Call, DeviceSpec, FunctionSpec, Tenant


class Deployed(Struct, frozen=True, tag=True):
    """Deployment of functions and workflows; a known name is replaced."""

    functions: tuple[FunctionSpec, ...] = ()
    flows: tuple[Flow, ...] = ()


class CallArrived(Struct, frozen=True, gc=False, tag=True):
    call: Call
    more_coming: bool = (
        False  #: others may have come in the same instant: it is admitted now, and served with them at `ArrivalsDrained`
    )


class ArrivalsDrained(Struct, frozen=True, tag=True):
    """End of the arrivals of this instant: time to dispatch them together."""


class CallCancelled(Struct, frozen=True, tag=True):
    call_id: str


class JobOutcome(Struct, frozen=True, array_like=True):
    """Outcome of one job of a batch. `error` is a stable word, `name` what the error is called where it was raised, for
    catchers; its text stays outside the core. `is_stale`: it has read state that was changed meanwhile, and nothing else is
    wrong: it may run again. `lost`: steps of its run whose results it needs, and that went with a machine or an executor: it has
    not run. `is_final`: it has changed state, so it must not run again even if its result is lost."""

    ok: bool = True
    error: str = ""
    name: str = ""
    is_stale: bool = False
    lost: tuple[str, ...] = ()
    is_final: bool = False


class BatchFinished(Struct, frozen=True, tag=True):
    """`device_us` is measured time on the slice; no outcomes means that all jobs succeeded. A warm-up says nothing of how long
    the batches after it take: what they need was made for it."""

    batch_id: int
    device_us: int
    outcomes: tuple[JobOutcome, ...] = ()
    is_warmup: bool = False


class BatchFailed(Struct, frozen=True, tag=True):
    """Failure of a batch as a whole while its instance lives (out of memory, say): smaller batches may succeed."""

    batch_id: int
    reason: str


class AbandonedBatch(Struct, frozen=True, array_like=True):
    """What an instance still runs for a controller that is gone, or was cut off."""

    mask: int
    predicted_us: int = 0
    ran_us: int = 0  #: so far
    cores: int = 0


class InstanceReady(Struct, frozen=True, tag=True):
    """An instance is loaded. One that was adopted may be busy: with what it runs, and nothing waits for, it gets a batch without
    jobs (`StartBatch`), whose end is told as that of any other (`BatchFailed`)."""

    instance: str
    load_us: int = 0
    probes: tuple[tuple[int, int, int], ...] = ()  #: warm-up runs before it took calls: batch, units, microseconds
    abandoned: AbandonedBatch | None = None


class InstanceSegmented(Struct, frozen=True, tag=True):
    """Batches of an instance can run in segments from now on, the longest of which takes so long, and be paused between two."""

    instance: str
    segment_us: int


class BatchPaused(Struct, frozen=True, tag=True):
    """A batch that gives way has come to the end of a segment, and others have its units: so much of it is left. `left_us` is 0
    where it is not known."""

    batch_id: int
    remaining_segments: int
    left_us: int


class InstanceLost(Struct, frozen=True, tag=True):
    instance: str
    reason: str = "worker-lost"


class DeviceJoined(Struct, frozen=True, tag=True):
    device: DeviceSpec


class DeviceLost(Struct, frozen=True, tag=True):
    """Loss of a device with all instances on it. `blames`: a batch may have been the cause, and is tried alone; else its machine
    was lost, or the way there, and no job is to blame."""

    device: str
    blames: bool = False


class DeviceSuspended(Struct, frozen=True, tag=True):
    """No sign of life of a device for a while: nothing new is sent there, what runs is waited for. With `suspended` false it is
    back."""

    device: str
    suspended: bool = True


class DeviceDraining(Struct, frozen=True, tag=True):
    """A device is about to be taken away: its instances are replaced elsewhere first, and leave."""

    device: str


class InstanceFound(Struct, frozen=True, tag=True):
    """An instance that a device had loaded when it joined: of a time when another controller led, or the way there was cut.
    It is adopted under a new id (`Load.adopts`) if it is of use, else unloaded under the name it has."""

    name: str
    device: str
    function: str
    version: str = ""
    mask: int = 0  #: its reserved slice; 0: none
    quota: float = 1.0


class DataResolved(Struct, frozen=True, tag=True):
    """Answer to `ResolveData`: how many items (each), which branch (choice), how many microseconds (wait), which next node
    (a task that has ended). An `error`, by name, fails the node there.

    `limits` are what the data says in place of the flow: of an each (at once, may fail), of a task (timeout, heartbeat).
    """

    call_id: str
    scope: int
    node: str
    value: int = 0
    error: str = ""
    execution_id: int = 0  #: as in the request
    limits: tuple[int, ...] = ()


class Heartbeat(Struct, frozen=True, tag=True):
    """Heartbeat of a running job, for steps with a heartbeat timeout. `alive_only`: the loop that it waits on is alive, so its
    worker does not hang; the step itself has said nothing."""

    call_id: str
    job_id: int
    alive_only: bool = False


class TaskReported(Struct, frozen=True, tag=True):
    """Outcome of a step that waits for a report, by its token; without an `error` it succeeded."""

    call_id: str
    execution_id: int
    error: str = ""  #: a stable word
    name: str = ""  #: what the error is called, for catchers


class TenantUpdated(Struct, frozen=True, tag=True):
    """New limits of a tenant. `spent_unit_us` is added to its usage of today: for a restart."""

    tenant: Tenant
    spent_unit_us: float = 0.0


class CallRecovered(Struct, frozen=True, tag=True):
    """Recovery of a durable call accepted before a restart. It begins again without work being started for it; `Journaled` after
    `Journaled` brings it to where it was, and `ReplayDone` lets it go on. `flow` is the one it began with, if that has changed
    since. `redriven_us` is when a client last had it tried again: timeouts count from then."""

    call: Call
    flow: Flow | None = None
    redriven_us: int = 0


class Journaled(Struct, frozen=True, tag=True):
    """Confirmation that a journal entry of a durable run is on disk; it takes effect now."""

    call_id: str
    entry: JournalEntry


class ReplayDone(Struct, frozen=True, tag=True):
    """End of the replay of a recovered run: its whole journal has been applied."""

    call_id: str
    redriven_us: int = 0


class Tick(Struct, frozen=True, tag=True):
    """Timer tick: the time asked for with `WakeAt` has come."""


Event = (
    Deployed
    | CallArrived
    | ArrivalsDrained
    | CallCancelled
    | BatchFinished
    | BatchFailed
    | InstanceReady
    | InstanceSegmented
    | BatchPaused
    | InstanceLost
    | DeviceJoined
    | DeviceLost
    | DeviceSuspended
    | DeviceDraining
    | InstanceFound
    | DataResolved
    | Heartbeat
    | TaskReported
    | CallRecovered
    | Journaled
    | ReplayDone
    | TenantUpdated
    | Tick
)
