"""Actions: what the controller asks its driver to do. Results come back as events."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from lamina.core.workflow.error_policy import Fault
from lamina.core.workflow.journal_entry import JournalEntry


class JobRef(Struct, frozen=True, gc=False, array_like=True):
    """Reference to a job, enough for an engine to find its payload: which step of which run."""

    id: int
    call_id: str
    scope: int
    node: str
    execution_id: int = 0  #: of a step that is more than a call: what its token names


class StartBatch(Struct, frozen=True, tag=True):
    """A batch to run: these jobs together on units `mask` of `device`.

    `behind` is the batch whose slice it inherits: it is booked, and starts when that one ends, for whatever reason. Without jobs
    it runs already: an adopted instance is still at it, and only its end is to be told (`InstanceReady.abandoned`).
    """

    batch_id: int
    function: str
    instance: str
    device: str
    mask: int
    jobs: tuple[JobRef, ...]
    predicted_us: int = 0
    behind: int = 0
    why: str = ""  #: what the policy weighed, for `explain`
    cores: int = 0  #: of the host, where they are counted
    transfer_us: int = 0  #: of the time predicted: bringing its inputs over from other nodes
    delay: str = ""  #: why the function was deferred before, if it was
    part: float = 1.0  #: of its units: of a light or concurrent function, others have the rest
    gives_way: bool = False  #: it runs in segments, and pauses while others have units of its slice
    overlaps: tuple[int, ...] = ()  #: batches on its units that give way to it; of one that gives way, those that it waits for


class Load(Struct, frozen=True, tag=True):
    """An instance to load on a device; `mask` is its reserved slice, 0 if it has none, `quota` its share of the time there.
    `adopts`: it is loaded already, and had this name; `InstanceReady` must follow all the same."""

    instance: str
    function: str
    device: str
    mask: int = 0
    quota: float = 1.0
    adopts: str = ""


class Unload(Struct, frozen=True, tag=True):
    instance: str


class Resize(Struct, frozen=True, tag=True):
    """A new reserved slice, or share of its time, for an instance; batches already started keep theirs."""

    instance: str
    mask: int
    quota: float = 1.0


class Reply(Struct, frozen=True, gc=False, tag=True):
    call_id: str
    latency_us: int
    late: bool
    queue_us: int = 0
    batch: int = 1
    slice: str = ""
    cost: float = 0.0
    cold_us: int = 0
    retries: int = 0
    cache: Literal["", "hit", "miss"] = ""  #: of a function whose results are kept; said by the gateway, before which they are


class FailCall(Struct, frozen=True, tag=True):
    """End of an admitted call without a result. `error` is a stable word, `step` where it happened."""

    call_id: str
    error: str
    step: str = ""
    job_id: int = 0
    scope: int = 0  #: of the run, where the step is


class Reject(Struct, frozen=True, gc=False, tag=True):
    """Rejection of a call at admission. `offer_us` is the latency that could be met now, `price` what it would cost at least;
    0 where that is not known. `alone_us` is set where the call asks for less than it takes on idle devices: trying again does
    not help."""

    call_id: str
    reason: str
    retry_after_us: int = 0
    offer_us: int = 0
    why: str = ""  #: what the policy weighed, for `explain`
    price: float = 0.0
    alone_us: int = 0


class ResolveData(Struct, frozen=True, tag=True):
    """Request for a value that depends on data, which the core never sees: items of an Each, branch of a Choice.

    Nodes that resolve data at every stage also say: "begin", here it starts; "end", its results are there; "catch", catcher
    number `catcher` takes `fault`. `execution_id` is to be repeated in the answer.
    """

    call_id: str
    scope: int
    node: str
    execution_id: int = 0
    stage: str = "begin"
    attempt: int = 0  #: tries before this one
    catcher: int = 0
    fault: Fault | None = None
    missing: tuple[int, ...] = ()  #: items or branches that brought no result, from 0


class DropJob(Struct, frozen=True, tag=True):
    """Cancellation of a job: it will not be run, or its result is not wanted any more."""

    job_id: int


class AppendJournal(Struct, frozen=True, tag=True):
    """Journal entry to make durable; `Journaled` must follow, in the order of these actions."""

    call_id: str
    entry: JournalEntry


class Kill(Struct, frozen=True, tag=True):
    """Forced end of an instance; `InstanceLost` must follow."""

    instance: str
    reason: str


class AddDevice(Struct, frozen=True, tag=True):
    kind: str


class ReleaseDevice(Struct, frozen=True, tag=True):
    device: str


class WakeAt(Struct, frozen=True, gc=False, tag=True):
    at_us: int


Action = (
    StartBatch
    | Load
    | Unload
    | Resize
    | Reply
    | FailCall
    | Reject
    | ResolveData
    | AppendJournal
    | DropJob
    | Kill
    | AddDevice
    | ReleaseDevice
    | WakeAt
)
