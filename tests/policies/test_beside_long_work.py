"""Promises beside any neighbour: short SLOs beside long work, and calls with time to spare under overload."""

from __future__ import annotations

import pytest

from lamina.core.events import CallArrived
from lamina.lab.experiments import has
from lamina.policies import frontier
from lamina.policies.frontier import explain
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.types import DeviceSpec, SliceLimits, Slo, call_for
from tests.script import Script
from tests.script import a_function as a_spec

HEAD = '[scenario]\nseed = {seed}\nduration = "8s"\n[[device]]\nkind = "h200"\nprice = "3.60/h"\nowned = true\n'


def a_function(name: str, share: str, slo: str, max_batch: int, profile: str) -> str:
    goal = f'slo = "{slo}"\n' if slo else ""
    return (
        f'[[function]]\nname = "{name}"\nmax_batch = {max_batch}\nshare = "{share}"\nmemory = "1GiB"\n{goal}'
        f'scale = {{ min = 1 }}\nload = "300ms"\n[function.profile.h200]\n{profile}\n'
    )


def a_load(target: str, rate: float) -> str:
    return f'[[load]]\ntarget = "{target}"\nshape = "poisson"\nrate = {rate}\nstart = "1s"\n'


INTERACTIVE = a_function(
    "interactive", "1/4", "25ms", 16, "batch = [1, 4, 16]\np50_ms.3 = [1.5, 2.2, 5.2]\np50_ms.15 = [0.9, 1.0, 1.7]"
)
LONG = a_function("long", "1/2", "", 1, "batch = [1]\np50_ms.7 = [260]")
STEPS = (("detect", "5.7, 12.5", "2.8, 6.1"), ("read", "9.1, 20", "4.4, 9.7"))
TWINS = [a_function(name, "1/2", "60s", 1, "batch = [1]\np50_ms.7 = [40]\np50_ms.15 = [20]") for name in ("left", "right")]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_an_interactive_function_keeps_its_slo_beside_long_batches_that_would_fill_the_device(seed: int) -> None:
    text = HEAD.format(seed=seed) + INTERACTIVE + LONG + a_load("interactive", 400) + a_load("long", 12)
    summary = run(scenario.parse(text), "frontier")
    by_target = {row.target: row for row in summary.targets}
    assert by_target["interactive"].attainment >= 0.99
    assert by_target["long"].answered == by_target["long"].offered  # all of it is done, later


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["edf", "knix"])
def test_others_that_claim_to_keep_slos_leave_an_interactive_function_a_way_to_start_too(policy: str) -> None:
    text = HEAD.format(seed=1) + INTERACTIVE + LONG + a_load("interactive", 200) + a_load("long", 12)
    by_target = {row.target: row for row in run(scenario.parse(text), policy).targets}
    assert by_target["interactive"].attainment >= 0.99  # 1 and 12 % without the rule
    assert by_target["long"].answered == by_target["long"].offered


@pytest.mark.parametrize(("policy", "least"), [("frontier", 0.97), ("edf", 0.9)])
@pytest.mark.parametrize("long_slo", ["", "3s"])
def test_a_workflow_keeps_its_slo_beside_long_batches_though_its_functions_state_none(
    policy: str, least: float, long_slo: str
) -> None:
    """4 and 0 % before: nothing was kept for its steps, and work on other units counted as ahead of it."""
    rows = "batch = [1, 4]\np50_ms.{} = [{}]\np50_ms.{} = [{}]"
    parts = [a_function(name, "1/4", "", 4, rows.format(3, times, 15, fast)) for name, times, fast in STEPS]
    long = a_function("long", "1/2", long_slo, 1, "batch = [1]\np50_ms.1 = [600]\np50_ms.7 = [190]\np50_ms.15 = [140]")
    page = '[[workflow]]\nname = "page"\nslo = "60ms"\nstep = [{ name = "a", function = "detect" }, '
    page += '{ name = "b", function = "read", after = ["a"] }]\n'
    callers = '[[load]]\ntarget = "long"\nshape = "closed"\nclients = 4\nstart = "1s"\n'
    text = HEAD.format(seed=1) + "".join(parts) + long + page + a_load("page", 60) + callers
    by_target = {row.target: row for row in run(scenario.parse(text), policy).targets}
    assert by_target["page"].attainment >= least
    assert by_target["long"].attainment == 1.0 and by_target["long"].answered >= 30


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_overload_no_call_with_time_to_spare_is_rejected(seed: int) -> None:
    """Two equal functions at twice the capacity, with an SLO of a minute: whatever comes in eight seconds can be done by then."""
    text = HEAD.format(seed=seed) + "".join(TWINS) + a_load("left", 50) + a_load("right", 50)
    summary = run(scenario.parse(text), "frontier")
    assert [row.attainment for row in summary.targets] == [1.0, 1.0]


