"""Batches of a node when its leader goes: what has begun is dropped, and nothing else begins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lamina.cluster.data_port import FetchFailed
from lamina.cluster.messages import DoneOnNode, HeartbeatOnNode, JobOnNode, RunOnNode
from lamina.cluster.node_batches import NodeBatches
from lamina.cluster.value_fetcher import Fetched
from lamina.core.actions import Action, DropJob, JobRef, StartBatch
from lamina.core.events import BatchFinished, Heartbeat
from lamina.values.references import NodeRef
from lamina.values.slot_refs import SlotReferences

FAR = NodeRef("127.0.0.1:1", "gateway", 0, 100_000)


class World:
    """An engine that writes down what it is told, fetches that end when a test says so, and one session."""

    def __init__(self) -> None:
        self.told: list[Action] = []
        self.fetches: list[Callable[[Fetched], None]] = []
        self.said: list[Any] = []
        self.references = SlotReferences(2**20)
        engine = SimpleNamespace(perform=self.told.append)
        fetcher = SimpleNamespace(bring=lambda ref, then: self.fetches.append(then))
        self.batches = NodeBatches(engine, self.references, fetcher)  # type: ignore[arg-type]
        self.session = self.new_session()

    def new_session(self) -> Any:
        told = SimpleNamespace(
            held={}, jobs={}, batches={}, send=lambda *frames: self.said.extend(frames), locate=lambda ref: ref
        )
        self.batches.follow(told)
        return told

    def run(self, number: int, *leaves: bytes | NodeRef, behind: int = 0) -> None:
        job = JobOnNode(JobRef(number * 10, "call", 0, "step"), None, [(("input", "x"), leaf) for leaf in leaves])
        frame = RunOnNode(number, "f", "f-1", "cpu0", 1, behind, 0, 0, [job])
        self.batches.run(self.session, frame, "f-1-n1")

    @property
    def begun(self) -> int:
        return sum(isinstance(one, StartBatch) for one in self.told)


def test_a_batch_begins_when_its_inputs_are_here_and_the_one_behind_it_after_it() -> None:
    world = World()
    world.run(1, FAR)
    world.run(2, b"x", behind=1)
    assert world.begun == 0
    world.fetches.pop()(b"here")
    assert world.begun == 2
    world.references.close()


def test_nothing_begins_that_was_behind_a_batch_of_a_leader_that_is_gone() -> None:
    world = World()
    world.run(1, FAR)
    world.run(2, b"x", behind=1)
    world.run(3, b"x", behind=2)
    world.batches.end_session(world.session)
    assert world.begun == 0 and len(world.told) == 3 and all(isinstance(one, DropJob) for one in world.told)
    world.fetches.pop()(FetchFailed("its machine is gone"))
    assert world.begun == 0 and world.said == [] and not world.session.batches and not world.session.jobs
    world.references.close()


def test_what_ends_after_its_session_is_told_to_none() -> None:
    world = World()
    world.run(1, b"x")
    (started,) = [one for one in world.told if isinstance(one, StartBatch)]
    world.batches.end_session(world.session)
    world.batches.on_finished(BatchFinished(started.batch_id, 5))
    assert world.said == []
    world.references.close()


def test_a_sign_of_life_is_for_the_leader_that_asked_for_the_job() -> None:
    """Numbers of jobs are those of a leader's life: the next one may have given the same."""
    world = World()
    world.run(1, b"x")
    old, first = next(one for one in world.told if isinstance(one, StartBatch)), world.session
    world.batches.end_session(first)
    world.session = world.new_session()
    world.run(1, b"x")
    new = [one for one in world.told if isinstance(one, StartBatch)][-1]
    world.batches.on_heartbeat(Heartbeat("call", old.jobs[0].id))
    assert world.said == []
    world.batches.on_heartbeat(Heartbeat("call", new.jobs[0].id))
    assert world.said == [HeartbeatOnNode("call", 10)]
    for batch in (old, new):
        world.batches.on_finished(BatchFinished(batch.batch_id, 5))
    assert [type(one) for one in world.said] == [HeartbeatOnNode, DoneOnNode] and not world.batches._wire_ids
    world.references.close()


def test_a_warm_up_is_told_as_one() -> None:
    """Else the leader would take what it waited for as the time of the function, and of the way to the machine."""
    world = World()
    world.run(1, b"x")
    (started,) = [one for one in world.told if isinstance(one, StartBatch)]
    world.batches.on_finished(BatchFinished(started.batch_id, 5, is_warmup=True))
    (done,) = world.said
    assert isinstance(done, DoneOnNode) and done.is_warmup
    world.references.close()
