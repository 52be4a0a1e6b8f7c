"""Online gpu-let and its two baselines: planned slices, rounds, and changes of plan."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from msgspec.structs import replace

from lamina import policies
from lamina.core.actions import Action, Load, Resize, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import CallArrived, Deployed, DeviceJoined, Event, InstanceLost, InstanceReady
from lamina.core.lifecycle import InstancePhase
from lamina.policies import new_controller
from lamina.predict.interference import BandwidthInterference
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload as Calls
from lamina.sim.workload import steps
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo, call_for

ALL = ("gpulet", "timesharing", "greedy_part")
MIG = SliceLimits(sizes=(1, 2, 3, 4, 7), per_batch=False)


def device(units: int = 100, limits: SliceLimits | None = None, number: int = 0, memory_mib: int = 8000) -> DeviceSpec:
    limits = limits or SliceLimits(batches_per_instance=0)
    return DeviceSpec(id=f"d-{number}", kind="d", units=units, memory_mib=memory_mib, limits=limits)


def profile(name: str, units: int, per_ms: float = 2.0) -> Profile:
    sizes = sorted({1, max(1, units // 5), max(1, units // 2), units})
    points = [
        Point(batch=batch, units=size, p50_us=1000 * (3 + per_ms * batch * (0.3 + 0.7 * units / size)))
        for size in sizes
        for batch in (1, 4, 16)
    ]
    return Profile(function=name, device="d", points=points, load_us=200_000)


def scenario(rates: dict[str, float], units: int = 100, limits: SliceLimits | None = None, gpus: int = 2) -> Scenario:
    functions = [
        FunctionSpec(name=name, max_batch=16, gpu="must", memory_mib=1000, slo=Slo(latency_us=200_000), scale=ScaleSpec(min=1))
        for name in rates
    ]
    return Scenario(
        name="test",
        devices=tuple(device(units, limits, number) for number in range(gpus)),
        functions=tuple(functions),
        profiles=tuple(profile(name, units) for name in rates),
        loads=tuple(Calls(target=name, segments=steps([(NEVER_US, rate)]), start_us=1_000_000) for name, rate in rates.items()),
        duration_us=4_000_000,
        noise=0.02,
    )


class Log:
    """What stood and what ran, as the actions tell."""

    def __init__(self) -> None:
        self.homes: dict[str, tuple[str, str, int]] = {}
        self.runs: list[tuple[StartBatch, int]] = []
        self.loads = 0

    def __call__(self, now_us: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Load():
                    self.loads += 1
                    self.homes[action.instance] = (action.function, action.device, action.mask)
                case Resize():
                    function, place, _ = self.homes[action.instance]
                    self.homes[action.instance] = (function, place, action.mask)
                case Unload():
                    del self.homes[action.instance]
                case StartBatch():
                    self.runs.append((action, self.homes[action.instance][2]))
                case _:
                    pass


def played(policy: str, given: Scenario, **options: object) -> tuple[float, Log]:
    log = Log()
    return run(given, policy, dict(options), watch=log, check=True).total.attainment, log


@pytest.mark.parametrize("policy", ALL)
def test_a_load_it_can_carry_is_served_in_time(policy: str):
    rates = {"a": 60.0, "b": 40.0}
    attainment, _ = played(policy, scenario(rates), rates=rates)
    assert attainment > 0.99


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    ("units", "limits"), [(16, None), (7, MIG), (8, SliceLimits(sizes=(1, 2, 4, 8), aligned=True)), (1, None)], ids=str
)
def test_any_device_will_do(policy: str, units: int, limits: SliceLimits | None):
    rates = {"a": 30.0, "b": 20.0}
    attainment, log = played(policy, scenario(rates, units, limits), rates=rates)
    assert attainment > 0.97
    assert all(mask.bit_count() in (limits.sizes if limits and limits.sizes else range(1, units + 1)) for _, mask in log.runs)


@pytest.mark.parametrize("policy", ALL)
def test_batches_run_on_the_slice_their_instance_stands_on(policy: str):
    _, log = played(policy, scenario({"a": 60.0, "b": 40.0, "c": 20.0}))
    assert log.runs
    assert all(action.mask == home for action, home in log.runs)


def test_timesharing_cuts_nothing_and_takes_turns():
    rates = {"a": 20.0, "b": 20.0, "c": 20.0}
    _, log = played("timesharing", scenario(rates), rates=rates)
    whole = (1 << 100) - 1
    assert {mask for _, _, mask in log.homes.values()} == {whole}
    assert len({device for _, device, _ in log.homes.values()}) < len(log.homes)


def test_greedy_part_never_takes_turns():
    rates = {"a": 20.0, "b": 20.0, "c": 20.0}
    _, log = played("greedy_part", scenario(rates), rates=rates)
    assert not any(one[1] == other[1] and one[2] & other[2] for one, other in combinations(log.homes.values(), 2))


def test_gpulet_cuts_a_device_in_two_at_most():
    rates = {"a": 90.0, "b": 90.0, "c": 30.0}
    _, log = played("gpulet", scenario(rates), rates=rates)
    for place in ("d-0", "d-1"):
        assert len({mask for _, device, mask in log.homes.values() if device == place}) <= 2


def test_without_rates_it_finds_out():
    attainment, log = played("gpulet", replace(scenario({"a": 80.0, "b": 40.0}), duration_us=6_000_000))
    assert attainment > 0.9
    assert {function for function, _, _ in log.homes.values()} == {"a", "b"}


def test_a_plan_that_still_fits_is_left_alone():
    rates = {"a": 60.0, "b": 40.0}
    _, log = played("gpulet", scenario(rates), rates=rates)
    assert log.loads == len(log.homes)


def test_more_calls_lead_to_more_slices_without_a_gap():
    """Make before break: once warm, a function is never without a warm instance."""
    given = scenario({"a": 40.0, "b": 20.0}, gpus=4)
    ramp = Calls(target="a", segments=steps([(2_000_000, 40.0), (NEVER_US, 600.0)]), start_us=1_000_000)
    given = replace(given, loads=(ramp, given.loads[1]), duration_us=8_000_000)
    warm: dict[str, set[str]] = {"a": set(), "b": set()}
    functions: dict[str, str] = {}
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, InstanceReady):
            warm[functions[event.instance]].add(event.instance)
        for action in actions:
            if isinstance(action, Load):
                functions[action.instance] = action.function
            elif isinstance(action, Unload):
                warm[functions[action.instance]].discard(action.instance)
        for name, instances in warm.items():
            if now_us > 1_000_000:
                seen[name].append(len(instances))

    summary = run(given, "gpulet", {"period_us": 1_000_000, "rates": {"a": 40.0, "b": 20.0}}, watch=watch, check=True)
    assert len(functions) > 2  # it was changed
    assert all(min(counts) >= 1 for counts in seen.values())
    assert summary.total.attainment > 0.7  # the surge comes a period before its plan


def test_interference_that_is_foreseen_costs_no_deadlines():
    rates = {"a": 110.0, "b": 110.0}
    given = replace(scenario(rates, gpus=3), interference=BandwidthInterference({("a", "d"): 1.0, ("b", "d"): 1.0}, limit=0.6))
    blind, _ = played("gpulet", given, rates=rates, interference=False)
    aware, _ = played("gpulet", given, rates=rates)
    assert aware >= blind
    assert aware > 0.99


# ------------------------------------------------------------------ without a clock


def controller(policy: str, names: str = "a", **options: object) -> Controller:
    built = policies.build(policy, dict(options))
    made = new_controller(built, ProfileTable([profile(name, 100) for name in names]))
    made.handle(0, DeviceJoined(device()))
    return made


def deploy(made: Controller, names: str = "a") -> list[Action]:
    functions = tuple(
        FunctionSpec(name=name, max_batch=16, gpu="must", memory_mib=1000, slo=Slo(latency_us=200_000), scale=ScaleSpec(min=1))
        for name in names
    )
    return made.handle(0, Deployed(functions))


def only(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_rates_that_are_known_are_planned_for_at_once():
    loads = only(deploy(controller("gpulet", rates={"a": 50.0})), Load)
    assert [(action.function, action.mask.bit_count()) for action in loads] == [("a", 20)]  # type: ignore[attr-defined]


def test_a_batch_waits_for_its_round_or_its_size():
    made = controller("gpulet", rates={"a": 50.0})
    load = only(deploy(made), Load)[0]
    made.handle(1_000, InstanceReady(load.instance))  # type: ignore[attr-defined]
    slo = Slo(latency_us=200_000)
    first = made.handle(2_000, CallArrived(call_for("c0", "a", 2_000, slo)))
    assert not only(first, StartBatch)
    started: list[Action] = []
    number = 0
    while not started:
        number += 1
        started = only(made.handle(2_000 + number, CallArrived(call_for(f"c{number}", "a", 2_000 + number, slo))), StartBatch)
    assert 1 < len(started[0].jobs) <= 16  # type: ignore[attr-defined]
    made.state.check()


def test_a_lost_instance_is_loaded_again():
    made = controller("gpulet", rates={"a": 50.0})
    load = only(deploy(made), Load)[0]
    made.handle(1_000, InstanceReady(load.instance))  # type: ignore[attr-defined]
    made.handle(2_000, CallArrived(call_for("c0", "a", 2_000, Slo(latency_us=200_000))))
    again = made.handle(3_000, InstanceLost(load.instance))  # type: ignore[attr-defined]
    assert only(again, Load)
    made.state.check()


def test_a_new_device_is_planned_with():
    made = controller("timesharing", "ab", rates={"a": 200.0, "b": 200.0})
    first = only(deploy(made, "ab"), Load)
    second = only(made.handle(10, DeviceJoined(device(number=1))), Load)
    assert {action.device for action in first} == {"d-0"}  # type: ignore[attr-defined]
    assert {action.device for action in second} == {"d-1"}  # type: ignore[attr-defined]
    made.state.check()


def test_two_that_share_a_slice_have_all_of_its_time_between_them():
    made = controller("timesharing", "ab", rates={"a": 10.0, "b": 10.0})
    deploy(made, "ab")
    standing: Callable[[str], float] = lambda name: next(iter(made.state.functions[name].instances.values())).quota  # noqa: E731
    assert standing("a") + standing("b") == pytest.approx(1.0)
    assert all(instance.phase is InstancePhase.LOADING for instance in made.state.instances.values())
