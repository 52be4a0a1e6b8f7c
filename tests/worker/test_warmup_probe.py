"""Warm-up probe: the first timing of a function without a profile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina.bootstrap import open_local
from lamina.core.events import Deployed, DeviceJoined, Event, InstanceReady
from lamina.ipc.framing import FrameChannel
from lamina.policies import build, new_controller
from lamina.predict.online import OnlinePredictor
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec
from lamina.worker import main as live_worker
from lamina.worker.cpu_affinity import WorkerAffinity
from lamina.worker.main import FunctionWorker, WorkerSetup
from lamina.worker.protocol import to_worker_reader
from lamina.worker.warmup_probe import probe

APP = """
import time
import lamina

app = lamina.App("probed")
ONE = lamina.Scale(min=1, max=1)

@app.function(batch=8, scale=ONE)
def double(x):
    return [value * 2 for value in x]

@app.function(scale=ONE, idempotent=False)
def once(x):
    return x

@app.function(batch=8)
def slow(x):
    time.sleep(0.06)
    return x

@app.function()
def large(x):
    return bytes(2**20)

@app.function()
def fussy(x):
    return 1 / x

@app.function()
def secret(x):
    return x

def examples():
    return {"double": [1, 2], "once": [1], "slow": [1], "large": [1], "fussy": [0]}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "probed_app.py"
    path.write_text(APP)
    return path


@pytest.fixture
def look(app: Path, tmp_path: Path) -> Iterator[Callable[..., list[tuple[int, int, int]]]]:
    ends: list[socket.socket] = []
    whole = WorkerAffinity()

    def at(function: str, budget_us: int = 10**9) -> list[tuple[int, int, int]]:
        setup = WorkerSetup(str(app), function, "cpu0", 1, str(tmp_path), "w1", 2**22, 0)
        ends.extend(socket.socketpair())
        loaded, runner = live_worker.load(setup)
        return probe(
            FunctionWorker(setup, FrameChannel(ends[-1], to_worker_reader()), loaded, runner, WorkerAffinity()),
            loaded,
            setup,
            budget_us,
        )

    yield at
    whole.apply((1 << len(whole.allowed)) - 1)  # the worker has bound this process to its slice
    for end in ends:
        end.close()


def test_one_and_the_largest_batch_are_timed(look: Callable[..., list[tuple[int, int, int]]]) -> None:
    assert [(batch, units) for batch, units, _ in look("double")] == [(1, 1), (8, 1)]


def test_what_takes_long_is_timed_once(look: Callable[..., list[tuple[int, int, int]]]) -> None:
    ((batch, _, us),) = look("slow", 1000)
    assert batch == 1 and us > 60_000


def test_a_large_result_leaves_no_slot_taken(look: Callable[..., list[tuple[int, int, int]]], tmp_path: Path) -> None:
    assert len(look("large")) == 1
    assert len(list(tmp_path.glob("w1-*"))) == 1  # the second run used the slot of the first


@pytest.mark.parametrize("function", ["fussy", "secret"])
def test_without_a_sample_that_works_nothing_is_said(look: Callable[..., list[tuple[int, int, int]]], function: str) -> None:
    assert look(function) == []


def test_what_was_seen_is_known_before_the_first_call() -> None:
    predictor = OnlinePredictor()
    controller = new_controller(build("edf"), predictor)
    controller.handle(0, DeviceJoined(DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=999)))
    spec = FunctionSpec(name="f", max_batch=8, scale=ScaleSpec(min=1, max=1))
    controller.handle(0, Deployed((spec,), ()))
    (instance,) = controller.state.instances
    controller.handle(9, InstanceReady(instance, 5, ((1, 1, 1000), (8, 1, 4000))))
    assert 1000 <= predictor.latency_us("f", "cpu", 1, 1) < 4000 <= predictor.latency_us("f", "cpu", 8, 1) < 8000


@pytest.mark.live
@pytest.mark.parametrize("wanted", [True, False])
def test_a_server_looks_once_if_it_is_told_to(app: Path, wanted: bool) -> None:
    async def known() -> dict[str, bool]:
        live = open_local(str(app), probe=wanted)
        ready: asyncio.Queue[Event] = asyncio.Queue()
        live.driver.add_observer(lambda _, event, __: ready.put_nowait(event) if isinstance(event, InstanceReady) else None)
        await live.start()
        try:
            for _ in ("double", "once"):
                await ready.get()
            latency_us = live.driver.controller.predictor.latency_us
            return {name: latency_us(name, "cpu", 1, 1) > 0 for name in ("double", "once")}
        finally:
            await live.driver.stop()

    assert asyncio.run(asyncio.wait_for(known(), 90)) == {"double": wanted, "once": False}
