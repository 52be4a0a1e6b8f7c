"""What may happen. A crash and a timer are events too, so a test can make anything happen at any instant."""

from __future__ import annotations

from msgspec import Struct

from lamina.core.flow import Flow
from lamina.core.notes import Note
from lamina.types import Call, DeviceSpec, FunctionSpec, Tenant


class Deployed(Struct, frozen=True, tag=True):
    """Functions and workflows exist from now on; a known name is replaced."""

    functions: tuple[FunctionSpec, ...] = ()
    flows: tuple[Flow, ...] = ()


class CallArrived(Struct, frozen=True, gc=False, tag=True):
    call: Call
    more: bool = False  #: others may have come in the same instant: it is admitted now, and served with them at `AllHere`


class AllHere(Struct, frozen=True, tag=True):
    """Nobody else has come in this instant: time to decide about those who have."""


class CallCancelled(Struct, frozen=True, tag=True):
    call_id: str


class JobOutcome(Struct, frozen=True, array_like=True):
    """How one job of a batch ended. `error` is a stable word, `name` what the error is called where it was raised, for those
    who catch it; its text stays outside the core."""

    ok: bool = True
    error: str = ""
    name: str = ""


class BatchFinished(Struct, frozen=True, tag=True):
    """`device_us` is measured time on the slice; no outcomes means that all jobs succeeded."""

    batch_id: int
    device_us: int
    outcomes: tuple[JobOutcome, ...] = ()


class BatchFailed(Struct, frozen=True, tag=True):
    """The batch as a whole came to nothing, the instance lives (out of memory, say): smaller batches may succeed."""

    batch_id: int
    reason: str


class InstanceReady(Struct, frozen=True, tag=True):
    instance: str
    load_us: int = 0
    probes: tuple[tuple[int, int, int], ...] = ()  #: runs for nobody before it took calls: batch, units, microseconds


class InstanceLost(Struct, frozen=True, tag=True):
    instance: str
    reason: str = "worker-lost"


class DeviceJoined(Struct, frozen=True, tag=True):
    device: DeviceSpec


class DeviceLost(Struct, frozen=True, tag=True):
    device: str


class Resolved(Struct, frozen=True, tag=True):
    """Answer to `Resolve`: how many items (each), which branch (choice), how many microseconds (wait), which of its ways on
    (a task that has ended). An `error`, by name, fails the node there.

    `limits` are what the data says in place of the flow: of an each (at once, may fail), of a task (timeout, heartbeat).
    """

    call_id: str
    scope: int
    node: str
    value: int = 0
    error: str = ""
    turn: int = 0  #: as in the question
    limits: tuple[int, ...] = ()


class Heartbeat(Struct, frozen=True, tag=True):
    """A job says that it is alive, for steps that must do so now and then."""

    call_id: str
    job_id: int


class TenantSet(Struct, frozen=True, tag=True):
    """A tenant has these limits from now on. `spent_unit_us` is to be added to what it has had today: for a restart."""

    tenant: Tenant
    spent_unit_us: float = 0.0


class CallResumed(Struct, frozen=True, tag=True):
    """A durable call accepted before a restart. It begins again without work being started for it; `Kept` after `Kept` brings it
    to where it was, and `Awake` lets it go on. `flow` is the one it began with, if that has changed since. `again_us` is when
    somebody last had it tried again: limits of time count from then."""

    call: Call
    flow: Flow | None = None
    again_us: int = 0


class Kept(Struct, frozen=True, tag=True):
    """This note of a durable run is written down, and takes effect."""

    call_id: str
    note: Note


class Awake(Struct, frozen=True, tag=True):
    """All that was kept of this run has been told again."""

    call_id: str
    again_us: int = 0


class Tick(Struct, frozen=True, tag=True):
    """The time asked for with `WakeAt` has come."""


Event = (
    Deployed
    | CallArrived
    | AllHere
    | CallCancelled
    | BatchFinished
    | BatchFailed
    | InstanceReady
    | InstanceLost
    | DeviceJoined
    | DeviceLost
    | Resolved
    | Heartbeat
    | CallResumed
    | Kept
    | Awake
    | TenantSet
    | Tick
)
