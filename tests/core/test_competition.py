"""Competition: one function with two bodies; each call goes to the better one, to the other too when that pays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import policies
from lamina.core.actions import Action, DropJob, FailCall, Reject, Reply, StartBatch, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import (
    BatchFinished,
    CallArrived,
    CallCancelled,
    Deployed,
    DeviceJoined,
    DeviceLost,
    Event,
    InstanceReady,
    JobOutcome,
    Tick,
)
from lamina.core.workflow.flow import competing_flow
from lamina.errors import BadFlow, BadValue, FunctionFailed
from lamina.policies import new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.testing import Runtime, Server
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, Slo, call_for
from tests.properties import examples

CPU = DeviceSpec(id="c", kind="cpu", family="cpu", units=1, memory_mib=10_000, price_per_s=1.0)
GPU = DeviceSpec(id="g", kind="gpu", family="gpu", units=1, memory_mib=10_000, price_per_s=100.0)


def app(slo: str | None = "100ms") -> lamina.App:
    app = lamina.App("tags")
    one = lamina.Scale(min=1, max=1)

    @app.function(scale=one)
    def on_cpu(x: int) -> str:
        return f"cpu {x}"

    @app.function(scale=one, gpu=lamina.GPU(1.0, required=True))
    def on_gpu(x: int) -> str:
        return f"gpu {x}"

    @app.function(slo=slo, compete=(on_cpu, on_gpu))
    def tag(x: int) -> str:
        """Tags a number."""
        return f"plain {x}"

    return app


def runtime(slo: str | None = "100ms", policy: str = "frontier", **takes: str) -> Runtime:
    return Runtime(app(slo), takes={"on_cpu": "40ms", "on_gpu": "4ms"} | takes, devices=[CPU, GPU], policy=policy)


@pytest.mark.parametrize("policy", ["frontier", "edf", "fifo"])
def test_the_cheaper_body_serves_a_call_that_has_the_time(policy: str) -> None:
    assert runtime("100ms", policy).call("tag", 1) == "cpu 1"


@pytest.mark.parametrize("policy", ["frontier", "edf", "fifo"])
def test_the_faster_body_serves_a_call_that_has_little_time(policy: str) -> None:
    assert runtime("20ms", policy).call("tag", 1) == "gpu 1"


def test_without_a_goal_the_faster_body_serves() -> None:
    assert runtime(None).call("tag", 1) == "gpu 1"


@pytest.mark.parametrize("policy", ["frontier", "edf", "fifo"])
def test_calls_that_the_cheaper_body_could_not_serve_in_time_go_to_the_other(policy: str) -> None:
    world = runtime("100ms", policy)
    found = [pending.result() for pending in [world.submit("tag", x) for x in range(4)]]
    assert found[:2] == ["cpu 0", "cpu 1"] and found[3] == "gpu 3"


def test_a_rejection_offers_what_the_better_body_could_do() -> None:
    world = runtime("20ms", on_gpu="15ms")
    first = world.submit("tag", 1)
    with pytest.raises(lamina.errors.Refused) as refused:
        world.call("tag", 2)
    assert first.result() == "gpu 1" and 20 < (refused.value.offer_ms or 0) < 60


@pytest.mark.parametrize("policy", ["frontier", "edf", "fifo"])
@pytest.mark.parametrize("lost", ["c", "g"])
def test_a_lost_device_leaves_the_other_body(policy: str, lost: str) -> None:
    world = runtime("200ms", policy)
    waiting = [world.submit("tag", x) for x in range(3)]
    world.advance("1ms")
    world.post(DeviceLost(lost))
    left = "gpu" if lost == "c" else "cpu"
    assert {str(one.result()).split()[0] for one in waiting} <= {left, "cpu" if left == "cpu" else "gpu"}
    assert world.call("tag", 9) == f"{left} 9"


def test_an_error_of_the_function_is_not_tried_again_elsewhere() -> None:
    def broken(x: int) -> str:
        raise ValueError("no")

    world = Runtime(app(), mocks={"on_cpu": broken}, takes={"on_cpu": "40ms", "on_gpu": "4ms"}, devices=[CPU, GPU])
    with pytest.raises(FunctionFailed, match="ValueError"):
        world.call("tag", 1)
    assert [batch.function for batch in world.batches] == ["on_cpu"]


def test_in_plain_python_what_was_decorated_is_called() -> None:
    shop = app()
    tag: Any = shop.workflows["tag"]
    assert tag(3) == "plain 3" and tag.local(3) == "cpu 3"


def test_it_is_served_as_one_function() -> None:
    with Server(app()) as server:
        assert server.client.call("tag", {"x": 3}) in ("cpu 3", "gpu 3")
        listed = {one["name"] for one in server.client.functions()}
    assert "tag" in listed


def test_options_of_bodies_are_refused_beside_compete() -> None:
    shop = app()
    bodies = tuple(shop.functions.values())
    with pytest.raises(BadValue, match="batch= beside compete="):
        shop.function(batch=4, compete=bodies)
    with pytest.raises(BadValue, match=r"cache= beside compete=\n  hint: .* leave it out"):
        shop.function(cache="10m", compete=bodies)
    with pytest.raises(BadValue, match="is no pair of functions"):
        shop.function(compete=bodies[:1])
    with pytest.raises(BadValue, match="on_cpu' takes x, not y"):

        @shop.function(compete=bodies)
        def other(y: int) -> str:
            return ""


def test_a_workflow_names_a_body() -> None:
    shop = app()

    @shop.workflow()
    def both(x: int) -> Any:
        return shop.workflows["tag"](x)

    with pytest.raises(BadFlow, match="no step of a workflow"):
        shop.deployed()


# ----------------------------------------------------------------- backups, event by event


class World:
    """A controller with two warm bodies, whose batches end when a test says so."""

    def __init__(self, policy: str = "edf", slo_us: int = 100_000) -> None:
        times = {"on_cpu": 40_000, "on_gpu": 4_000}
        profiles = [
            Profile(function=name, device=device.kind, points=[Point(batch=1, units=1, p50_us=us)], load_us=1_000)
            for name, us in times.items()
            for device in (CPU, GPU)
        ]
        self.controller: Controller = new_controller(policies.build(policy), ProfileTable(profiles))
        self.slo = Slo(latency_us=slo_us)
        self.now_us = 0
        self.ticks: set[int] = set()
        self.started: dict[int, StartBatch] = {}
        self.endings: list[Action] = []
        self.dropped: list[int] = []
        for device in (CPU, GPU):
            self.post(DeviceJoined(device))
        one = ScaleSpec(min=1, max=1)
        specs = (FunctionSpec(name="on_cpu", scale=one), FunctionSpec(name="on_gpu", scale=one, gpu="must", share=1.0))
        self.post(Deployed(specs, (competing_flow("tag", ["on_cpu", "on_gpu"], self.slo),)))

    def post(self, event: Event) -> None:
        for action in self.controller.handle(self.now_us, event):
            match action:
                case StartBatch():
                    self.started[action.batch_id] = action
                case Reply() | FailCall() | Reject():
                    self.endings.append(action)
                case DropJob():
                    self.dropped.append(action.job_id)
                case WakeAt():
                    self.ticks.add(action.at_us)
                case lamina.core.actions.Load():
                    self.post(InstanceReady(action.instance, 1_000))
                case _:
                    pass
        self.controller.state.check()

    def arrive(self, name: str) -> None:
        self.post(CallArrived(call_for(name, "tag", self.now_us, self.slo)))

    def advance_to(self, at_us: int) -> None:
        while due := sorted(tick for tick in self.ticks if tick <= at_us):
            self.ticks.discard(due[0])
            self.now_us = max(self.now_us, due[0])
            self.post(Tick())
        self.now_us = at_us

    def end(self, function: str, ok: bool = True, error: str = "function-failed") -> None:
        number = next(number for number, batch in self.started.items() if batch.function == function)
        batch = self.started.pop(number)
        self.post(BatchFinished(number, 1_000, () if ok else (JobOutcome(False, error),) * len(batch.jobs)))

    @property
    def running(self) -> list[str]:
        return sorted(batch.function for batch in self.started.values())


def test_a_backup_starts_at_the_last_moment_at_which_it_is_in_time() -> None:
    world = World()
    world.arrive("a")
    assert world.running == ["on_cpu"]
    world.advance_to(94_000)
    assert world.running == ["on_cpu"]
    world.advance_to(95_000)
    assert world.running == ["on_cpu", "on_gpu"]


def test_the_first_result_is_the_answer_and_the_other_is_dropped() -> None:
    world = World()
    world.arrive("a")
    world.advance_to(96_000)
    other = next(batch for batch in world.started.values() if batch.function == "on_cpu").jobs[0].id
    world.end("on_gpu")
    assert [type(one) for one in world.endings] == [Reply] and world.dropped == [other]
    world.end("on_cpu")
    assert len(world.endings) == 1


def test_a_call_that_is_done_in_time_has_no_backup() -> None:
    world = World()
    world.arrive("a")
    world.advance_to(40_000)
    world.end("on_cpu")
    world.advance_to(200_000)
    assert world.running == [] and len(world.endings) == 1


def test_a_backup_takes_idle_capacity_only() -> None:
    world = World(slo_us=60_000)
    world.arrive("a")
    world.now_us = 1_000
    world.arrive("b")  # behind a it would be late: the GPU has it
    assert world.running == ["on_cpu", "on_gpu"]
    world.advance_to(55_500)
    assert world.running == ["on_cpu", "on_gpu"]
    assert not world.dropped


def test_a_failed_body_leaves_a_backup_that_is_under_way() -> None:
    world = World()
    world.arrive("a")
    world.advance_to(96_000)
    world.end("on_cpu", ok=False)
    assert world.endings == []
    world.end("on_gpu")
    assert [type(one) for one in world.endings] == [Reply]


@examples(60)
@given(
    st.sampled_from(["edf", "frontier", "fifo"]),
    st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(0, 9)),
            st.tuples(st.just("pass"), st.integers(1, 60_000)),
            st.tuples(st.sampled_from(["end", "fail"]), st.sampled_from(["on_cpu", "on_gpu"])),
            st.tuples(st.just("cancel"), st.integers(0, 9)),
            st.tuples(st.just("lose"), st.sampled_from(["c", "g"])),
            st.tuples(st.just("join"), st.sampled_from(["c", "g"])),
        ),
        max_size=40,
    ),
)
def test_every_call_ends_once_whatever_happens(policy: str, steps: list[tuple[str, Any]]) -> None:
    world, called = World(policy), []
    for number, (verb, what) in enumerate(steps):
        match verb:
            case "arrive":
                called.append(f"{what}-{number}")
                world.arrive(called[-1])
            case "pass":
                world.advance_to(world.now_us + what)
            case "end" | "fail" if what in world.running:
                world.end(what, ok=verb == "end")
            case "cancel" if called:
                world.post(CallCancelled(called[what % len(called)]))
            case "lose":
                world.started = {n: b for n, b in world.started.items() if b.device != what}
                world.post(DeviceLost(what))
            case "join":
                world.post(DeviceJoined(CPU if what == "c" else GPU))
    world.advance_to(world.now_us + 120_000_000)
    assert sorted(one.call_id for one in world.endings) == sorted(called)  # type: ignore[union-attr]
    assert world.controller.next_run_timer_us >= 2**62
