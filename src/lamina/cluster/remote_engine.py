"""Remote engine: the devices of one node, for the time of one incarnation, as an engine like any other.

The controller sees devices; that they are behind a socket shows only in how long the way there takes, which it measures anyway.
Actions become frames, frames become events. When the incarnation is closed, nothing that comes from there later is read: what
ran is lost, and runs again elsewhere by the controller's own rules.

A large value stays where it was made (`remote_values.py`), and the next step's machine fetches it from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import FetchFailed, ref_for
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.messages import (
    AdoptOnNode,
    AppOnNode,
    ChunkOnNode,
    CommitAnswer,
    CommitState,
    DoneOnNode,
    DrainBegun,
    DrainNode,
    DropOnNode,
    FailedOnNode,
    HeartbeatOnNode,
    Hello,
    InputOnNode,
    JobOnNode,
    KillOnNode,
    LoadedInstance,
    LoadOnNode,
    LostOnNode,
    MachineLost,
    OutputOnNode,
    PackageStored,
    PausedOnNode,
    ReadState,
    ReadyOnNode,
    ReleaseValues,
    ReportOnNode,
    ResizeOnNode,
    RunOnNode,
    SegmentedOnNode,
    StateAnswer,
    TakenOnNode,
    UnloadOnNode,
    WatchOnNode,
)
from lamina.cluster.remote_values import LeaderParts, RemoteValues
from lamina.cluster.value_fetcher import NoRoom
from lamina.core.actions import Action, DropJob, JobRef, Kill, Load, Resize, StartBatch, Unload
from lamina.core.events import (
    AbandonedBatch,
    BatchFailed,
    BatchFinished,
    BatchPaused,
    Heartbeat,
    InstanceLost,
    InstanceReady,
    InstanceSegmented,
)
from lamina.drivers.engine import MessageStream
from lamina.engines.inflight import InFlightBatch, InFlightBatches, checked_changes, commit_errors, deliver_results, pin_leaves
from lamina.errors import LaminaError
from lamina.gpu.protocol import ExecutorReport
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError, read_mask, wire_mask
from lamina.sdk.app_state import UNKNOWN, StateCell, StateChanges
from lamina.types import DeviceSpec
from lamina.values.references import ErrorInfo, NodeRef, ShmRef, Stored
from lamina.values.slot_refs import ValueLost

log = logging.getLogger("lamina")

LINK_MIB_PER_S, LINK_LATENCY_US = 1_000.0, 300
"""Of a link between machines, until it is known better: what placement counts for moving a value."""


@dataclass(slots=True, eq=False)
class RemoteInstance:
    """One instance on a node."""

    load: Load
    is_ready: bool = False


@dataclass(slots=True, eq=False)
class RemoteBatch(InFlightBatch):
    failed: dict[int, ErrorInfo] = field(default_factory=dict)  #: by place in the batch: jobs whose inputs could not be made
    fetching: int = 0  #: results on their way here
    results: list[bytes | ShmRef | ErrorInfo] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)  #: by place: why a result could not be fetched
    is_warmup: bool = False


class RemoteEngine:
    """Engine of one node's incarnation."""

    def __init__(
        self, parts: LeaderParts, link: FrameLink, hello: Hello, incarnation: int, key: TicketKey, own_address: str
    ) -> None:
        self.node, self.incarnation = hello.node, incarnation
        self.data_address = hello.data_address
        self.packages = set(hello.packages)
        self.found = {f"{hello.node}:{one.name}": one for one in hello.loaded}  #: not adopted yet, by the name the core is told
        self.devices = [self._spec(device) for device in hello.devices]
        self.is_draining = False
        self.executor_reports: dict[str, ExecutorReport] = {}  #: by device, as the controller knows it
        self._parts, self._link, self._key, self._own_address = parts, link, key, own_address
        self._instances: dict[str, RemoteInstance] = {}
        self._batches = InFlightBatches[RemoteBatch](parts.references)
        self._watched: dict[int, str] = {}  #: batches that were begun for a leader of before, with their instances
        self._released: list[tuple[str, int]] = []
        self.values = RemoteValues(parts, hello.data_address, key, self._release)
        self._is_closed = False

    def _spec(self, device: DeviceSpec) -> DeviceSpec:
        """A device as the controller knows it: under a name that no other node has, and behind a link."""
        return structs.replace(
            device,
            id=f"{self.node}.{device.id}",
            node=self.node,
            link_mib_per_s=device.link_mib_per_s or LINK_MIB_PER_S,
            link_latency_us=device.link_latency_us or LINK_LATENCY_US,
        )

    @property
    def instances(self) -> list[str]:
        return list(self._instances)

    @property
    def unreleased(self) -> int:
        """Values that the node still has, and that are not needed any more."""
        return len(self._released)

    # ------------------------------------------------------------------- actions

    def perform(self, action: Action) -> None:
        if self._is_closed:
            return
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                self._load(action)
            case Unload():
                self._unload(action)
            case Kill():
                if action.instance in self._instances:
                    self._link.send(KillOnNode(action.instance, action.reason))
            case Resize():
                if action.instance in self._instances:
                    self._link.send(ResizeOnNode(action.instance, wire_mask(action.mask), action.quota))
            case DropJob():
                if self._batches.is_wanted(action.job_id):
                    self._batches.drop_job(action.job_id)
                    self._link.send(DropOnNode(action.job_id))
            case _:
                pass

    def _load(self, action: Load) -> None:
        instance = self._instances[action.instance] = RemoteInstance(action)
        if action.adopts:
            found = self.found.pop(action.adopts)
            instance.is_ready = True
            self._link.send(AdoptOnNode(action.instance, found.name))
            busy = found.busy
            left = AbandonedBatch(read_mask(busy.mask), busy.predicted_us, busy.ran_us, busy.cores) if busy is not None else None
            self._parts.post(InstanceReady(action.instance, abandoned=left))
            if found.segment_us:
                self._parts.post(InstanceSegmented(action.instance, found.segment_us))
            return
        asyncio.get_running_loop().create_task(self._send_load(instance))

    async def _send_load(self, instance: RemoteInstance) -> None:
        action, shared = instance.load, self._parts.shared
        spec, source = shared.spec_of(action.function), shared.source(action.function)
        try:
            if spec is None:
                raise LaminaError(f"function {action.function!r} is gone")
            self._parts.packages.retain({one.path for one in shared.sources.values()})
            package = await self._parts.packages.get(source.path)
        except LaminaError as error:
            if self._instances.get(action.instance) is instance:
                self._on_lost(
                    LostOnNode(action.instance, "load-failed", ErrorInfo(type(error).__name__, error.message, "", error.hint))
                )
            return
        if self._instances.get(action.instance) is not instance or self._is_closed:
            return  # unloaded meanwhile
        serial = self._parts.references.serial(package.ref)
        ref = ref_for(self._key, self._own_address, package.ref, serial)  # also if it has it: it may have been changed there
        code = AppOnNode(package.sha256, package.entry, ref, source.app, source.tenant, source.user, source.name)
        environment = shared.environment(action.function)
        device = action.device.removeprefix(f"{self.node}.")
        self._link.send(LoadOnNode(action.instance, device, wire_mask(action.mask), action.quota, spec, code, environment))

    def _unload(self, action: Unload) -> None:
        found = self.found.pop(action.instance, None)
        if found is not None:
            self._link.send(UnloadOnNode(found.name))
        elif self._instances.pop(action.instance, None) is not None:
            self._link.send(UnloadOnNode(action.instance))
        self.leave_if_empty()

    def drain(self) -> None:
        if not self.is_draining:
            self.is_draining = True
            self._link.send(DrainBegun())
        self.leave_if_empty()

    def leave_if_empty(self) -> None:
        """The last instance of a draining node has gone, and no value is there alone: its agent may end."""
        is_empty = not self._instances and not self.found
        if self.is_draining and is_empty and not self._is_closed and self.values.move_here(self.leave_if_empty):
            self._link.send(DrainNode())

    def _start(self, action: StartBatch) -> None:
        if action.instance not in self._instances:
            return
        if not action.jobs:  # it runs already
            self._watched[action.batch_id] = action.instance
            self._link.send(WatchOnNode(action.batch_id, action.instance))
            return
        reads: list[ShmRef] = []
        jobs: list[JobOnNode] = []
        failed: dict[int, ErrorInfo] = {}
        lost: dict[int, tuple[str, ...]] = {}
        for index, job in enumerate(action.jobs):
            try:
                jobs.append(self._job(job, action.batch_id, reads))
            except LaminaError as error:
                failed[index] = ErrorInfo(type(error).__name__, error.message)
                if isinstance(error, ValueLost):
                    lost[index] = error.steps
        batch = RemoteBatch(action, reads, failed, lost=lost)
        if not jobs:
            self._batches.add(batch)
            asyncio.get_running_loop().call_soon(self._on_done, DoneOnNode(action.batch_id, 0, []))
            return
        device = action.device.removeprefix(f"{self.node}.")
        frame = RunOnNode(
            *(action.batch_id, action.function, action.instance, device, wire_mask(action.mask)),
            *(action.behind, action.predicted_us, action.cores, jobs, action.part),
            gives_way=action.gives_way,
            overlaps=list(action.overlaps),
        )
        try:
            if self._released:
                self._link.send(ReleaseValues(self._released), frame)
                self._released = []
            else:
                self._link.send(frame)
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self._parts.references.unpin(reads)
            self._parts.post(BatchFailed(action.batch_id, error.code))
            return
        self._batches.add(batch)
        for given in jobs:
            sink = self._parts.values.pieces.get(given.ref.call_id) if given.takes_input else None
            if isinstance(sink, MessageStream):
                sink.attach(partial(self._send_input, given.ref.call_id, given.ref.id))

    def _send_input(self, call_id: str, job_id: int, value: bytes | None) -> None:
        if not self._is_closed and self._batches.is_wanted(job_id):
            self._link.send(InputOnNode(call_id, value))

    def _job(self, job: JobRef, batch_id: int, reads: list[ShmRef]) -> JobOnNode:
        """A job for its frame. Raises `LaminaError` if its inputs cannot be made."""
        parts = self._parts
        given = parts.values.inputs(job)
        leaves = pin_leaves(given.leaves, lambda stored: self._leaf(stored, reads))
        origin = parts.shared.origin
        tenant, trace = origin(job, batch_id) if origin is not None else ("", "")
        deadline_us = parts.deadline_us(job.call_id)
        left_us = max(1, deadline_us - clock_us()) if deadline_us else 0
        sink = parts.values.pieces.get(job.call_id)
        is_streaming, takes_input = sink is not None, isinstance(sink, MessageStream)
        return JobOnNode(job, given.args, leaves, left_us, is_streaming, tenant, trace, takes_input)

    def _leaf(self, stored: Stored, reads: list[ShmRef]) -> bytes | NodeRef:
        """A value as this node can use it: inside the frame, its own, or one to be fetched."""
        host = self._parts.host_of(stored)
        found = self._parts.references.pin(stored, reads, host.slots.owner if host is not None else "")
        if isinstance(found, bytes):
            return found
        if host is not None:
            return host.reference(found, self.values)
        return ref_for(self._key, self._own_address, found, self._parts.references.serial(found))

    # -------------------------------------------------------------------- frames

    def on_frame(self, frame: Any) -> None:
        if self._is_closed:
            return
        match frame:
            case DoneOnNode():
                self._on_done(frame)
            case HeartbeatOnNode():
                if self._batches.call_of(frame.job_id) == frame.call_id:
                    self._parts.post(Heartbeat(frame.call_id, frame.job_id, frame.alive_only))
            case TakenOnNode():
                sink = self._parts.values.pieces.get(frame.call_id)
                if isinstance(sink, MessageStream):
                    sink.on_taken(frame.count)
            case ChunkOnNode():
                deliver = self._parts.values.pieces.get(frame.call_id)
                if deliver is not None and self._batches.call_of(frame.job_id) == frame.call_id:
                    deliver(frame.value)
                else:
                    self._link.send(DropOnNode(frame.job_id))
            case ReadyOnNode():
                self._on_ready(frame)
            case SegmentedOnNode():
                if frame.instance in self._instances:
                    self._parts.post(InstanceSegmented(frame.instance, frame.segment_us))
            case PausedOnNode():
                if frame.batch_id in self._batches.open:
                    self._parts.post(BatchPaused(frame.batch_id, frame.remaining_segments, frame.left_us))
            case LostOnNode():
                self._on_lost(frame)
            case FailedOnNode():
                self._on_failed(frame)
            case OutputOnNode():
                self._parts.shared.on_output(frame.function, f"{self.node}:{frame.instance}", frame.calls, frame.line)
            case ReportOnNode():
                device = f"{self.node}.{frame.device}"
                if any(one.id == device for one in self.devices):
                    self.executor_reports[device] = frame.report
            case PackageStored():
                self.packages.add(frame.sha256)
            case ReadState():
                self._link.send(StateAnswer(frame.question, self._state_of(frame)))
            case CommitState():
                self._commit(frame)
            case _:
                raise FrameError(f"{self.node} sends {type(frame).__name__} out of turn")

    def _state_of(self, asked: ReadState) -> StateCell:
        """A key of the state, if it is of a function that the node runs. A step may ask whose instance was killed, or is not
        adopted yet from the leader before: no client waits for it, and its question is no reason to drop the node."""
        if not any(one.load.function == asked.function for one in self._instances.values()):
            return UNKNOWN
        place = self._parts.state.resolve_key(asked.function, asked.call_id, asked.scope, asked.key)
        return self._parts.state.read(place)

    def _on_ready(self, frame: ReadyOnNode) -> None:
        instance = self._instances.get(frame.instance)
        if instance is not None and not instance.is_ready:
            instance.is_ready = True
            self._parts.shared.load_errors.pop(instance.load.function, None)
            self._parts.post(InstanceReady(frame.instance, frame.load_us, tuple(frame.probes)))

    def _on_lost(self, frame: LostOnNode) -> None:
        instance = self._instances.pop(frame.instance, None)
        if instance is None:
            return
        if frame.error is not None:
            self._parts.shared.load_errors[instance.load.function] = frame.error
        for batch in [one for one in self._batches.open.values() if one.action.instance == frame.instance]:
            self._give_up(batch)
        self._watched = {number: instance for number, instance in self._watched.items() if instance != frame.instance}
        self._parts.post(InstanceLost(frame.instance, frame.reason))
        self.leave_if_empty()

    def _on_failed(self, frame: FailedOnNode) -> None:
        batch = self._batches.open.get(frame.batch_id)
        if batch is not None:
            self._give_up(batch)
        elif self._watched.pop(frame.batch_id, None) is None:
            return
        self._parts.post(BatchFailed(frame.batch_id, frame.reason))

    def _give_up(self, batch: RemoteBatch) -> None:
        """A batch has ended without results, but for those that have been fetched already."""
        self._batches.close(batch)
        for result in batch.results:
            if isinstance(result, ShmRef):
                self._parts.references.release(result)

    def _on_done(self, done: DoneOnNode) -> None:
        batch = self._batches.open.get(done.batch_id)
        if batch is None:  # lost with its instance, as far as is known here; or its result came with its state
            for result in done.results:
                if isinstance(result, NodeRef):
                    self._release(result)
            return
        if len(done.results) + len(batch.failed) != len(batch.action.jobs) or batch.results:
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if done.spans and self._parts.shared.on_spans is not None:
            self._parts.shared.on_spans(done.batch_id, done.spans)
        batch.is_warmup = done.is_warmup
        results: list[bytes | ShmRef | ErrorInfo] = []
        wanted: list[tuple[int, NodeRef]] = []
        given = iter(done.results)
        for index, job in enumerate(batch.action.jobs):
            result = batch.failed[index] if index in batch.failed else next(given)
            if not isinstance(result, NodeRef):
                results.append(result)
            elif not self._batches.is_wanted(job.id):
                self._release(result)
                results.append(b"")
            elif self._parts.values.consumers(job) or self._parts.values.may_stay(job):
                results.append(self.values.keep(result))
            else:
                wanted.append((index, result))
                results.append(b"")
        self._fetch(batch, results, wanted, partial(self._finish, batch, done.device_us, results), self._release)

    def _fetch(
        self,
        batch: RemoteBatch,
        results: list[bytes | ShmRef | ErrorInfo],
        wanted: Sequence[tuple[int, NodeRef]],
        then: Callable[[], None],
        drop: Callable[[NodeRef], None],
    ) -> None:
        """Put results that are `wanted` here into their places; `then` is called when all of them have come, or have failed."""
        if not wanted:
            then()
            return
        batch.fetching, batch.results = len(wanted), results
        for index, ref in wanted:
            self.values.bring(ref, partial(self._on_fetched, batch, index, then, partial(drop, ref)))

    def _release(self, there: NodeRef) -> None:
        self._released.append((there.owner, there.slot))
        if len(self._released) >= 64 and not self._is_closed:  # else they go along with the next batch
            self._link.send(ReleaseValues(self._released))
            self._released = []

    def on_machine_lost(self, data_address: str) -> None:
        """Another machine is gone: what this one waits for from there will not come."""
        if not self._is_closed:
            self._link.send(MachineLost(data_address))

    def flush_releases(self) -> None:
        """Tell the node what is not needed any more, also when nothing is sent there."""
        self.leave_if_empty()
        if self._released and not self._is_closed:
            self._link.send(ReleaseValues(self._released))
            self._released = []

    def _on_fetched(
        self,
        batch: RemoteBatch,
        index: int,
        then: Callable[[], None],
        drop: Callable[[], None],
        found: bytes | ShmRef | ErrorInfo,
    ) -> None:
        drop()
        if self._is_closed or batch.action.batch_id not in self._batches.open:
            if isinstance(found, ShmRef):
                self._parts.references.release(found)
            return
        if isinstance(found, ErrorInfo):
            batch.reasons[index] = NoRoom.code if found.type == NoRoom.__name__ else FetchFailed.code
        batch.results[index] = found
        batch.fetching -= 1
        if not batch.fetching:
            then()

    def _finish(self, batch: RemoteBatch, device_us: int, results: list[bytes | ShmRef | ErrorInfo]) -> None:
        wanted = self._batches.close(batch)
        parts = self._parts
        outcomes = deliver_results(
            *(parts.values, batch.action.jobs, wanted, results, parts.references.release),
            lost=batch.lost,
            reasons=batch.reasons,
        )
        parts.post(BatchFinished(batch.action.batch_id, device_us, outcomes, batch.is_warmup))

    # --------------------------------------------------------------------- state

    def _commit(self, frame: CommitState) -> None:
        """Commit the state of a batch, and take its results in the same turn: if its node is lost after this, neither is lost,
        and if it was lost before, neither has happened."""
        batch = self._batches.open.get(frame.batch_id)
        if batch is None:
            self._link.send(CommitAnswer(frame.question))  # to no effect: its results are not wanted
            return
        places = [index for index in range(len(batch.action.jobs)) if index not in batch.failed]  # of jobs as the node has them
        if len(frame.results) != len(places) or batch.results:
            raise FrameError(f"{len(frame.results)} results for batch {frame.batch_id}, which it does not have")
        changes = checked_changes(frame.batch_id, frame.changes, len(places))
        results: list[bytes | ShmRef | ErrorInfo] = [batch.failed.get(index, b"") for index in range(len(batch.action.jobs))]
        large: list[tuple[int, NodeRef]] = []
        for index, result in zip(places, frame.results, strict=True):
            if not isinstance(result, NodeRef):
                results[index] = result
            elif self._batches.is_wanted(batch.action.jobs[index].id):
                large.append((index, result))
        batch.is_warmup = frame.is_warmup
        then = partial(self._commit_with, batch, frame.question, frame.device_us, places, changes, results)
        self._fetch(batch, results, large, then, lambda ref: None)  # they are told again, and released, with the end of the batch

    def _commit_with(
        self,
        batch: RemoteBatch,
        question: int,
        device_us: int,
        places: Sequence[int],
        changes: Sequence[StateChanges],
        results: list[bytes | ShmRef | ErrorInfo],
    ) -> None:
        """All results are here. Of a job whose result did not come nothing is changed."""
        jobs = [batch.action.jobs[index] for index in places]
        steps = [(job.call_id, job.scope, job.node) for job in jobs]

        def permitted(allowed: Sequence[StateChanges]) -> None:
            if self._is_closed:
                return
            self._link.send(CommitAnswer(question))
            if batch.action.batch_id not in self._batches.open:
                return
            parts = self._parts
            verdicts = parts.state.commit(batch.action.function, steps, allowed)
            for place, error in commit_errors(jobs, verdicts, lambda job: job.call_id not in parts.values.pieces).items():
                refused, results[places[place]] = results[places[place]], error
                if isinstance(refused, ShmRef):
                    parts.references.release(refused)
            self._finish(batch, device_us, results)

        wanted = [
            one for one in changes if self._batches.is_wanted(jobs[one.place].id) and places[one.place] not in batch.reasons
        ]
        if wanted:
            self._parts.state.permit_all(steps, wanted, permitted)
        else:
            permitted([])

    # ----------------------------------------------------------------------- end

    def found_instances(self) -> list[tuple[str, LoadedInstance]]:
        """What the node had loaded when it joined, with the names under which it may be adopted."""
        return list(self.found.items())

    async def wait_drained(self, grace_s: float) -> None:
        await self._batches.wait_drained(grace_s)

    def close(self, why: str = "") -> None:
        """The incarnation is closed: nothing that comes from there counts any more."""
        if self._is_closed:
            return
        self._is_closed = True
        for batch in list(self._batches.open.values()):
            self._give_up(batch)
        self._instances.clear()
        self.values.close()
        self._link.close(why)
