"""1,000 runs of 20 steps, one of them over a hundred items, on the emulated engine: what a step costs the controller.

Two figures per step, over all of them: time inside `Controller.handle`, and time inside the loop around it, which also answers
questions about data, keeps the values and starts batches. Once with callers that wait, once as durable runs, whose every step
is written to the disk before the next begins.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

import lamina
from benchmarks.report import Report
from lamina.bootstrap import ServingRuntime, open_emulated
from lamina.core.events import BatchFinished, Event, Journaled
from lamina.core.workflow.runs import workflow_run
from lamina.drivers.driver import Ending
from lamina.gateway.bootstrap import open_gateway
from lamina.predict.profile import Point, Profile
from lamina.sdk.async_client import AsyncClient
from lamina.store.open import open_store
from lamina.types import NEVER_US, Call

RUNS, STEPS, FAN_OUT = 1_000, 20, 100
DEVICES = "h200x4"
WINDOW = 1_000
"""Steps whose cost is added up for one sample: a batch ends many at once."""


def make_app() -> lamina.App:
    app = lamina.App("long")
    steps = []
    for number in range(STEPS):

        def work(x: Any) -> Any:
            return x

        steps.append(app.function(name=f"s{number}", batch=32, gpu=lamina.GPU("1/16"), max_queue=RUNS * FAN_OUT * 2)(work))

    def flow(x: Any) -> Any:
        for number, step in enumerate(steps):
            x = lamina.each(step, x, expect=FAN_OUT) if number == STEPS // 2 else step(x)
        return x

    app.workflow(name="flow")(flow)
    return app


def open_live() -> ServingRuntime:
    points = [Point(batch=batch, units=1, p50_us=500.0 + 20 * batch) for batch in (1, 8, 32)]
    found = [Profile(function=f"s{number}", device="h200", points=points, load_us=1_000) for number in range(STEPS)]
    return open_emulated(make_app(), DEVICES, found, seed=1)


class Meter:
    """Clocks around `Controller.handle` and around the loop's turn."""

    def __init__(self, live: ServingRuntime) -> None:
        self.handle_us: list[float] = []
        self.loop_us: list[float] = []
        self.steps = 0
        self._handle_s = self._loop_s = 0.0
        self._steps = 0
        self._state = live.driver.controller.state
        handle, post = live.driver.controller.handle, live.driver.post

        def timed_handle(now_us: int, event: Event) -> Any:
            begin_s = time.perf_counter()
            done = self._batch(event)
            actions = handle(now_us, event)
            self._handle_s += time.perf_counter() - begin_s
            self._steps += done
            return actions

        def timed_post(event: Event) -> None:
            begin_s = time.perf_counter()
            post(event)
            self._loop_s += time.perf_counter() - begin_s
            if self._steps >= WINDOW:
                self.steps += self._steps
                self.handle_us.append(self._handle_s / self._steps * 1e6)
                self.loop_us.append(self._loop_s / self._steps * 1e6)
                self._handle_s = self._loop_s = 0.0
                self._steps = 0

        live.driver.controller.handle = timed_handle  # type: ignore[method-assign]
        live.driver.post = timed_post  # type: ignore[method-assign]

    def _batch(self, event: Event) -> int:
        """Steps that end with this: a durable one when it is on disk."""
        if isinstance(event, Journaled):
            return 1
        batch = self._state.batches.get(event.batch_id) if isinstance(event, BatchFinished) else None
        return sum(not workflow_run(job.run).durable for job in batch.jobs) if batch is not None else 0


async def waited_for(runs: int) -> tuple[Meter, float]:
    live = open_live()
    meter = Meter(live)
    await live.start()
    done = asyncio.Event()
    left = runs
    began_s = time.perf_counter()

    def on_end(ending: Ending) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    for number in range(runs):
        inputs = {"x": msgspec.msgpack.encode(None)}
        live.driver.submit(Call(f"r{number}", "flow", live.driver.now_us(), NEVER_US, NEVER_US), inputs, on_end)
        if number % 20 == 0:
            await asyncio.sleep(0)
    await done.wait()
    took_s = time.perf_counter() - began_s
    await live.driver.stop()
    return meter, took_s


async def durable(runs: int, folder: Path) -> tuple[Meter, float, float]:
    live = open_live()
    meter = Meter(live)
    store = open_store(str(folder / "runs.db"))
    gateway = await open_gateway(live, store=store)
    began_s = time.perf_counter()
    async with AsyncClient(gateway.url, max_connections=32) as client:
        handles = await asyncio.gather(*(client.start("flow", {"x": None}, kind="workflows") for _ in range(runs)))
        accepted_s = time.perf_counter() - began_s
        for handle in handles:
            await handle.result("300s")
    took_s = time.perf_counter() - began_s
    await gateway.stop(1)
    return meter, took_s, accepted_s


def run(report: Report, runs: int = RUNS) -> None:
    meter, took_s = asyncio.run(waited_for(runs))
    _add(report, "callers wait", meter, took_s, runs)
    with tempfile.TemporaryDirectory() as folder:
        meter, took_s, accepted_s = asyncio.run(durable(runs, Path(folder)))
    _add(report, "durable", meter, took_s, runs, accepted_s=accepted_s)


def _add(report: Report, how: str, meter: Meter, took_s: float, runs: int, **more: float) -> None:
    details: dict[str, Any] = {"runs": runs, "steps": meter.steps, "steps_per_s": meter.steps / took_s, **more}
    details["engine"] = f"emulated {DEVICES}"
    details["mean_us"] = statistics.fmean(meter.handle_us)
    p90 = statistics.quantiles(meter.handle_us, n=10)[-1]
    median_us = statistics.median(meter.handle_us)
    report.add(f"controller, per step, {how}: median", median_us, "us", most=200.0, p90_us=p90, **details)
    report.add(f"the whole loop, per step, {how}: median", statistics.median(meter.loop_us), "us", **details)
