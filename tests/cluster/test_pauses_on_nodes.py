"""Batches that give way on an agent's device, with the executor's twin: as in process, and what becomes of them when it is gone.

The urgent function waits for a file, so whatever happens meanwhile happens to a batch that is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.clusters import TestCluster, cluster
from tests.gpu.patient_app import patient_app
from tests.serving import Answer, Browser, run

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = patient_app(long="lamina.GPU(1.0, required=True)", short='lamina.GPU("1/4", required=True)', scale="min=1, max=2")


@dataclass
class Story:
    """A leader with agents that have a GPU of the executor's twin."""

    made: TestCluster
    folder: Path

    @property
    def state(self) -> Any:
        return self.made.gateway.driver.controller.state

    async def post(self, target: str, value: Any) -> Answer:
        async with Browser(self.made.gateway.port) as browser:
            return await browser.post(f"/v1/functions/{target}", value)

    def long(self, *x: float) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.post("patient", {"x": x}))

    async def segmented(self) -> None:
        """The long function is known to run in segments, and both to take their time."""
        (self.folder / "at-once").touch()
        assert (await self.post("urgent", str(self.folder / "at-once"))).status == 200
        assert (await self.long(0.0, 0.0)).json == [120.0, 120.0]
        await self.made.until(lambda: any(one.segment_us for one in self.state.instances.values()))

    async def paused(self, name: str) -> tuple[asyncio.Task[Answer], asyncio.Task[Answer]]:
        """A batch that is paused, and has told how much of it is left, and the one that has its units."""
        long = self.long(1.0, 2.0)
        await self.made.until(lambda: any(device.yielding for device in self.state.devices.values()))
        urgent = asyncio.create_task(self.post("urgent", str(self.folder / name)))
        await self.made.until((self.folder / f"{name}.begun").exists)
        await self.made.until(lambda: any(batch.pauses.remaining_segments for batch in self.state.batches.values()))
        return long, urgent

    def holders(self, function: str) -> set[str]:
        """Nodes on which it stands."""
        found = self.state.functions[function].instances.values()
        return {one.device.partition(".")[0] for one in found if one.phase.value == "warm"}


def told(folder: Path, story: Callable[[Story], Awaitable[None]]) -> None:
    (folder / "app.py").write_text(APP)

    async def all_of_it() -> None:
        async with cluster(folder / "app.py", folder, hang_floor_us=60_000_000) as made:
            made.start("one", "--gpu", "null")
            await made.live("one")
            world = Story(made, folder)
            await world.segmented()
            await story(world)
            await made.until(lambda: not world.state.batches)
            world.state.check()

    run(all_of_it, 120)


def test_a_long_batch_on_a_node_gives_way_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async def story(world: Story) -> None:
        long, urgent = await world.paused("go")
        async with Browser(world.made.gateway.port) as browser:
            devices = (await browser.ask("GET", "/v1/status")).json["devices"]
        (batch,) = [one for device in devices for one in device["slices"] if one["gives_way"]]
        assert batch["is_paused"] and 0 < batch["remaining_segments"] <= 120 and not long.done()
        (tmp_path / "go").touch()
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]

    told(tmp_path, story)


def test_a_paused_batch_whose_node_dies_runs_again_on_another(tmp_path: Path) -> None:
    async def story(world: Story) -> None:
        long, urgent = await world.paused("go")
        world.made.start("two", "--gpu", "null")
        await world.made.live("two")
        (tmp_path / "go").touch()
        world.made.agents["one"].kill()
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]
        assert world.holders("patient") == {"two"}

    told(tmp_path, story)


def test_after_a_cut_a_node_still_says_what_runs_in_segments(tmp_path: Path) -> None:
    async def story(world: Story) -> None:
        loaded = set(world.state.instances)
        world.made.engine.nodes["one"]._link.close("cut")
        await world.made.until(lambda: world.made.phase("one") == "lost")
        await world.made.until(lambda: world.holders("patient") == world.holders("urgent") == {"one"})
        assert not loaded & set(world.state.instances)
        long, urgent = await world.paused("again")
        (tmp_path / "again").touch()
        assert (await urgent).status == 200 and (await long).json == [121.0, 122.0]

    told(tmp_path, story)
