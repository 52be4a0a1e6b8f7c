"""Simulation of a scenario: build controller and executor, drive them, summarise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lamina import policies
from lamina.core.actions import Action
from lamina.core.controller import Controller
from lamina.core.events import Deployed, DeviceJoined, Event, TenantUpdated
from lamina.core.policy import DispatchRole, Predictor
from lamina.drivers.driver import Ending, EventObserver
from lamina.drivers.virtual import simulate
from lamina.policies import new_controller
from lamina.predict.online import OnlinePredictor as Online
from lamina.predict.profile_table import ProfileTable
from lamina.sim.decision_charge import DecisionCharge
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.sim.report import ProgressCallback, Report
from lamina.sim.scenario import Scenario
from lamina.sim.summary import Summary
from lamina.sim.workload import ClosedLoopClients, Workload, merge_calls
from lamina.types import NEVER_US, Call, Slo


def generate_calls(scenario: Scenario) -> Iterable[Call]:
    """Calls in order of arrival. Each workload has its own random stream: changing one leaves the others alone."""
    calls = merge_calls(_loads(scenario), scenario.duration_us)
    return islice(calls, scenario.calls) if scenario.calls else calls


def _loads(scenario: Scenario) -> list[tuple[Workload, Slo, random.Random]]:
    return [
        (load, scenario.slo_of(load.target), random_stream(scenario.seed, f"load/{place}/{load.target}"))
        for place, load in enumerate(scenario.loads)
    ]


def random_stream(seed: int, name: str) -> random.Random:
    """Random stream for one purpose. A text as seed is hashed, so that neighbouring seeds have nothing in common."""
    return random.Random(f"{seed}/{name}")


def build_controller(scenario: Scenario, *, explain: bool = False) -> Controller:
    """A fresh controller as this scenario wants it: policy and predictor, and nothing deployed yet."""
    table = ProfileTable(list(scenario.profiles), scenario.margin, scenario.interference)
    predictor: Predictor = Online(table) if scenario.predictor == "online" else table
    return new_controller(policies.build(scenario.policy, scenario.options), predictor, explain=explain)


def setup_events(scenario: Scenario) -> list[Event]:
    joined: list[Event] = [DeviceJoined(device) for device in scenario.devices]
    limits: list[Event] = [TenantUpdated(tenant) for tenant in scenario.tenants]
    return [*joined, *limits, Deployed(functions=scenario.functions, flows=scenario.flows)]


def build_executor(scenario: Scenario, controller: Controller) -> SimulatedExecutor:
    table = ProfileTable(list(scenario.profiles), margin=scenario.margin)
    return SimulatedExecutor(
        controller,
        HardwareModel(
            table,
            random_stream(scenario.seed, "world"),
            scenario.noise,
            interference=scenario.interference,
            ways=scenario.ways,
            segments_us=scenario.segments_us,
        ),
        seed=scenario.seed,
        boot_us=scenario.boot_us,
        templates=scenario.templates,
        spare_devices=dict(scenario.spare_devices),
    )


def run(
    scenario: Scenario,
    policy: str | None = None,
    options: dict[str, Any] | None = None,
    *,
    seed: int | None = None,
    calls: int | None = None,
    faults: Iterable[tuple[int, Event]] = (),
    progress: ProgressCallback | None = None,
    watch: EventObserver | None = None,
    check: bool = False,
    explain: bool = False,
    on_policy: Callable[[DispatchRole], None] | None = None,
    on_end: Callable[[int, Ending], None] | None = None,
    decisions: DecisionCharge | None = None,
) -> Summary:
    """Simulate until every call has ended. What is given here takes the place of what the scenario says.

    `watch` sees every event with its actions (an event log, say); `check` tests every invariant after every event;
    `explain` has the policy say what it weighed, for such a log.
    `on_policy` is given the policy when all is over: some keep counts of their own. `on_end` sees every ending.
    With `decisions`, the time the controller takes for an event is part of the simulation; else it decides in no time.
    """
    scenario = _with_overrides(scenario, policy, options, seed, calls)
    controller = build_controller(scenario, explain=explain)
    executor = build_executor(scenario, controller)
    report = Report(_slos(scenario), progress)
    clients = ClosedLoopClients(_loads(scenario), scenario.duration_us)

    def arrivals() -> Iterator[Call]:
        for call in report.observe_calls(generate_calls(scenario)):
            clients.observe(call)
            yield call

    def follow_up(now_us: int, ending: Ending) -> Call | None:
        call = clients.follow_up(now_us, ending)
        if call is not None:
            report.observe_call(call)
        return call

    def ended(now_us: int, ending: Ending) -> None:
        report.on_end(now_us, ending)
        if on_end is not None:
            on_end(now_us, ending)

    ended_us = simulate(
        controller,
        executor,
        arrivals() if clients else report.observe_calls(generate_calls(scenario)),
        setup=setup_events(scenario),
        faults=faults,
        on_end=report.on_end if on_end is None else ended,
        watch=_checking(controller, watch) if check else watch,
        charged=partial(decisions.handle, controller) if decisions is not None else None,
        follow_up=follow_up if clients else None,
        until_us=scenario.duration_us,
    )
    assert not report.unanswered, f"{report.unanswered} calls never ended"
    controller.state.check_quiet()
    if on_policy is not None:
        on_policy(controller.policy)
    return report.summary(
        scenario.name,
        Path(scenario.policy).stem,
        scenario.seed,
        executor.accounting,
        offered_us=_offered_us(scenario, report),
        ended_us=ended_us,
    )


def _with_overrides(
    scenario: Scenario, policy: str | None, options: dict[str, Any] | None, seed: int | None, calls: int | None
) -> Scenario:
    if policy is not None and policy != scenario.policy:
        scenario = replace(scenario, policy=policy, options={})
    return replace(
        scenario,
        options=scenario.options | (options or {}),
        seed=scenario.seed if seed is None else seed,
        calls=scenario.calls if calls is None else calls,
    )


def _slos(scenario: Scenario) -> dict[str, Slo]:
    """By target; of several loads of one, the first says it."""
    slos: dict[str, Slo] = {}
    for load in scenario.loads:
        slos.setdefault(load.target, load.slo or scenario.slo_of(load.target))
    return slos


def _checking(controller: Controller, watch: EventObserver | None) -> EventObserver:
    def checked(now_us: int, event: Event, actions: list[Action]) -> None:
        controller.state.check()
        if watch is not None:
            watch(now_us, event, actions)

    return checked


def _offered_us(scenario: Scenario, report: Report) -> int:
    """For how long calls came: as long as the scenario says, unless it ran out of them."""
    starts_us = min((load.start_us for load in scenario.loads), default=0)
    ran_out = scenario.duration_us >= NEVER_US or (scenario.calls and report.offered >= scenario.calls)
    return (report.last_us if ran_out else scenario.duration_us) - starts_us
