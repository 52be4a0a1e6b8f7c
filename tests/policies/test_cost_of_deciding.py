"""Cost of a decision, counted: an event looks at a few functions and devices, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.controller import CallCounter, Crowd, dispatch_costs

from lamina.core.actions import Load, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import CallArrived, Deployed, DeviceJoined, Event, InstanceReady, Tick
from lamina.core.policy import View
from lamina.planner import blocking
from lamina.policies import frontier, new_controller
from lamina.policies.frontier import autoscaler, candidate_slots, load_shedding
from lamina.policies.frontier.config_table import ConfigTable
from lamina.policies.frontier.load_shedding import LoadShedder
from lamina.predict.online import OnlinePredictor
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo, call_for
from tests.script import Script, a_function

SLO = Slo(latency_us=100_000)


@pytest.mark.parametrize("functions", [20, 100])
def test_an_event_asks_about_a_handful_of_functions_however_many_wait(functions: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    decide = frontier.Policy._decide

    def counted(*args: object) -> object:
        asked[-1] += 1
        return decide(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier.Policy, "_decide", counted)
    crowd = Crowd(frontier.Policy(), functions, before=lambda event: asked.append(0))
    crowd.play(1_000)
    crowd.controller.state.check()
    assert len(crowd.controller.state.deferred) > functions // 2
    late = asked[functions * 2 :]
    assert sum(late) / len(late) < 1.5


@pytest.mark.parametrize("functions", [12, 48])
def test_an_event_with_batches_that_block_others_looks_into_a_few_claims_however_many_there_are(
    functions: int, script: Script, monkeypatch: pytest.MonkeyPatch
):
    """Six long functions wait on a device where short ones may need every unit at any moment."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=10**6, limits=SliceLimits(batches_per_instance=0))
    names = [f"f{number}" for number in range(functions)]
    short = [a_function(name, share=1 / 4, slo=Slo(latency_us=50_000 + 1_000 * at)) for at, name in enumerate(names)]
    long = [a_function(f"long{number}", share=1 / 2, slo=Slo(latency_us=3_000_000)) for number in range(6)]
    takes = dict.fromkeys(names, 5_000) | {one.name: 300_000 for one in long}
    script.given(*short, *long, devices=[device], policy=frontier.Policy(), takes=takes)
    script.at(400_000)  # claims are worked out a part at a time
    claims, placed = counted(monkeypatch, blocking._Relevance, "__call__"), counted(monkeypatch, blocking, "keep_units")
    most_claims = most_placed = 0
    for one in long:
        before = len(claims), len(placed)
        script.arrives(f"c-{one.name}", target=one.name, within_us=3_000_000)
        most_claims, most_placed = max(most_claims, len(claims) - before[0]), max(most_placed, len(placed) - before[1])
    assert 0 < most_claims <= 8 and most_placed <= 2


