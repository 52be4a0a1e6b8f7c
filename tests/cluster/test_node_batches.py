"""Batches of a node when its leader goes: what has begun is dropped, and nothing else begins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lamina.cluster.data_port import FetchFailed
from lamina.cluster.messages import DoneOnNode, FailedOnNode, HeartbeatOnNode, JobOnNode, PausedOnNode, RunOnNode, WatchOnNode
from lamina.cluster.node_batches import NodeBatches
from lamina.cluster.value_fetcher import Fetched
from lamina.core.actions import Action, DropJob, JobRef, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, BatchPaused, Heartbeat
from lamina.values.references import NodeRef
from lamina.values.slot_refs import SlotReferences
from lamina.worker.protocol import BatchDone

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

    def run(self, number: int, *leaves: bytes | NodeRef, behind: int = 0, predicted_us: int = 0, **more: Any) -> None:
        job = JobOnNode(JobRef(number * 10, "call", 0, "step"), None, [(("input", "x"), leaf) for leaf in leaves])
        frame = RunOnNode(number, "f", "f-1", "cpu0", 1, behind, predicted_us, 0, [job], **more)
        self.batches.run(self.session, frame, "f-1-n1")

    @property
    def started(self) -> list[StartBatch]:
        return [one for one in self.told if isinstance(one, StartBatch)]

    def take_over(self) -> None:
        """Another server leads."""
        self.batches.end_session(self.session)
        self.session = self.new_session()

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


def test_a_leader_hears_what_instances_still_do_for_the_one_before_and_when_they_have_done_it() -> None:
    world = World()
    assert world.batches.work_left("f-1-n1") is None
    world.run(1, b"x", predicted_us=70_000)
    world.run(2, b"x", behind=1, predicted_us=30_000)
    world.take_over()
    left = world.batches.work_left("f-1-n1")
    assert left is not None and (left.mask, left.predicted_us, left.cores) == (1, 100_000, 0) and left.ran_us < 30_000_000
    world.batches.watch(world.session, WatchOnNode(1, "f-7"), "f-1-n1")
    first, second = world.started
    world.batches.on_finished(BatchFinished(first.batch_id, 5))
    assert world.said == []  # the instance is at the second one now
    world.run(3, b"x", behind=1)
    assert world.started[-1].behind == second.batch_id  # what is to come after it does
    world.batches.on_finished(BatchFinished(second.batch_id, 5))
    assert world.said == [FailedOnNode(1, "abandoned")] and world.batches.work_left("f-1-n1") is not None
    world.batches.on_finished(BatchFinished(world.started[-1].batch_id, 5))
    assert isinstance(world.said[-1], DoneOnNode) and world.batches.work_left("f-1-n1") is None
    world.references.close()


def test_what_has_ended_by_the_time_it_is_to_be_watched_has_ended() -> None:
    world = World()
    world.run(1, b"x")
    world.take_over()
    world.batches.on_failed(BatchFailed(world.started[0].batch_id, "out-of-memory"))
    world.batches.watch(world.session, WatchOnNode(4, "f-7"), "f-1-n1")
    assert world.said == [FailedOnNode(4, "abandoned")] and not world.session.batches
    world.references.close()


def test_what_is_watched_is_void_for_the_next_leader_too() -> None:
    world = World()
    world.run(1, b"x")
    for number in (5, 1):
        world.take_over()
        world.batches.watch(world.session, WatchOnNode(number, "f-7"), "f-1-n1")
    world.batches.on_heartbeat(Heartbeat("call", world.started[0].jobs[0].id))
    assert not world.batches.commit(1, BatchDone(world.started[0].batch_id, 5, [b"y"]), [])
    world.batches.on_finished(BatchFinished(world.started[0].batch_id, 5))
    assert world.said == [FailedOnNode(1, "abandoned")] and not world.session.batches
    world.references.close()


def test_calls_beside_others_are_not_waited_for() -> None:
    """Dropped, they end by themselves."""
    world = World()
    world.run(1, b"x", part=0.1)
    world.take_over()
    assert world.batches.work_left("f-1-n1") is None
    world.references.close()


def test_batches_give_way_on_a_node_as_they_do_in_process() -> None:
    world = World()
    world.run(8, b"x", gives_way=True)
    world.run(9, b"x", overlaps=[8, 3])  # one of which has ended
    long, urgent = world.started
    assert long.gives_way and urgent.overlaps == (long.batch_id,) and not urgent.gives_way
    world.batches.on_paused(BatchPaused(long.batch_id, 7, 4_000))
    world.batches.on_paused(BatchPaused(10**6, 7, 4_000))
    assert world.said == [PausedOnNode(8, 7, 4_000)]
    world.take_over()
    world.batches.on_paused(BatchPaused(long.batch_id, 6, 3_000))
    assert len(world.said) == 1
    world.references.close()