def test_a_function_that_needs_the_whole_device_takes_turns_with_an_interactive_one() -> None:
    """Nothing fits beside it, so it would never start: it gets a part of the time, and the interactive one most of it."""
    whole = a_function("whole", "1", "", 1, "batch = [1]\np50_ms.15 = [100]")
    text = HEAD.format(seed=1) + INTERACTIVE + whole + a_load("interactive", 200) + a_load("whole", 1)
    by_target = {row.target: row for row in run(scenario.parse(text), "frontier").targets}
    assert by_target["whole"].answered == by_target["whole"].offered
    assert by_target["interactive"].attainment >= 0.8


def test_without_a_goal_a_function_uses_what_is_left_of_the_device_beside_an_interactive_one():
    """It asks for half: one such slice beside what is kept leaves five units, and on those it is done sooner than by waiting."""
    long = a_function("long", "1/2", "", 1, "batch = [1]\np50_ms.3 = [600]\np50_ms.7 = [300]\np50_ms.15 = [180]")
    callers = '[[load]]\ntarget = "long"\nshape = "closed"\nclients = 3\nstart = "1s"\n'
    by_target = {
        row.target: row
        for row in run(
            scenario.parse(HEAD.format(seed=2) + INTERACTIVE + long + a_load("interactive", 200) + callers), "frontier"
        ).targets
    }
    assert by_target["interactive"].attainment >= 0.995
    assert by_target["long"].answered >= 41  # in seven seconds; 37 where it was given single units behind running batches


@pytest.mark.published
def test_on_a_nearly_idle_device_a_function_that_needs_most_of_it_is_not_kept_out_for_calls_that_hardly_come() -> None:
    """Four models on one V100, at SLOs of twice their time: the largest is in time on nearly all units only."""
    cell = has._setting("four models", "mix", 2.0, times=2, gpus=1, seconds=10) | {"policy": "frontier", "seed": 2}
    rows = run(has.scenario_of(cell), "frontier").targets
    assert [row.target for row in rows if row.attainment < 0.99] == []


def test_a_function_waits_for_the_blocking_rule_only_if_units_were_kept_from_itself(script: Script) -> None:
    """In one event units are kept from a long batch, and another function waits for its own batch to end."""
    limits = SliceLimits(batches_per_instance=1, sizes=(2, 4, 6))
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=limits)
    hasty = a_spec("hasty", share=0.75, slo=Slo(latency_us=50_000))
    long = a_spec("long", share=0.5, slo=Slo(latency_us=900_000))
    busy = a_spec("busy", share=0.25, slo=Slo(latency_us=1_000_000))
    takes = {"hasty": 10_000, "long": lambda batch, units: 300_000 if units == 4 else 3_000_000, "busy": 30_000}
    script.given(hasty, long, busy, devices=[device], policy=frontier.Policy(), takes=takes)
    script.at(500_000).arrives("b1", target="busy", within_us=1_000_000)
    script.tell(CallArrived(call_for("b2", "busy", 500_000, busy.slo), more_coming=True))
    script.tell(CallArrived(call_for("l", "long", 500_000, long.slo)))
    deferred = script.controller.state.deferred
    assert {name: one.why for name, one in deferred.items()} == {"long": explain.BLOCKED, "busy": explain.NO_SLOT}
    assert deferred["long"].until_us < 700_000, "others may need less soon"
    assert deferred["busy"].until_us > 520_000, "and for this one nothing changes before its batch ends"
