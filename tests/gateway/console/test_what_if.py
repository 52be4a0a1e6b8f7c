"""What-ifs: a server as a scenario, changed, simulated in a process of its own, and written as a file that reads back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.errors import BadValue
from lamina.gateway.console import routes, what_if
from lamina.gateway.console.what_if import ServerChange, WhatIf, WhatIfQuestion, answer, changed_scenario, scenario_text
from lamina.gateway.routes.profiles import ServerSnapshot
from lamina.predict.profile import Point, Profile
from lamina.sim import scenario
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, Slo
from tests.gateway.console.emulated_fixture import ask, console_server, in_loop

H200 = DeviceSpec(id="gpu0", kind="h200", units=15, memory_mib=143_000)


def function(name: str, slo_us: int = 20_000) -> FunctionSpec:
    return FunctionSpec(name=name, max_batch=4, share=1.0, gpu="must", slo=Slo(latency_us=slo_us), scale=ScaleSpec(max=4))


def profile(name: str) -> Profile:
    points = [Point(batch=batch, units=15, p50_us=8_000 + 1_000 * batch) for batch in (1, 4)]
    return Profile(function=name, device="h200", points=points, load_us=10_000)


def server(rate: float = 50.0, **more: object) -> ServerSnapshot:
    found = {"functions": [function("f")], "flows": [], "rates": {"f": rate}, "profiles": [profile("f")], "devices": [H200]}
    return ServerSnapshot(**(found | more))  # type: ignore[arg-type]


def test_one_more_device_brings_back_what_overload_took() -> None:
    told = answer(WhatIfQuestion(server(600.0), ServerChange(devices={"h200": 3}, seconds=3)))
    assert told["how"] == "simulated" and told["now"]["attainment"] < 0.75 < 0.95 < told["then"]["attainment"]
    assert len(told["then"]["devices"]) == 3 and told["then"]["rent_per_s"] == 3 * told["now"]["rent_per_s"]


def test_a_longer_goal_and_other_rates_are_taken() -> None:
    changed = changed_scenario(server(), ServerChange(scale=2, rates={"f": 30}, goals_ms={"f": 80}))
    assert changed.functions[0].slo.latency_us == 80_000 and changed.loads[0].segments[0].to_per_s == 60


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (ServerChange(scale=0), "scale"),
        (ServerChange(scale=float("nan")), "scale"),
        (ServerChange(rates={"g": 1}), "target"),
        (ServerChange(rates={"f": -1}), "rates.f"),
        (ServerChange(rates={"f": 0}), "rates"),
        (ServerChange(goals_ms={"f": 0}), "goals_ms.f"),
        (ServerChange(devices={"tpu": 1}), "devices"),
        (ServerChange(devices={"h200": 0}), "devices"),
        (ServerChange(devices={"h200": 1_000}), "devices.h200"),
        (ServerChange(seconds=1e4), "seconds"),
    ],
)
def test_what_no_server_could_be_like_is_refused_by_name(change: ServerChange, field: str) -> None:
    with pytest.raises(BadValue, match=rf"^{field}"):
        changed_scenario(server(), change)


@pytest.mark.live
@in_loop
async def test_a_what_if_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    asked = WhatIf()
    told = await asked.ask(server(), ServerChange(seconds=1))
    assert told["then"]["offered"] > 10 and told["seed"] == 2
    with pytest.raises(BadValue, match="nothing is known yet of g"):
        await asked.ask(server(functions=[function("f"), function("g")]), ServerChange(rates={"g": 5.0}, seconds=1))


@pytest.mark.live
@in_loop
async def test_a_plan_starts_from_what_is_called_now(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin):
        assert (await ask(admin.port, "POST", "/v1/console/scenario", {})).status == 400  # no target is called yet
        for _ in range(5):
            await ask(gateway.port, "POST", "/v1/functions/look", 1)
        start = (await ask(admin.port, "GET", "/v1/console/plan")).json
        called = {one["name"]: one for one in start["targets"]}
        assert called["look"]["rate"] > 0 and called["look"]["known"] and start["devices"] == {"h200": 1}
        text = (await ask(admin.port, "POST", "/v1/console/scenario", {"rates": {"look": 10}})).json["scenario"]
        assert [load.target for load in scenario.parse(text).loads] == ["look"]
        assert (await ask(admin.port, "POST", "/v1/console/plan", {"colour": 1})).status == 400


@pytest.mark.live
@in_loop
async def test_a_plan_that_would_wait_too_long_is_refused_before_the_server_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with console_server(tmp_path) as (_gateway, admin):
        monkeypatch.setattr(what_if, "MAX_WAITING", 0)
        monkeypatch.setattr(routes, "take_snapshot", None)
        told = await ask(admin.port, "POST", "/v1/console/plan", {})
        assert (told.status, told.json["reason"]) == (429, "busy")


# --------------------------------------------------------------------------------- as a file

names = st.text("abcdefg_0123456789", min_size=1, max_size=8)


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """A chain of steps, some of them maps, with a join at its end."""
    steps = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    nodes: dict[str, Task | Each | Pass] = {}
    for place, is_map in enumerate(steps):
        later = (f"s{place + 1}",)
        inner = Flow("body", {"i": Task("i", "f")}, ("i",))
        nodes[f"s{place}"] = Each(f"s{place}", inner, later, expected_items=3) if is_map else Task(f"s{place}", "f", later)
    nodes[f"s{len(steps)}"] = Pass(f"s{len(steps)}")
    return Flow("flow", nodes, ("s0",), Slo(latency_us=90_000))  # type: ignore[arg-type]


@given(flows(), st.floats(0.5, 500), st.integers(1, 3), st.integers(1_000, 10**6))
def test_a_scenario_reads_back_as_it_was_written(flow: Flow, rate: float, count: int, slo_us: int) -> None:
    found = server(flows=[flow], functions=[function("f", slo_us)], rates={"f": rate, "flow": 2.0})
    change = ServerChange(devices={"h200": count})
    read, wanted = scenario.parse(scenario_text(found, change)), changed_scenario(found, change)
    assert [(one.kind, one.units, one.memory_mib) for one in read.devices] == [("h200", 15, 143_000)] * count
    assert read.functions == tuple(wanted.functions) and read.seed == wanted.seed and read.policy == wanted.policy
    assert {load.target: load.segments[0].to_per_s for load in read.loads} == {
        load.target: pytest.approx(load.segments[0].to_per_s, rel=1e-5) for load in wanted.loads
    }
    assert read.flows[0].expected_jobs == flow.expected_jobs and read.flows[0].slo == flow.slo
    assert [point.p50_us for point in read.profiles[0].points] == pytest.approx([9_000, 12_000])


def test_a_workflow_that_cannot_be_written_becomes_calls_of_its_functions() -> None:
    nodes = {"c": Choice("c", (("a",), ("b",)), odds=(0.25, 0.75)), "a": Task("a", "f"), "b": Pass("b")}
    found = server(flows=[Flow("flow", nodes, ("c",))], rates={"flow": 8.0})
    text = scenario_text(found, ServerChange())
    assert "flow has steps that this file cannot say" in text
    assert [(load.target, load.segments[0].to_per_s) for load in scenario.parse(text).loads] == [("f", 2.0)]


def python_calls(act: Callable[[], object]) -> int:
    count = 0

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_a_scenario_of_four_times_the_functions_takes_four_times_the_work() -> None:
    def work(count: int) -> int:
        names = [f"f{number}" for number in range(count)]
        parts = {"functions": [function(name) for name in names], "profiles": [profile(name) for name in names]}
        snapshot = server(**parts, rates=dict.fromkeys(names, 1.0))
        return python_calls(lambda: scenario_text(snapshot, ServerChange()))

    assert work(400) < 5 * work(100)
