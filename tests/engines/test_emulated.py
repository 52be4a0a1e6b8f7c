"""Emulated engine: batches that slow each other, on real timers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import pytest
from msgspec.structs import replace

import lamina
from lamina.bootstrap import open_emulated
from lamina.core.actions import Action, Kill, Reply, StartBatch
from lamina.core.events import BatchFinished, BatchPaused, Deployed, Event
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.emulated import EmulatedEngine, EmulatedValues
from lamina.gpu.segments import SEGMENT_US
from lamina.planner.interference import ColocatedBatch
from lamina.policies import edf, fifo, new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.hardware_model import SEGMENTS_COST, HardwareModel, WayModel
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo

pytestmark = pytest.mark.live

TWO = DeviceSpec(id="d", kind="gpu", units=2, memory_mib=1_000, limits=SliceLimits(batches_per_instance=1))


class Twice:
    """Beside another batch, each takes twice as long."""

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        return 2.0 if neighbours else 1.0


async def worked_us(names: Sequence[str], kill: str = "", way_us: int = 0) -> list[int]:
    """How long batches of calls that come at once say they took: one unit and 40 ms alone, each. With a way to their device, how
    long that is thought to be comes last."""
    points = [Point(batch=1, units=1, p50_us=40_000)]
    profiles = [Profile(function=name, device="gpu", points=points, load_us=1) for name in "ab"]
    world = HardwareModel(ProfileTable(profiles), random.Random(1), 0.0, load_noise=0.0, interference=Twice())
    world.ways = {"gpu": WayModel(way_us)} if way_us else {}
    engine, took_us = EmulatedEngine([TWO], world), list[int]()

    def watch(_now_us: int, event: Event, _actions: list[Action]) -> None:
        if isinstance(event, BatchFinished):
            took_us.append(event.device_us)

    loop = RealtimeDriver(new_controller(fifo.Policy(), ProfileTable(profiles)), engine, EmulatedValues(world), observers=[watch])
    await loop.start(
        Deployed(tuple(FunctionSpec(name=name, gpu="must", share=0.5, scale=ScaleSpec(min=1, max=1)) for name in "ab"))
    )
    while not all(instance.phase == "warm" for instance in loop.controller.state.instances.values()):
        await asyncio.sleep(0.001)
    done, ends = asyncio.Event(), list[Ending]()

    def on_end(ending: Ending) -> None:
        ends.append(ending)
        if len(ends) == len(names):
            done.set()

    for place, name in enumerate(names):
        loop.submit(Call(f"{name}{place}", name, loop.now_us()), {}, on_end)
    await asyncio.sleep(0)
    if kill:
        engine.perform(Kill(kill, "a test"))
    await asyncio.wait_for(done.wait(), 60)
    await loop.stop()
    assert all(isinstance(ending, Reply) for ending in ends)
    return [*took_us, loop.controller.state.devices["d"].way_us] if way_us else took_us


def test_the_way_to_a_device_is_measured_and_no_part_of_its_own_time():
    took_us, way_us = asyncio.run(worked_us(["a"], way_us=30_000))
    assert took_us == 40_000 and way_us >= 30_000


def test_alone_a_batch_takes_what_its_profile_says():
    assert asyncio.run(worked_us(["a"])) == [40_000]


def test_beside_each_other_both_take_longer_and_as_much():
    one_us, other_us = asyncio.run(worked_us(["a", "b"]))
    assert 40_000 < one_us <= 80_000
    assert abs(one_us - other_us) <= 2  # who came first was alone for as long as who came last


def test_a_batch_that_was_killed_says_nothing():
    assert len(asyncio.run(worked_us(["a", "b"], kill="a-1"))) == 2


def test_a_long_batch_in_segments_gives_way_to_a_short_one_and_goes_on():
    async def play() -> tuple[list[str], list[int], list[int]]:
        times_us = {"long": 2_000_000, "short": 1_000}
        profiles = [
            Profile(function=name, device="gpu", points=[Point(batch=1, units=2, p50_us=us)], load_us=1)
            for name, us in times_us.items()
        ]
        world = HardwareModel(ProfileTable(profiles), random.Random(1), 0.0, load_noise=0.0, segments_us={"long": 1_000})
        device = replace(TWO, limits=SliceLimits(batches_per_instance=0))
        ended, left_us, took_us, paused = list[str](), list[int](), list[int](), asyncio.Event()

        def watch(_now_us: int, event: Event, _actions: list[Action]) -> None:
            if isinstance(event, BatchPaused):
                left_us.append(event.left_us)
                paused.set()
            elif isinstance(event, BatchFinished):
                took_us.append(event.device_us)

        controller = new_controller(edf.Policy(), ProfileTable(profiles))
        loop = RealtimeDriver(controller, EmulatedEngine([device], world), EmulatedValues(world), observers=[watch])
        scale, slo = ScaleSpec(min=1, max=1), Slo(latency_us=1_000_000, timeout_us=60_000_000)
        specs = (
            FunctionSpec(name="long", gpu="must", share=1.0, scale=scale),
            FunctionSpec(name="short", gpu="must", scale=scale, slo=slo),
        )
        await loop.start(Deployed(specs))
        while not all(instance.segment_us or name == "short-1" for name, instance in loop.controller.state.instances.items()):
            await asyncio.sleep(0.001)
        done = asyncio.Event()

        def on_end(ending: Ending) -> None:
            ended.append(ending.call_id)
            if len(ended) == 2:
                done.set()

        loop.submit(Call("long", "long", loop.now_us()), {}, on_end)
        await asyncio.sleep(0)
        loop.submit(Call("short", "short", loop.now_us()), {}, on_end)
        await asyncio.wait_for(done.wait(), 60)
        await loop.stop()
        return ended, left_us, took_us

    ended, left_us, took_us = asyncio.run(play())
    assert ended == ["short", "long"]
    assert len(left_us) == 1 and 0 < left_us[0] < 2_000_000 * SEGMENTS_COST
    assert took_us == [1_000, pytest.approx(2_000_000 * SEGMENTS_COST, abs=2)], "a pause is no part of what it took"


def test_an_engine_of_a_server_that_never_started_stops():
    engine = EmulatedEngine([TWO], HardwareModel(ProfileTable([]), random.Random(1), 0.0, load_noise=0.0))
    asyncio.run(engine.stop(0.0))


def test_timers_of_a_device_do_not_become_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short batch beside long ones arms its device for sooner; what was armed for later fires all the same."""
    times_us = {"a": 1_000, "b": 990, "c": 100}
    profiles = [
        Profile(function=name, device="gpu", points=[Point(batch=1, units=1, p50_us=us)]) for name, us in times_us.items()
    ]
    world = HardwareModel(ProfileTable(profiles), random.Random(1), 0.0)
    device = DeviceSpec(id="d", kind="gpu", units=3, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    engine = EmulatedEngine([device], world)
    heap: list[tuple[int, int, Callable[[], None]]] = []
    now_us = numbers = fired = 0

    def call_at(at_us: int, callback: Callable[[], None]) -> None:
        nonlocal numbers
        numbers += 1
        heappush(heap, (at_us, numbers, callback))

    def start(name: str) -> None:
        nonlocal numbers
        numbers += 1
        engine.perform(StartBatch(numbers, name, f"{name}-1", "d", 1 << "abc".index(name), (), times_us[name]))

    def post(event: Event) -> None:
        assert isinstance(event, BatchFinished)
        name = names.pop(event.batch_id)
        if name != "c":
            start(name)

    def arrive() -> None:
        start("c")
        call_at(now_us + 370, arrive)

    names: dict[int, str] = {}
    monkeypatch.setattr("lamina.engines.emulated.clock_us", lambda: now_us)
    monkeypatch.setattr(engine, "_call_at", call_at)
    engine._post, engine._values = post, EmulatedValues(world)
    perform = engine.perform
    monkeypatch.setattr(engine, "perform", lambda action: (names.update({action.batch_id: action.function}), perform(action)))
    start("a")
    start("b")
    call_at(1, arrive)
    while fired < 3_000:
        now_us, _, callback = heappop(heap)
        callback()
        fired += 1
    assert len(heap) <= 8
    assert now_us > 200_000, "most of what fires begins or ends a batch"


def test_emulated_models_whose_graphs_are_long_give_way_as_on_a_gpu():
    app = lamina.App("segments")
    whole = lamina.GPU(1.0, required=True)

    class Model(lamina.TorchModel):
        pass

    def plain(x: int) -> None: ...

    for name, target, slo in (
        ("long", Model, None),
        ("patient", Model, "1s"),
        ("urgent", Model, "60ms"),
        ("quick", Model, None),
        ("code", plain, None),
    ):
        app.function(name=name, gpu=whole, slo=slo)(type(target.__name__, (target,), {}) if target is Model else target)
    times_us = {"long": 30_000, "patient": 30_000, "urgent": 30_000, "quick": 1_500, "code": 30_000}
    profiles = [
        Profile(function=name, device="h200", points=[Point(batch=1, units=15, p50_us=us)]) for name, us in times_us.items()
    ]
    runtime = open_emulated(app, "h200", profiles)
    assert runtime.driver.engine.world.segments_us == {"long": SEGMENT_US, "patient": SEGMENT_US}
