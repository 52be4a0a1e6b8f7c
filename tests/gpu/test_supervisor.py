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
from lamina.gpu.supervisor import ExecutorProcess, ExecutorSupervisor
from lamina.ipc.child_process import ProcessSpec
from lamina.values.slot_refs import SlotReferences
from tests.serving import run, write_app

pytestmark = [pytest.mark.live, pytest.mark.slow]


class World:
    """Lives, and what they tell. An executor that is lost is replaced, as the engine does."""

    def __init__(self, app: Path) -> None:
        self.ledger = SlotReferences(1 << 20)
        self.ups: list[int] = []
        self.lost: list[ExecutorProcess] = []
        self._news = asyncio.Event()

        def describe(life: ExecutorProcess) -> ExecutorSetup:
            owners = {"owner": life.slots.owner, "values_owner": life.values.owner}
            folder = self.ledger.directory.path
            return ExecutorSetup(app=str(app), device="null0", slicer="null", folder=folder, pool_bytes=1 << 20, **owners)

        kind = ProcessSpec("lamina.gpu.executor_main", from_executor_reader)
        self.lives = ExecutorSupervisor(describe, kind, self.ledger, self._frame, self._lost, opens_ahead=True)

    def _frame(self, life: ExecutorProcess, frame: Any) -> None:
        if isinstance(frame, ExecutorReady):
            self.ups.append(frame.pid)
            self.lives.on_ready(life)
        self._news.set()

    def _lost(self, life: ExecutorProcess) -> None:
        self.lost.append(life)
        self.lives.close(life)
        if not self.lives._is_stopping:
            self.lives.take_over()
        self._news.set()

    @property
    def spare(self) -> int:
        """Of the process that stands by, or gets ready to."""
        spare = self.lives._standby
        return spare.process.pid if spare is not None and spare.process is not None else 0

    async def until(self, holds: Callable[[], Any]) -> None:
        while not holds():
            self._news.clear()
            look = asyncio.get_running_loop().call_later(0.05, self._news.set)  # a spare's coming and going is told nobody
            await asyncio.wait_for(self._news.wait(), 60)
            look.cancel()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def tell(app: Path) -> dict[str, Any]:
    world = World(app)
    said: dict[str, Any] = {}
    lives = world.lives
    lives.take_over()
    await world.until(lambda: world.spare)
    spare = world.spare  # it has just been started, and has imported nothing yet
    kill(world.ups[0])
    await world.until(lambda: len(world.ups) == 2)
    said["replaced by"], said["the spare"] = world.ups[1], spare

    await world.until(lambda: world.spare not in (0, spare))
    said["serving"], first = world.ups[-1], world.spare
    kill(first)
    await world.until(lambda: world.spare not in (0, first))
    said["after a spare's death"] = (world.lives.current.process.pid, lives._opens_ahead)  # type: ignore[union-attr]
    second = world.spare
    kill(second)
    await world.until(lambda: world.spare not in (0, second))
    said["after another's"] = lives._opens_ahead

    third = world.spare
    kill(third)
    kill(world.ups[-1])
    await world.until(lambda: len(world.ups) == 3)
    said["both gone"] = world.ups[2] not in (third, world.ups[1])
    said["restarts"] = lives.restarts

    await world.until(lambda: world.spare not in (0, third))
    pids = [process.pid for process in lives._processes]
    await asyncio.wait_for(lives.stop(5.0, is_idle=True), 30)
    said["left"] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    world.ledger.close()
    return said


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    app = write_app(tmp_path_factory.mktemp("lives"), 'import lamina\napp = lamina.App("lives")\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "STANDBY_AFTER_S", 0.0)
        patch.setattr(supervisor, "STANDBY_RETRY_S", 0.0)
        found: dict[str, Any] = run(lambda: tell(app), 110)
    return found


def test_an_executor_that_dies_while_its_spare_is_being_made_is_replaced_by_it(story: dict[str, Any]):
    assert story["replaced by"] == story["the spare"]


def test_the_death_of_a_spare_is_felt_by_nobody_and_the_next_opens_the_device_too(story: dict[str, Any]):
    assert story["after a spare's death"] == (story["serving"], True)


def test_the_second_spare_that_dies_was_the_last_to_open_the_device(story: dict[str, Any]):
    assert story["after another's"] is False


def test_when_both_die_a_fresh_process_takes_over(story: dict[str, Any]):
    assert story["both gone"] and story["restarts"] == 2


def test_at_the_end_nobody_is_left_not_even_a_spare_that_was_just_started(story: dict[str, Any]):
    assert story["left"] == []
