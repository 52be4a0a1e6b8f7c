"""What an agent does with the frames of its leader, in whatever order they come, and when that leader goes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.cluster.agent import Agent, NodeShared
from lamina.cluster.beats import BeatThread
from lamina.cluster.credentials import JoinToken, proof
from lamina.cluster.leader_session import AgentConfig, LeaderSession
from lamina.cluster.messages import (
    AppOnNode,
    CommitState,
    DrainBegun,
    Hello,
    LoadOnNode,
    PackageStored,
    ReadState,
    UnloadOnNode,
    WantsToLeave,
)
from lamina.cluster.node_values import LeaderState
from lamina.core.actions import Action, Load
from lamina.sdk.app_state import UNKNOWN, StateCell, StateChanges
from lamina.types import FunctionSpec
from lamina.values.slot_refs import SlotReferences
from lamina.worker.protocol import BatchDone
from tests.cluster.test_strangers import SECRET, Server
from tests.serving import run

FUNCTION = FunctionSpec(name="f")


class Member:
    """An agent that takes any leader, for its connection alone."""

    client_tls = None

    def __init__(self, folder: Path) -> None:
        self.config = AgentConfig(name="one", joins=(), token=JoinToken(SECRET), folder=folder)

    def check_epoch(self, cell: str, epoch: int) -> None: ...

    def hello(self, token: bytes, challenge: bytes, nonce: bytes) -> Hello:
        return Hello("one", 5, nonce, proof(token, "agent", challenge, nonce, "one", 5), "127.0.0.1:1", [], [], [])

    def adopt_session(self, session: LeaderSession) -> None: ...

    def on_session_closed(self, session: LeaderSession, why: str) -> None: ...

    def on_frame(self, session: LeaderSession, frame: object) -> None: ...

    def lag_us(self) -> int:
        return 0


class Session:
    """The agent's end of a connection to a leader, that writes down what is said over it."""

    def __init__(self, epoch: int = 1) -> None:
        self.address, self.epoch, self.cell, self.incarnation = "127.0.0.1:1", epoch, "", epoch
        self.beats, self.key, self.is_live, self.is_silent = None, "a key", True, False
        self.held: dict[Any, int] = {}
        self.instances: dict[str, str] = {}
        self.jobs: dict[int, int] = {}
        self.batches: dict[int, Any] = {}
        self.said: list[Any] = []

    def send(self, *frames: Any) -> None:
        self.said += frames

    def close(self) -> None:
        self.is_live = False


