"""What the controller wants done. The loops perform them; results come back as events."""

from __future__ import annotations

from msgspec import Struct

from lamina.core.notes import Note
from lamina.core.retry import Fault


class JobRef(Struct, frozen=True, gc=False, array_like=True):
    """Enough for an engine to find the payload of a job: which step of which run."""

    id: int
    call_id: str
    scope: int
    node: str


class StartBatch(Struct, frozen=True, tag=True):
    """Run these jobs as one batch on units `mask` of `device`.

    `after` is the batch whose slice it inherits: it is booked, and starts when that one ends, for whatever reason.
    """

    batch_id: int
    function: str
    instance: str
    device: str
    mask: int
    jobs: tuple[JobRef, ...]
    predicted_us: int = 0
    after: int = 0
    why: str = ""  #: what the policy weighed, for `explain`
    cores: int = 0  #: of the host, where they are counted
    transfer_us: int = 0  #: of the time predicted: bringing its inputs over from other nodes


class Load(Struct, frozen=True, tag=True):
    """Bring a function up on a device; `mask` is its standing slice, 0 if it has none, `quota` its part of the time there."""

    instance: str
    function: str
    device: str
    mask: int = 0
    quota: float = 1.0


class Unload(Struct, frozen=True, tag=True):
    instance: str


class Resize(Struct, frozen=True, tag=True):
    """The standing slice of an instance moves, or its part of the time there changes; batches already started keep theirs."""

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


class Fail(Struct, frozen=True, tag=True):
    """An accepted call ends without a result. `error` is a stable word, `step` where it happened."""

    call_id: str
    error: str
    step: str = ""
    job_id: int = 0
    scope: int = 0  #: of the run, where the step is


class Refuse(Struct, frozen=True, gc=False, tag=True):
    """Not accepted. `offer_us` is the latency that could be met now, 0 if none could be worked out."""

    call_id: str
    reason: str
    retry_after_us: int = 0
    offer_us: int = 0
    why: str = ""  #: what the policy weighed, for `explain`


class Resolve(Struct, frozen=True, tag=True):
    """A question about data, which the core never sees: how many items has this each, which way goes this choice?

    Nodes that ask at every stage also say: "begin", here it starts; "end", its results are there; "catch", catcher number
    `catcher` takes `fault`. `turn` is to be repeated in the answer.
    """

    call_id: str
    scope: int
    node: str
    turn: int = 0
    stage: str = "begin"
    attempt: int = 0  #: tries before this one
    catcher: int = 0
    fault: Fault | None = None
    missing: tuple[int, ...] = ()  #: items or branches that brought no result, from 0


class DropJob(Struct, frozen=True, tag=True):
    """This job will not be run, or its result is not wanted any more."""

    job_id: int


class Keep(Struct, frozen=True, tag=True):
    """Write this down; `Kept` must follow, in the order in which it was asked for."""

    call_id: str
    note: Note


class Kill(Struct, frozen=True, tag=True):
    """End this instance by force; `InstanceLost` must follow."""

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
    | Fail
    | Refuse
    | Resolve
    | Keep
    | DropJob
    | Kill
    | AddDevice
    | ReleaseDevice
    | WakeAt
)
