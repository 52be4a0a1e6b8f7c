"""Batches with an SLO that give way, in a server with the executor's twin: what becomes of one that is paused.

The urgent function waits for a file, so whatever happens meanwhile happens to a batch that is paused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.core.policy import UnloadInstance
from lamina.engines.composite import CompositeEngine
from lamina.gateway.bootstrap import Gateway, open_gateway
from tests.gpu.patient_app import patient_app
from tests.serving import Answer, Browser, run, write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = patient_app(long="1.0", short='"1/4"', scale="min=1, max=1")


class World:
    def __init__(self, gateway: Gateway, browser: Browser, folder: Path) -> None:
        self.gateway, self.browser, self.folder = gateway, browser, folder
        engine: Any = gateway.driver.engine
        assert isinstance(engine, CompositeEngine)
        (self.gpu,) = engine.gpus
        self.state = gateway.driver.controller.state

    def call(self, x: list[float]) -> asyncio.Task[Answer]:
        return asyncio.create_task(self._post("/v1/functions/patient", {"x": x}))

    def hold(self, name: str) -> asyncio.Task[Answer]:
        return asyncio.create_task(self._post("/v1/functions/urgent", str(self.folder / name)))

    async def _post(self, path: str, value: Any) -> Answer:
        async with Browser(self.gateway.port) as browser:
            return await browser.post(path, value)

    async def slices(self) -> list[dict[str, Any]]:
        status = (await self.browser.ask("GET", "/v1/status")).json
        return [one for device in status["devices"] for one in device["slices"]]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.002)

    async def paused(self, name: str) -> tuple[asyncio.Task[Answer], asyncio.Task[Answer]]:
        """A batch that is paused, and knows how much of it is left, and the one that has its units until there is such a file."""
        long = self.call([1.0, 2.0])
        await self.until(lambda: any(device.yielding for device in self.state.devices.values()))
        urgent = self.hold(name)
        await self.until((self.folder / f"{name}.begun").exists)
        await self.until(lambda: any(batch.pauses.remaining_segments for batch in self.state.batches.values()))
        return long, urgent


Story = Callable[[World], Awaitable[None]]


def told(folder: Path, story: Story) -> None:
    app = write_app(folder, APP)

    async def all_of_it() -> None:
        gateway = await open_gateway(open_local(str(app), gpu="null", probe=True, hang_floor_us=60_000_000))
        try:
            async with Browser(gateway.port) as browser:
                world = World(gateway, browser, folder)
                (folder / "at-once").touch()
                assert (await world.hold("at-once")).status == 200  # so its time is known
                assert (await world.call([0.0, 0.0])).json == [120.0, 120.0]
                await world.until(lambda: any(one.segment_us for one in world.state.instances.values()))
                await story(world)
                await world.until(lambda: not world.state.batches)
                world.state.check()
                assert not any(device.busy or device.yielding for device in world.state.devices.values())
        finally:
            await gateway.stop(5)

    run(all_of_it, 100)


def test_it_goes_on_where_it_was_and_is_answered_after_the_urgent_one(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        long, urgent = await world.paused("go")
        (batch,) = [one for one in await world.slices() if one["gives_way"]]
        assert batch["is_paused"] and 0 < batch["remaining_segments"] <= 120
        (tmp_path / "go").touch()
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]

    told(tmp_path, story)


def test_its_client_leaves_while_it_is_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        long, urgent = await world.paused("go")
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        (tmp_path / "go").touch()
        assert (await urgent).status == 200
        assert (await world.call([3.0, 4.0])).json == [123.0, 124.0]

    told(tmp_path, story)


def test_the_executor_dies_while_it_is_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        long, urgent = await world.paused("go")
        (tmp_path / "go").touch()
        os.kill(world.gpu.pid, signal.SIGKILL)
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]

    told(tmp_path, story)


def test_its_instance_is_unloaded_while_it_is_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        long, urgent = await world.paused("go")
        (instance,) = [one for one in world.state.instances.values() if one.function == "patient"]
        world.gateway.driver.controller._cluster.unload_instance(UnloadInstance(instance.id))
        (tmp_path / "go").touch()
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]
        assert (await world.call([3.0, 4.0])).json == [123.0, 124.0]

    told(tmp_path, story)


def test_a_caller_with_less_time_than_its_neighbours_take_is_refused_and_not_made_to_wait(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        long, urgent = await world.paused("go")
        async with Browser(world.gateway.port) as browser:
            late = await browser.post("/v1/functions/patient", {"x": [0.0, 0.0]}, **{"Lamina-Deadline-Ms": "600"})
        assert late.status == 429
        (tmp_path / "go").touch()
        assert (await urgent).status == 200 and (await long).status == 200

    told(tmp_path, story)
