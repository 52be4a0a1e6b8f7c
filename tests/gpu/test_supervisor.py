"""Executor supervisor on null slices: whichever process dies, and whenever, one serves in the end, and none is left.

One story, for processes take seconds to start; each test makes one claim about it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.gpu import supervisor
from lamina.gpu.protocol import ExecutorReady, ExecutorSetup, from_executor_reader
from lamina.gpu.supervisor import ExecutorProcess, ExecutorSupervisor, StandbyMode
from lamina.ipc.child_process import ProcessSpec
from lamina.values.slot_refs import SlotReferences
from tests.serving import run, write_app

pytestmark = [pytest.mark.live, pytest.mark.slow]


class World:
    """A supervisor, and what it reports. An executor that is lost is replaced, as the engine does."""

    def __init__(self, app: Path, standby: StandbyMode = "models") -> None:
        self.ledger = SlotReferences(1 << 20)
        self.ups: list[int] = []
        self.lost: list[ExecutorProcess] = []
        self._news = asyncio.Event()

        def describe(executor: ExecutorProcess) -> ExecutorSetup:
            owners = {"owner": executor.slots.owner, "values_owner": executor.values.owner}
            folder = self.ledger.directory.path
            return ExecutorSetup(app=str(app), device="null0", slicer="null", folder=folder, pool_bytes=1 << 20, **owners)

        spec = ProcessSpec("lamina.gpu.executor_main", from_executor_reader)
        self.supervised = ExecutorSupervisor(describe, spec, self.ledger, self._frame, self._lost, standby=standby)

    def _frame(self, executor: ExecutorProcess, frame: Any) -> None:
        if isinstance(frame, ExecutorReady):
            self.ups.append(frame.pid)
            self.supervised.on_ready(executor)
        self._news.set()

    def _lost(self, executor: ExecutorProcess) -> None:
        self.lost.append(executor)
        self.supervised.close(executor)
        if not self.supervised._is_stopping:
            self.supervised.take_over()
        self._news.set()

    @property
    def standby(self) -> int:
        """Process id of the standby, also while it gets ready; 0 without one."""
        standby = self.supervised._standby
        return standby.process.pid if standby is not None and standby.process is not None else 0

    async def until(self, holds: Callable[[], Any]) -> None:
        while not holds():
            self._news.clear()
            look = asyncio.get_running_loop().call_later(0.05, self._news.set)  # a standby's coming and going is not reported
            await asyncio.wait_for(self._news.wait(), 60)
            look.cancel()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def tell(app: Path) -> dict[str, Any]:
    world = World(app)
    said: dict[str, Any] = {}
    supervised = world.supervised
    supervised.take_over()
    await world.until(lambda: world.standby)
    standby = world.standby  # it has just been started, and has imported nothing yet
    kill(world.ups[0])
    await world.until(lambda: len(world.ups) == 2)
    said["replaced by"], said["the standby"] = world.ups[1], standby

    await world.until(lambda: world.standby not in (0, standby))
    said["serving"], first = world.ups[-1], world.standby
    kill(first)
    await world.until(lambda: world.standby not in (0, first))
    said["after a standby's death"] = (world.supervised.current.process.pid, supervised._opens_ahead)  # type: ignore[union-attr]
    second = world.standby
    kill(second)
    await world.until(lambda: world.standby not in (0, second))
    said["after another's"] = supervised._opens_ahead

    third = world.standby
    supervisor.STANDBY_RETRY_S = 600.0  # else the next one is there before the executor's death is noticed
    kill(third)
    await world.until(lambda: world.standby == 0)
    kill(world.ups[-1])
    await world.until(lambda: len(world.ups) == 3)
    said["both gone"] = world.ups[2] not in (third, world.ups[1])
    said["restarts"] = supervised.restarts

    await world.until(lambda: world.standby not in (0, third))
    fourth, serving = world.standby, world.ups[-1]
    kill(fourth)
    kill(serving)  # which death is noticed first is up to the kernel: a dead standby may be promoted, and is then replaced
    await world.until(lambda: len(world.ups) == 4)
    said["both at once"] = world.ups[3] not in (fourth, serving)

    await world.until(lambda: world.standby not in (0, fourth))
    pids = supervised._processes.pids
    await asyncio.wait_for(supervised.stop(5.0, is_idle=True), 30)
    said["left"] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    world.ledger.close()
    return said


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    app = write_app(tmp_path_factory.mktemp("lives"), 'import lamina\napp = lamina.App("lives")\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "STANDBY_AFTER_S", 0.0)
        patch.setattr(supervisor, "STANDBY_RETRY_S", 0.0)
        found: dict[str, Any] = run(lambda: tell(app), 300)
    return found


def test_an_executor_that_dies_while_its_standby_starts_is_replaced_by_it(story: dict[str, Any]):
    assert story["replaced by"] == story["the standby"]


def test_the_death_of_a_standby_changes_nothing_and_the_next_opens_the_device_too(story: dict[str, Any]):
    assert story["after a standby's death"] == (story["serving"], True)


def test_the_second_standby_that_dies_was_the_last_to_open_the_device(story: dict[str, Any]):
    assert story["after another's"] is False


def test_when_both_die_a_fresh_process_takes_over(story: dict[str, Any]):
    assert story["both gone"] and story["restarts"] == 2


def test_when_both_die_at_once_a_fresh_process_takes_over_in_the_end(story: dict[str, Any]):
    assert story["both at once"]


def test_at_the_end_no_process_is_left_not_even_a_standby_that_was_just_started(story: dict[str, Any]):
    assert story["left"] == []


async def tell_without_models(app: Path, standby: StandbyMode) -> dict[str, Any]:
    world = World(app, standby)
    supervised = world.supervised
    supervised.take_over()
    await world.until(lambda: len(world.ups) == 1)
    if standby == "imports":
        await world.until(lambda: world.standby)
    await asyncio.sleep(0)  # what `on_ready` had due at once has happened
    first = world.standby
    kill(world.ups[0])
    await world.until(lambda: len(world.ups) == 2)
    said = {"standby": first, "served by": world.ups[1], "opens": supervised._opens_ahead, "restarts": supervised.restarts}
    await asyncio.wait_for(supervised.stop(5.0, is_idle=True), 30)
    world.ledger.close()
    return said


@pytest.mark.parametrize("standby", ["imports", "off"])
def test_a_device_without_room_for_models_twice_has_imports_standing_by_or_nothing(
    tmp_path: Path, standby: StandbyMode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "STANDBY_AFTER_S", 0.0)
    app = write_app(tmp_path, 'import lamina\napp = lamina.App("lives")\n')
    said = run(lambda: tell_without_models(app, standby), 120)
    assert not said["opens"]
    assert said["restarts"] == 1
    if standby == "imports":
        assert said["served by"] == said["standby"]
    else:
        assert said["standby"] == 0
