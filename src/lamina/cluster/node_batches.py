"""Batches of a node: each from its frame to its result. The agent's counterpart of the leader's `RemoteEngine`.

Numbers of batches and jobs are those of a leader's life, so they get numbers of this agent's own; a result finds its way back
only over the session its batch came by. When that ends, its batches are void: what has not begun does not begin. What has begun
goes on all the same, so the next leader is told which instances are busy with it (`work_left`), and when they are not any more
(`watch`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from lamina.cluster.data_port import FetchFailed
from lamina.cluster.messages import (
    BusyInstance,
    ChunkOnNode,
    CommitState,
    DoneOnNode,
    FailedOnNode,
    HeartbeatOnNode,
    JobOnNode,
    PausedOnNode,
    RunOnNode,
    TakenOnNode,
    WatchOnNode,
)
from lamina.cluster.node_values import NodeValues
from lamina.cluster.value_fetcher import Fetched, ValueFetcher
from lamina.core.actions import DropJob, JobRef, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, BatchPaused, Heartbeat
from lamina.drivers.engine import Engine, MessageStream
from lamina.expr import Leaf
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import read_mask, wire_mask
from lamina.sdk.app_state import StateChanges
from lamina.sdk.spans import InnerSpan
from lamina.values.references import ErrorInfo, NodeRef, ShmRef, Stored
from lamina.values.slot_refs import SlotReferences
from lamina.worker.protocol import BatchDone

if TYPE_CHECKING:
    from lamina.cluster.leader_session import LeaderSession

log = logging.getLogger("lamina")

ABANDONED = "abandoned"
"""Why a batch has no results that was begun for a leader of before."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call with jobs here."""

    jobs: int = 0
    deadline_us: int = 0  #: until when it is worth running; 0: without a limit


@dataclass(slots=True, eq=False)
class NodeBatch:
    """One batch, from its frame to its result."""

    session: LeaderSession
    wire_id: int
    action: StartBatch  #: with this agent's own numbers
    job_ids: tuple[int, ...]  #: the leader's numbers of its jobs
    fetching: int = 0  #: inputs on their way here
    is_blocked: bool = False  #: the batch that it is behind has not been started yet
    is_started: bool = False
    started_us: int = 0  #: when it was handed to the engine
    is_abandoned: bool = False  #: its leader is gone: of all that becomes of it, its end alone may be of use
    failure: str = ""
    followers: list[NodeBatch] = field(default_factory=list)  #: blocked by this one
    fetched: list[ShmRef] = field(default_factory=list)  #: slots to be freed at its end
    offered: list[tuple[str, int]] = field(default_factory=list)  #: its results that are fetched before they are committed
    spans: list[InnerSpan] = field(default_factory=list)


