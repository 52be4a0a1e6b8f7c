"""Objectives: the same calls under `deadline`, `latency`, `cost` and `throughput`."""

from __future__ import annotations

import pytest

from lamina.errors import BadScenario, BadValue
from lamina.sdk.app import App
from lamina.sdk.client_codec import CallOptions, ServerAddress, call_request
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.sim.summary import Summary, TargetRow

HEAD = '[scenario]\nseed = 1\nduration = "6s"\n[[device]]\nkind = "h200"\nprice = "3.60/h"\n'


def a_function(name: str, ms: float, slo: str, objective: str = "", most: int = 16, share: str = "1/4") -> str:
    goal = f'slo = "{slo}"\n' if slo else ""
    aim = f'objective = "{objective}"\n' if objective else ""
    rows = "".join(
        f"p50_ms.{units} = {[round(ms * (0.7 + 0.3 * batch) * (0.2 + 0.8 * 4 / units), 3) for batch in (1, 4, 16)]}\n"
        for units in (1, 2, 4, 8, 15)
    )
    return (
        f'[[function]]\nname = "{name}"\nmax_batch = {most}\nshare = "{share}"\nmemory = "1GiB"\n{goal}{aim}'
        f'scale = {{ min = 1 }}\nload = "100ms"\n[function.profile.h200]\nbatch = [1, 4, 16]\n{rows}'
    )


def a_load(target: str, rate: float, objective: str = "") -> str:
    aim = f'objective = "{objective}"\n' if objective else ""
    return f'[[load]]\ntarget = "{target}"\nrate = {rate}\nstart = "1s"\n{aim}'


def row(text: str, target: str = "f") -> TargetRow:
    summary: Summary = run(scenario.parse(HEAD + text), "frontier")
    return next(one for one in summary.targets if one.target == target)


def aimed_at(objective: str, slo: str = "200ms") -> TargetRow:
    return row(a_function("f", 10, slo, objective) + a_load("f", 100))


def test_in_time_whatever_the_objective():
    assert all(aimed_at(objective).attainment == 1.0 for objective in ("deadline", "latency", "cost", "throughput"))


def test_latency_answers_sooner_and_cost_is_cheaper_than_deadline():
    latency, deadline, cost = (aimed_at(objective) for objective in ("latency", "deadline", "cost"))
    assert latency.mean_ms < 0.5 * deadline.mean_ms
    assert cost.cost <= 1.01 * deadline.cost < latency.cost


def test_throughput_waits_for_no_more_jobs_than_pay():
    assert aimed_at("throughput").mean_ms < aimed_at("cost").mean_ms


def test_a_call_may_have_another_objective_than_its_function():
    by_call = row(a_function("f", 10, "200ms", "cost") + a_load("f", 100, "latency"))
    assert by_call.mean_ms == aimed_at("latency").mean_ms


def test_without_a_goal_the_shortest_work_is_served_first():
    """Calls of 200 and of 10 ms that both want all of the device, a little more than it can do: in any other order the short ones
    would wait for the long ones."""
    functions = a_function("long", 300, "", most=1, share="1") + a_function("short", 15, "", most=1, share="1")
    text = functions + a_load("long", 3) + a_load("short", 60)
    assert row(text, "short").mean_ms < 150
    assert row(text, "long").answered == row(text, "long").offered


def lent(objective: str) -> tuple[TargetRow, TargetRow]:
    """A small function that always has a call under way, and a large one whose home is lent to it."""
    times = {"small": (41, 21.8, 12.3, 7.3, 4.7), "large": (204, 109, 61.2, 36.3, 23.4)}
    text = ""
    for (name, ms), units in zip(times.items(), (1, 14), strict=True):
        rows = "".join(f"p50_ms.{size} = [{one}]\n" for size, one in zip((1, 2, 4, 8, 15), ms, strict=True))
        more = f'objective = "{objective}"\n' + ("home = true\n" if name == "large" else "")
        text += (
            f'[[function]]\nname = "{name}"\nmax_batch = 1\nshare = {units / 15}\nmemory = "1GiB"\nslo = "5s"\n{more}'
            f'scale = {{ min = 1, max = 1 }}\nload = "10ms"\n[function.profile.h200]\nbatch = [1]\n{rows}'
        )
    text += '[[load]]\ntarget = "small"\nshape = "closed"\nclients = 1\n' + a_load("large", 15)
    return row(text, "small"), row(text, "large")


def test_for_the_least_latency_a_job_waits_for_more_units_if_it_is_done_sooner():
    """The large one comes while its home is lent, for five milliseconds: on the unit that is free it would take ten times as long
    as it does once they are over."""
    small, large = lent("latency")
    assert large.mean_ms < 1.5 * 26 and large.answered == large.offered
    assert small.mean_ms < 0.5 * 41


def test_for_the_least_latency_a_crowd_is_not_served_one_by_one_on_the_whole_device():
    """A call takes 4 ms on all units and 34 on one. Of 350 a second fifteen at once are served in time, one after another not."""
    found = row(a_function("f", 10, "1s", "latency", most=1) + a_load("f", 350))
    assert found.attainment > 0.99


def test_an_objective_is_checked_wherever_it_is_stated():
    with pytest.raises(BadValue, match="objective: 'speed' is no objective"):
        App("a").function(objective="speed")  # type: ignore[arg-type]
    with pytest.raises(BadScenario, match="none of deadline, latency, cost, throughput"):
        scenario.parse(HEAD + a_function("f", 10, "200ms", "speed") + a_load("f", 1))
    server = ServerAddress("localhost", 8700, False, "", "")
    with pytest.raises(BadValue, match="objective"):
        call_request(server, "functions", "f", {}, CallOptions(objective="speed"))
    assert call_request(server, "functions", "f", {}, CallOptions(objective="cost")).headers["lamina-objective"] == "cost"