def test_the_next_batch_of_a_workflow_takes_few_calls_however_it_is_chosen():
    """Three steps with 256 configurations each, on four devices. The bounds are what it takes today: lower them some day."""
    made = dispatch_costs(CallCounter(), seed=0, runs=150)
    assert made[len(made) // 2] <= 75
    assert made[int(len(made) * 0.98)] <= 130, "a plan is made now and then, and takes thousands"


def fleet(functions: int, devices: int, copies: int) -> Controller:
    """Functions with so many standing instances each, all loaded."""
    names = [f"f{number}" for number in range(functions)]
    points = [Point(batch=1, units=1, p50_us=1_000), Point(batch=8, units=1, p50_us=2_000)]
    table = ProfileTable([Profile(function=name, device="g", points=points) for name in names])
    controller = new_controller(frontier.Policy(), OnlinePredictor(table))
    limits, scale = SliceLimits(batches_per_instance=0), ScaleSpec(min=copies, max=copies)
    specs = tuple(FunctionSpec(name=name, gpu="must", share=1 / 16, max_batch=8, slo=SLO, scale=scale) for name in names)
    gpus = [DeviceSpec(id=f"g{number}", kind="g", units=16, memory_mib=10**6, limits=limits) for number in range(devices)]
    for event in (*map(DeviceJoined, gpus), Deployed(functions=specs)):
        handle(controller, 0, event)
    for now_us in range(0, 1_000_000, 1_000):  # a scan in slices sees all of them within a second
        handle(controller, now_us, Tick())
    return controller


def handle(controller: Controller, now_us: int, event: Event) -> list[Any]:
    actions = controller.handle(now_us, event)
    for action in list(actions):
        if isinstance(action, Load):
            actions += handle(controller, now_us, InstanceReady(action.instance))
    return actions


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """Calls of a method from now on, by their last argument."""
    seen: list[object] = []
    plain = getattr(owner, name)

    def count(*args: object, **more: object) -> object:
        seen.append(args[-1])
        return plain(*args, **more)

    monkeypatch.setattr(owner, name, count)
    return seen


def test_a_scan_of_many_functions_is_made_in_slices_and_leaves_none_out(monkeypatch: pytest.MonkeyPatch):
    functions = 200
    controller = fleet(functions, 2, 1)
    assert all(len(function.instances) == 1 for function in controller.state.functions.values())
    seen = counted(monkeypatch, autoscaler.FrontierAutoscaler, "_scale_function")
    most = 0
    for now_us in range(2_000_000, 3_000_000, 1_000):
        before = len(seen)
        handle(controller, now_us, Tick())
        most = max(most, len(seen) - before)
    assert most == autoscaler.SLICE
    assert {id(one) for one in seen} == {id(one) for one in controller.state.functions.values()}
    assert len(seen) == functions, "once a period, not more"


def test_a_scan_that_takes_longer_than_its_period_comes_to_the_last_function(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autoscaler, "MIN_GAP_US", 200_000)
    controller = fleet(100, 2, 1)
    seen = counted(monkeypatch, autoscaler.FrontierAutoscaler, "_scale_function")
    for now_us in range(2_000_000, 6_000_000, 10_000):
        handle(controller, now_us, Tick())
    assert {id(one) for one in seen} == {id(one) for one in controller.state.functions.values()}


def test_a_few_functions_are_scanned_in_one_go(monkeypatch: pytest.MonkeyPatch):
    controller = fleet(autoscaler.FEW, 1, 1)
    seen = counted(monkeypatch, autoscaler.FrontierAutoscaler, "_scale_function")
    handle(controller, 5_000_000, Tick())
    assert len(seen) == autoscaler.FEW


def test_a_function_that_waits_for_its_first_instance_does_not_wait_for_the_scan():
    controller = fleet(200, 2, 1)
    more = FunctionSpec(name="new", gpu="must", share=1 / 16, slo=SLO)
    handle(controller, 2_000_000, Deployed(functions=(more,)))
    actions = controller.handle(2_000_100, CallArrived(call_for("c", "new", 2_000_100, Slo())))
    assert [action.function for action in actions if isinstance(action, Load)] == ["new"]


def test_a_call_compares_a_few_devices_of_a_function_that_is_on_many(monkeypatch: pytest.MonkeyPatch):
    controller = fleet(1, 64, 64)
    found = list[int]()
    plain = candidate_slots.free_slots

    def counting(*args: Any) -> Iterator[Any]:
        found.append(0)
        for one in plain(*args):
            found[-1] += 1
            yield one

    monkeypatch.setattr(candidate_slots, "free_slots", counting)
    hosts = set[str]()
    for number in range(2_000):
        now_us = 2_000_000 + number
        actions = controller.handle(now_us, CallArrived(call_for(f"c{number}", "f0", now_us, SLO)))
        hosts |= {action.device for action in actions if isinstance(action, StartBatch)}
    assert max(found) <= candidate_slots.MAX_CANDIDATES
    assert len(hosts) > 48, "and most of its devices have work"


def test_the_first_call_of_a_loaded_function_finds_its_table_ready(monkeypatch: pytest.MonkeyPatch):
    """Also of one of many, whose times are known only since it was loaded: the next scan is a second away."""
    controller = fleet(200, 2, 1)
    spec = FunctionSpec(name="new", gpu="must", share=1 / 16, max_batch=8, slo=SLO, scale=ScaleSpec(min=1, max=1))
    actions = controller.handle(2_000_000, Deployed(functions=(spec,)))
    now_us = 2_000_000
    while not (loads := [action for action in actions if isinstance(action, Load)]):
        now_us += 1_000
        actions = controller.handle(now_us, Tick())
    built = counted(monkeypatch, ConfigTable, "__post_init__")
    controller.handle(now_us + 500, InstanceReady(loads[0].instance, probes=((1, 1, 3_000), (8, 1, 9_000))))
    assert [table.function.name for table in built if isinstance(table, ConfigTable)] == ["new"]
    controller.handle(now_us + 600, CallArrived(call_for("c", "new", now_us + 600, SLO)))
    assert len(built) == 1


def test_demand_of_many_streams_is_added_up_in_parts_and_to_the_same_shares():
    """With every call a part of them; the shares are those of all at once."""
    streams, work = 200, 40_000.0

    def offered(shedder: LoadShedder) -> LoadShedder:
        for number in range(streams):
            for _ in range(1 + number % 3):
                shedder.record_arrival(Call("c", f"t{number}", 0))
        shedder.record_utilisation("g", 1.0)
        return shedder

    at_once, in_parts = offered(LoadShedder()), offered(LoadShedder())
    at_once.update(1_000_000, {"g": 1}, {f"t{number}": {"g": work} for number in range(streams)}, {})
    parts = in_parts._add_up(1_000_000, {"g": 1}, lambda target: {"g": work}, lambda tenant: 1.0)
    steps = sum(1 for _ in parts)
    assert steps == (streams - 1) // load_shedding.PART + (streams - 1) // load_shedding.FEW
    assert in_parts._devices == at_once._devices
    assert in_parts._interval_us == at_once._interval_us != {}


def test_the_least_cost_of_a_call_looks_at_one_of_the_devices_that_are_alike(monkeypatch: pytest.MonkeyPatch):
    """It is told with each rejection: on 500 devices it took 4 ms."""
    controller = fleet(functions=1, devices=100, copies=1)
    cheap = DeviceSpec(id="c0", kind="g", units=16, memory_mib=10**6, price_per_s=0.5, limits=SliceLimits(batches_per_instance=0))
    view, asked, latency_us = controller.view, list[int](), View.latency_us
    monkeypatch.setattr(View, "latency_us", lambda *of: asked.append(of[4]) or latency_us(*of))
    target: Any = SimpleNamespace(name="f0", expected_jobs={"f0": 1.0})
    before = view.least_cost(target)
    assert 0 < len(asked) <= 16
    handle(controller, 1_000_000, DeviceJoined(cheap))
    view.advance(2_000_000)
    assert view.least_cost(target) == pytest.approx(before / 2)
    assert len(asked) <= 3 * 16