class NodeBatches:
    """Batches of one agent, with the values that they read and have made."""

    def __init__(self, engine: Engine, references: SlotReferences, fetcher: ValueFetcher) -> None:
        self.values = NodeValues()
        self._engine, self._references, self._fetcher = engine, references, fetcher
        self._session: LeaderSession | None = None  #: that counts: nothing is said over another one
        self._batches: dict[int, NodeBatch] = {}  #: by this agent's own number
        self._calls: dict[str, _Call] = {}
        self._wire_ids: dict[int, int] = {}  #: the leader's numbers of jobs, by this agent's own
        self._offered: dict[tuple[str, int], int] = {}  #: results of batches that are being committed, with their serials
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------- sessions

    def follow(self, session: LeaderSession) -> None:
        self._session = session

    def end_session(self, session: LeaderSession) -> None:
        """What was asked for over it is of no more use."""
        if session is self._session:
            self._session = None
        for owner, slot in session.held:
            self._references.release(ShmRef(owner, slot, 0))
        session.held.clear()
        batches = list(session.batches.values())
        for batch in batches:
            batch.followers.clear()  # none of them begins because the one before it has ended
        for batch in batches:
            batch.is_abandoned = True
            for job in batch.action.jobs:
                self._engine.perform(DropJob(job.id))
            if not batch.is_started:
                self._forget(batch)

    # ------------------------------------------------------------ abandoned batches

    def work_left(self, instance: str) -> BusyInstance | None:
        """What an instance still has to do for a leader that is gone. Calls beside others are no more: dropped, they end."""
        begun = self._begun_on(instance)
        if not begun:
            return None
        predicted_us = sum(batch.action.predicted_us for batch in begun)
        ran_us = clock_us() - min(batch.started_us for batch in begun)
        return BusyInstance(wire_mask(begun[0].action.mask), predicted_us, ran_us, begun[0].action.cores)

    def watch(self, session: LeaderSession, frame: WatchOnNode, instance: str) -> None:
        """The leader has booked what an instance has left to do: it is told when the last of it has ended."""
        begun = [one for one in self._begun_on(instance) if one.is_abandoned]
        if not begun:
            session.send(FailedOnNode(frame.batch_id, ABANDONED))
            return
        last = begun[-1]
        last.session.batches.pop(last.wire_id, None)
        last.session, last.wire_id, last.job_ids = session, frame.batch_id, ()
        session.batches[frame.batch_id] = last

    def _begun_on(self, instance: str) -> list[NodeBatch]:
        """Batches on an instance that have been handed to its engine and are not over, in their order."""
        batches = self._batches.values()
        return [one for one in batches if one.action.instance == instance and one.is_started and one.action.part == 1]

    def deadline_us(self, call_id: str) -> int:
        call = self._calls.get(call_id)
        return call.deadline_us if call is not None else 0

    def is_held(self, owner: str, slot: int, serial: int) -> bool:
        """Whether a result is still what a ticket was made for; asked by threads of the data port."""
        session = self._session
        return session is not None and serial in (session.held.get((owner, slot)), self._offered.get((owner, slot)))

    # ------------------------------------------------------- asked by the leader

    def run(self, session: LeaderSession, frame: RunOnNode, instance: str) -> None:
        """Run a batch on an instance, by this agent's own name for it, once its inputs are here."""
        number = next(self._numbers)
        jobs = tuple(JobRef(next(self._numbers), one.ref.call_id, one.ref.scope, one.ref.node) for one in frame.jobs)
        behind = session.batches.get(frame.behind)
        action = StartBatch(
            *(number, frame.function, instance, frame.device, read_mask(frame.mask), jobs, frame.predicted_us),
            behind=behind.action.batch_id if behind is not None else 0,
            cores=frame.cores,
            part=frame.part,
            gives_way=frame.gives_way,
            overlaps=tuple([one.action.batch_id for number in frame.overlaps if (one := session.batches.get(number))]),
        )
        batch = NodeBatch(session, frame.batch_id, action, tuple(one.ref.id for one in frame.jobs))
        self._batches[number] = session.batches[frame.batch_id] = batch
        if behind is not None and not behind.is_started:
            batch.is_blocked = True
            behind.followers.append(batch)
        wanted: dict[NodeRef, list[tuple[list[tuple[Leaf, Stored]], int]]] = {}
        for job, given in zip(jobs, frame.jobs, strict=True):
            leaves: list[tuple[Leaf, Stored]] = []
            for leaf, value in given.leaves:
                if isinstance(value, NodeRef) and value.address:
                    wanted.setdefault(session.locate(value), []).append((leaves, len(leaves)))
                    leaves.append((leaf, b""))  # until it is here
                elif isinstance(value, NodeRef):
                    leaves.append((leaf, ShmRef(value.owner, value.slot, value.size, value.start)))
                else:
                    leaves.append((leaf, value))
            self.values.give(job, given.args, leaves, (given.tenant, given.traceparent))
            session.jobs[given.ref.id] = job.id
            self._wire_ids[job.id] = given.ref.id
            self._open_call(session, job, given)
        batch.fetching = len(wanted)
        for ref, places in wanted.items():
            self._fetch(batch, ref, places)
        self._start_if_ready(batch)

    def _open_call(self, session: LeaderSession, job: JobRef, given: JobOnNode) -> None:
        call = self._calls.setdefault(job.call_id, _Call())
        call.jobs += 1
        if given.left_us:
            call.deadline_us = clock_us() + given.left_us
        if given.is_streaming:
            call_id, wire_id = job.call_id, given.ref.id

            def deliver(value: bytes) -> None:
                session.send(ChunkOnNode(call_id, wire_id, value))

            def on_taken(count: int) -> None:
                session.send(TakenOnNode(call_id, count))

            self.values.pieces[call_id] = MessageStream(deliver, on_taken) if given.takes_input else deliver

    def _fetch(self, batch: NodeBatch, ref: NodeRef, places: list[tuple[list[tuple[Leaf, Stored]], int]]) -> None:
        """Fetch a value into a slot of this machine; the batch starts when all of its are here."""

        def done(found: Fetched) -> None:
            batch.fetching -= 1
            if isinstance(found, ShmRef):
                batch.fetched.append(found)
            if batch.action.batch_id not in self._batches:
                self._free_fetched(batch)
                return
            if isinstance(found, FetchFailed):
                batch.failure = "fetch-failed"
                log.warning("batch %d of %s: an input cannot be fetched: %s", batch.wire_id, batch.action.function, found)
            else:
                for leaves, index in places:
                    leaves[index] = (leaves[index][0], found)
            self._start_if_ready(batch)

        self._fetcher.bring(ref, done)

    def _start_if_ready(self, batch: NodeBatch) -> None:
        if batch.fetching or batch.is_blocked or batch.is_started:
            return
        if batch.failure:
            self._forget(batch)
            batch.session.send(FailedOnNode(batch.wire_id, batch.failure))
            return
        batch.is_started, batch.started_us = True, clock_us()
        self._engine.perform(batch.action)
        self._unblock(batch)

    def _unblock(self, batch: NodeBatch) -> None:
        followers, batch.followers = batch.followers, []
        for follower in followers:
            follower.is_blocked = False
            self._start_if_ready(follower)

    def _forget(self, batch: NodeBatch) -> list[Stored | ErrorInfo | None]:
        """A batch has ended, however it did; returns the results there are."""
        self._batches.pop(batch.action.batch_id, None)
        batch.session.batches.pop(batch.wire_id, None)
        for slot in batch.offered:
            self._offered.pop(slot, None)
        for wire_id in batch.job_ids:
            batch.session.jobs.pop(wire_id, None)
        results = []
        for job in batch.action.jobs:
            del self._wire_ids[job.id]
            results.append(self.values.take(job.id))
            call = self._calls.get(job.call_id)
            if call is not None:
                call.jobs -= 1
                if not call.jobs:
                    del self._calls[job.call_id]
                    self.values.pieces.pop(job.call_id, None)
        self._free_fetched(batch)
        self._unblock(batch)
        return results

    def _free_fetched(self, batch: NodeBatch) -> None:
        for ref in batch.fetched:
            self._references.release(ref)
        batch.fetched.clear()

    def drop_job(self, session: LeaderSession, wire_id: int) -> None:
        job_id = session.jobs.get(wire_id)
        if job_id is not None:
            self._engine.perform(DropJob(job_id))

    def put_input(self, call_id: str, value: bytes | None) -> None:
        """A message of the client of a call that runs."""
        sink = self.values.pieces.get(call_id)
        if isinstance(sink, MessageStream):
            sink.put(value)

    def release(self, session: LeaderSession, slots: list[tuple[str, int]]) -> None:
        """Results that the leader needs no more."""
        for owner, slot in slots:
            if (owner, slot) in session.held:
                del session.held[owner, slot]
                self._references.release(ShmRef(owner, slot, 0))

    # --------------------------------------------------------- told by the engine

    def on_finished(self, event: BatchFinished) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is None:
            return
        session = batch.session
        is_current = session is self._session and not batch.is_abandoned
        results: list[bytes | NodeRef | ErrorInfo] = []
        for found in self._forget(batch):
            if isinstance(found, ShmRef):
                if is_current:
                    serial = session.held[found.owner, found.slot] = next(self._numbers)
                    results.append(NodeRef("", found.owner, found.slot, found.size, found.start, serial=serial))
                else:
                    self._references.release(found)
            elif found is None:  # dropped
                results.append(b"")
            else:
                results.append(found)
        if is_current:
            session.send(DoneOnNode(batch.wire_id, event.device_us, results, batch.spans, event.is_warmup))
        elif batch.is_abandoned:
            self._tell(session, FailedOnNode(batch.wire_id, ABANDONED))

    def on_failed(self, event: BatchFailed) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is not None:
            self._forget(batch)
            self._tell(batch.session, FailedOnNode(batch.wire_id, event.reason))

    def on_paused(self, event: BatchPaused) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is not None and not batch.is_abandoned:
            self._tell(batch.session, PausedOnNode(batch.wire_id, event.remaining_segments, event.left_us))

    def on_instance_lost(self, instance: str) -> None:
        """The leader knows what ran there, and ends it itself."""
        for batch in [one for one in self._batches.values() if one.action.instance == instance]:
            self._forget(batch)

    def on_heartbeat(self, event: Heartbeat) -> None:
        session, wire_id = self._session, self._wire_ids.get(event.job_id, -1)
        if session is not None and session.jobs.get(wire_id) == event.job_id:  # not another one's of that number
            session.send(HeartbeatOnNode(event.call_id, wire_id, event.alive_only))

    def on_spans(self, batch_id: int, spans: list[InnerSpan]) -> None:
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.spans += spans

    def commit(self, question: int, done: BatchDone, changes: Sequence[StateChanges]) -> bool:
        """Send the changes of the state with the results of their batch, in one frame."""
        batch = self._batches.get(done.batch_id)
        if batch is None or batch.session is not self._session or batch.is_abandoned:
            return False
        results: list[bytes | NodeRef | ErrorInfo] = []
        for result in done.results:
            if isinstance(result, ShmRef):
                serial = self._offered[result.owner, result.slot] = next(self._numbers)
                batch.offered.append((result.owner, result.slot))
                results.append(NodeRef("", result.owner, result.slot, result.size, result.start, serial=serial))
            else:
                results.append(result)
        batch.session.send(CommitState(question, batch.wire_id, done.device_us, results, list(changes), done.is_warmup))
        return True

    def _tell(self, session: LeaderSession, frame: Struct) -> None:
        if session is self._session:
            session.send(frame)
