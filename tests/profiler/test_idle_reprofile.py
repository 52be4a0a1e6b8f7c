"""Shadow batches, and a server that measures with them when a profile no longer holds."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from lamina import encoding
from lamina.bootstrap import ServingRuntime, open_local
from lamina.core.lifecycle import InstancePhase
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import FunctionFailed
from lamina.predict import online
from lamina.predict.profile import Point, Profile, write
from lamina.profiler.idle_reprofile import IdleReprofiler, batch_sizes
from lamina.types import Slo, call_for

pytestmark = pytest.mark.live

APP = """
import time
import lamina

app = lamina.App("remeasured")
ONE = lamina.Scale(min=1, max=1)

@app.function(batch=4, scale=ONE)
def slow(x):
    time.sleep(0.002 * len(x))
    return x

@app.function(scale=ONE, idempotent=False)
def once(x):
    time.sleep(0.002)
    return x

@app.function(scale=ONE)
def fussy(x):
    return 1 / x

@app.function(scale=ONE)
def keeps(x):
    app.state.counter("kept").add(x)
    return x

def examples():
    return {"slow": [1, 2], "once": [1], "fussy": [0], "keeps": [5]}
"""
NAMES = ("slow", "once", "fussy", "keeps")


class Facts(NamedTuple):
    learnt_us: int  #: what is predicted after a batch for nobody
    error: str
    kept: int
    stale_before: list[str]
    stale_after: list[str]
    profiled_us: float  #: of four, after all of it


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """One server tells one story: workers take a second to start."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "again.py").write_text(APP)
    (folder / "profiles").mkdir()
    for name in NAMES:
        points = [Point(batch=b, units=1, p50_us=100.0 * b, p99_us=110.0 * b) for b in (1, 4)]
        write(Profile(function=name, device="cpu", points=points), folder / "profiles" / f"{name}.json")
    return asyncio.run(story(open_local(str(folder / "again.py"), probe=True)))


async def story(live: ServingRuntime) -> Facts:
    loop, predictor = live.driver, live.driver.controller.predictor
    assert isinstance(predictor, online.OnlinePredictor) and live.shadow_runner is not None
    await loop.start(live.app.deployed())
    try:
        async with asyncio.timeout(90):
            while not all(instance.phase is InstancePhase.WARM for instance in loop.controller.state.instances.values()):
                await asyncio.sleep(0.01)
            await rehearsed(live, "slow", 2)
            learnt_us = predictor.latency_us("slow", "cpu", 4, 1)
            with pytest.raises(FunctionFailed) as failed:
                await rehearsed(live, "fussy", 0)
            await rehearsed(live, "keeps", 5)
            for _ in range(10):
                await call(loop, "once")
                await call(loop, "slow")
            before = [one.function for one in predictor.stale_profiles()]
            IdleReprofiler(
                loop, predictor, live.shadow_runner, lambda: {"slow": [{"x": 1}, {"x": 2}], "once": [{"x": 1}]}, quiet_s=0.03
            ).begin()
            while any(one.function == "slow" for one in predictor.stale_profiles()):
                await asyncio.sleep(0.01)
            after = [one.function for one in predictor.stale_profiles()]
            profiled_us = predictor.base.median_us("slow", "cpu", 4, 1)
            return Facts(learnt_us, failed.value.error, len(live.state.cells), before, after, profiled_us)
    finally:
        await loop.stop()


async def call(loop: RealtimeDriver, name: str) -> None:
    ended = asyncio.Event()
    arrived = call_for(f"{name}-{loop.now_us()}", name, loop.now_us(), Slo())
    loop.submit(arrived, {"x": encoding.encode(1)}, lambda _: ended.set())
    await ended.wait()


async def rehearsed(live: ServingRuntime, name: str, body: Any) -> None:
    assert live.shadow_runner is not None
    instance = next(one for one in live.driver.controller.state.instances.values() if one.function == name)
    await live.shadow_runner.run(instance.id, name, instance.device, 1, [[(("input", "x"), encoding.encode(body))]])


def test_a_shadow_batch_is_not_learnt_from(facts: Facts) -> None:
    assert facts.learnt_us == 440


def test_its_error_is_told(facts: Facts) -> None:
    assert facts.error == "ZeroDivisionError"


def test_what_it_would_change_of_the_state_is_not_kept(facts: Facts) -> None:
    assert facts.kept == 0


def test_functions_that_take_far_longer_than_profiled_are_stale(facts: Facts) -> None:
    assert sorted(facts.stale_before) == ["once", "slow"]


def test_a_stale_profile_is_measured_again_in_a_quiet_moment(facts: Facts) -> None:
    assert facts.profiled_us >= 8_000  # it said 400, and the function sleeps for so long


def test_a_function_that_is_not_idempotent_stays_stale(facts: Facts) -> None:
    assert facts.stale_after == ["once"]


def test_it_looks_at_powers_of_two_and_the_largest() -> None:
    assert (batch_sizes(1), batch_sizes(4), batch_sizes(12)) == ([1], [1, 2, 4], [1, 2, 4, 8, 12])
