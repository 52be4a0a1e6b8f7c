"""Frame protocol between the gateway and the executor of a GPU: one process, many functions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lamina.ipc.framing import FrameReader, Natural, StopProcess
from lamina.values.references import ErrorInfo, ReleaseSlots, ShmRef, Slot
from lamina.worker.protocol import BatchDone, BatchHeartbeat, JobFrame, StateRead, StateValue

ModuleName = Annotated[str, Meta(max_length=200)]


class ExecutorSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of an executor, as JSON on its command line."""

    app: str
    device: str
    slicer: str  #: "green", "mig", or a twin without a GPU: "null", "cpu"
    folder: str
    owner: str
    values_owner: str  #: under which values that stay on the device are counted
    pool_bytes: int
    ordinal: int = 0
    soft: bool = False  #: slices that share all of the device
    weights_mib: int = 0  #: of the device for weights; 0: four fifths
    is_standby: bool = False  #: get ready, and serve no call until `Promote`
    opens_ahead: bool = False  #: a standby that has the device open, and functions ready; else it leaves it alone
    tags_output: bool = False  #: what functions print is collected, tagged with its calls
    log_level: str = "INFO"
    fd: int = -1


class LoadFunction(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    instance: str
    function: str
    mask: Natural  #: its standing slice, 0 if it has none
    requested_us: Natural
    probe: bool = False
    app: str = ""  #: where it is to be found, if not where the executor was started from
    is_reload: bool = False  #: it stood in an executor that is no more: it is waited for


class UnloadFunction(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=11):
    instance: str


class RunOnSlice(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=12):
    """A batch to run on a slice.

    `after` is the batch before it on that slice; `keep` says which results may stay on the device, job by job. A batch that runs
    longer than `limit_us` hangs; 0: there is no estimate. `cores` are those of the host that go with it; none: any. It
    `overlaps` other batches on units of its slice: they give way to it, or, if it `gives_way` itself, it waits for them."""

    batch_id: Natural
    instance: str
    mask: Natural
    after: Natural
    jobs: list[JobFrame]
    keep: list[bool]
    limit_us: Natural = 0
    cores: list[Natural] = []
    gives_way: bool = False
    overlaps: list[Natural] = []


class FetchValue(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=13):
    """A value of the device is needed elsewhere."""

    slot: Slot


class ForgetValues(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=14):
    """Values on the device without readers."""

    slots: list[Slot]


class Promote(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=15):
    """To a standby: promotion, the device is yours."""


class ImportModules(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=16):
    """To a standby: modules the executor it may have to replace has imported by now."""

    names: list[ModuleName]


class PrepareStandby(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=17):
    """To a standby that has the device open: have these functions ready, and no others. Name, standing slice, app."""

    functions: list[tuple[str, Natural, str]]


class MoveSlice(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=18):
    """New standing slice of a function; 0: it has none."""

    instance: str
    mask: Natural


class ExecutorReady(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=20):
    """The device is open."""

    pid: Natural
    memory_mib: Natural


class FunctionLoaded(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=21):
    instance: str
    load_us: Natural
    probes: list[tuple[Natural, Natural, Natural]] = []
    is_model: bool = False  #: a module, which a standby can have ready too
    parts: list[tuple[str, Natural]] = []  #: where the time went, in microseconds
    was_standby: bool = False  #: opened long before it was asked for


class FunctionSegmented(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=29):
    """Batches of a function run in segments from now on, the longest of which takes so long."""

    instance: str
    segment_us: Natural


class RunPaused(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=19):
    """A batch that gives way is at the end of a segment: how many are left, and what they take."""

    batch_id: Natural
    remaining_segments: Natural
    left_us: Natural


class FunctionLoadFailed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=22):
    instance: str
    error: ErrorInfo


class FunctionUnloaded(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=23):
    instance: str


class ValueFetched(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=24):
    slot: Slot
    value: bytes | ShmRef | ErrorInfo


class GpuClocks(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Clocks, power and temperature of a device, and why its clocks are below their highest, in words."""

    sm_mhz: Natural
    max_sm_mhz: Natural
    memory_mhz: Natural
    power_w: float
    max_power_w: float
    temperature_c: Natural
    slowed_by: list[str] = []


class ExecutorUsage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=25):
    """Memory the executor holds at this moment, in MiB, and counts of what it has done: for monitoring."""

    weights_mib: Natural
    device_used_mib: Natural
    graphs: Natural
    evictions: Natural
    bandwidth: float = -1.0  #: measured, of the memory's peak; below 0: it cannot be measured here
    graphs_missing: Natural = 0  #: to be made when there is time
    eager_batches: Natural = 0  #: that found no graph, so far
    clocks: GpuClocks | None = None  #: where they are told


class ExecutorReport(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of the process that owns a GPU, as its engine knows it: for monitoring, here or on another machine."""

    pid: Natural  #: 0: there is none at the moment
    restarts: int
    replaced_s: float  #: how long its last replacement took
    standing_by: list[str] | None  #: functions that are ready in its hot standby; None without one
    loads_ms: dict[str, dict[str, float]]  #: by function: where the time of its last load went
    usage: ExecutorUsage | None  #: what it said last


class ModulesImported(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=26):
    """Modules that are new since the last report, in the order of their import."""

    names: list[ModuleName]


class BatchHung(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=27):
    """A batch that has run for far too long."""

    batch_id: Natural


class StandbyPrepared(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=28):
    """From a standby: the functions that are ready in it."""

    functions: list[str]


ToExecutor = (
    Promote
    | ImportModules
    | PrepareStandby
    | LoadFunction
    | UnloadFunction
    | MoveSlice
    | RunOnSlice
    | FetchValue
    | ForgetValues
    | ReleaseSlots
    | StateValue
    | StopProcess
)
FromExecutor = (
    ExecutorReady
    | FunctionLoaded
    | FunctionLoadFailed
    | FunctionSegmented
    | RunPaused
    | FunctionUnloaded
    | BatchDone
    | ValueFetched
    | ExecutorUsage
    | ModulesImported
    | BatchHung
    | StandbyPrepared
    | BatchHeartbeat
    | StateRead
)


def from_executor_reader() -> FrameReader[FromExecutor]:
    """Decoder of frames from an executor, for the gateway."""
    return FrameReader(msgspec.msgpack.Decoder(FromExecutor))


def to_executor_reader() -> FrameReader[ToExecutor]:
    """Decoder of frames to an executor, for the executor."""
    return FrameReader(msgspec.msgpack.Decoder(ToExecutor))