class World:
    """An agent without processes: its engine writes down what it is told, and packages are there."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Action] = []
        self.references = SlotReferences(2**20)
        engine = SimpleNamespace(references=self.references, perform=self.told.append, devices=[], load_errors={})
        self.state = LeaderState()
        packages = SimpleNamespace(ensure=self._ensure, path=lambda sha256, entry: f"/packages/{sha256}/{entry}")
        environments = SimpleNamespace(ensure=self._no_environment)
        config = AgentConfig(name="one", joins=(), folder=folder)
        self.agent = Agent(config, engine, NodeShared(), self.state, packages, environments)  # type: ignore[arg-type]
        self.agent._data_port = SimpleNamespace(set_keys=lambda *keys: None, port=1)  # type: ignore[assignment]

    async def _ensure(self, sha256: str, fetch: Any, in_use: Any) -> bool:
        return True

    async def _no_environment(self, folder: Path) -> str:
        return ""

    def join(self, session: Session) -> Session:
        self.agent.adopt_session(session)  # type: ignore[arg-type]
        return session

    def hears(self, session: Session, *frames: Any) -> None:
        for frame in frames:
            self.agent.on_frame(session, frame)  # type: ignore[arg-type]

    @property
    def loads(self) -> list[str]:
        return [one.instance for one in self.told if isinstance(one, Load)]


def load(instance: str) -> LoadOnNode:
    return LoadOnNode(instance, "cpu0", 0, 1.0, FUNCTION, AppOnNode("0" * 64, "app.py", None), {})


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made = World(tmp_path)
    yield made
    made.references.close()


def test_a_load_that_is_taken_back_in_the_same_breath_is_none(world: World) -> None:
    """Both frames are read at once where the link was behind; what was loaded all the same would stand there for ever."""

    async def work() -> None:
        leader = world.join(Session())
        world.hears(leader, load("f-1"), UnloadOnNode("f-1"), load("f-2"))
        await settled()
        assert len(world.loads) == 1 and world.loads[0].startswith("f-2")
        assert [type(frame) for frame in leader.said] == [PackageStored]

    run(work)


def test_a_load_of_a_leader_that_is_gone_by_then_is_none(world: World) -> None:
    async def work() -> None:
        leader = world.join(Session())
        world.hears(leader, load("f-1"))
        world.agent.on_session_closed(leader, "killed")  # type: ignore[arg-type]
        world.join(Session(2))
        await settled()
        assert world.loads == []

    run(work)


@pytest.mark.parametrize("is_told_by", ["the operator", "a signal"])
def test_a_node_that_is_being_drained_says_so_to_the_next_leader(world: World, is_told_by: str) -> None:
    """Else that one would give it work, until its time is up and all of it ends at once."""

    async def work() -> None:
        leader = world.join(Session())
        leaving = None
        if is_told_by == "the operator":
            world.hears(leader, DrainBegun())
        else:
            leaving = asyncio.create_task(world.agent._leave(60.0))
            await settled()
            assert leader.said == [WantsToLeave()]
        world.agent.on_session_closed(leader, "killed")  # type: ignore[arg-type]
        assert world.join(Session(2)).said == [WantsToLeave()]
        if leaving is not None:
            leaving.cancel()

    run(work)


def test_what_was_asked_of_a_leader_that_is_gone_is_answered() -> None:
    """A worker waits for the answer, and would wait for ever: the next leader takes its instance for one that is idle."""
    state, asked, cells, verdicts = LeaderState(), [], [], []

    def commit(question: int, done: BatchDone, changes: Sequence[StateChanges]) -> bool:
        asked.append(CommitState(question, done.batch_id, 0, [], []))
        return True

    state.connect(asked.append, commit)
    state.ask("f", "call", "app", "key", cells.append)
    state.submit("f", [], BatchDone(1, [], 0), [], verdicts.append)
    read, committed = asked
    assert isinstance(read, ReadState) and not cells and not verdicts
    state.disconnect()
    assert cells == [UNKNOWN] and verdicts == [{}]
    state.connect(asked.append, commit)  # what the leader of before says now means nothing
    state.on_answer(read.question, StateCell("value", b"\x01", 1))
    state.on_answer(committed.question, {})
    assert cells == [UNKNOWN] and verdicts == [{}]


def test_beats_go_to_the_server_that_the_frames_go_to_whatever_its_name_means_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that two servers have in turns would say hello to one, and beat at the other."""
    where: list[tuple[str, int]] = []
    connect = socket.create_connection

    def connected(to: tuple[str, int], **options: Any) -> socket.socket:
        where.append(to)
        return connect(to, **options)

    monkeypatch.setattr(socket, "create_connection", connected)

    async def work() -> None:
        async with Server() as server:
            session = LeaderSession(Member(tmp_path), f"localhost:{server.port}")
            await session.open()
            while not where:
                await asyncio.sleep(0.001)
            assert where == [("127.0.0.1", server.port)]
            session.close()

    run(work, 30)


def test_beats_that_wait_for_a_connection_do_not_hold_up_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, said = threading.Event(), threading.Event(), []

    def connect(to: tuple[str, int], **options: Any) -> socket.socket:
        begun.set()
        assert go_on.wait(60)
        raise OSError("nobody is there")

    monkeypatch.setattr(socket, "create_connection", connect)
    beats = BeatThread(("10.0.0.1", 1), "far", None, b"", "one", 1, 1, 1, lambda: 0, said.append)
    assert begun.wait(10)
    beats.stop()  # else for as long as it takes to find out that nobody is there
    go_on.set()
    beats._thread.join(10)
    assert not beats._thread.is_alive() and said == []
