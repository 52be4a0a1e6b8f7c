"""As many in time as with any other general policy, at no higher cost: on small versions of what the lab measures."""

from __future__ import annotations

from functools import cache

import pytest

from lamina.sim import scenario
from lamina.sim.run import run
from lamina.sim.summary import Summary, TotalRow

pytestmark = pytest.mark.slow

HEAD = '[scenario]\nseed = 4\nduration = "3s"\n[[device]]\nkind = "h200"\nprice = "3.60/h"\n'


def a_function(name: str, base_ms: float, slo: str = "", scale: str = "{ min = 1 }") -> str:
    """A launch cost and a cost per item; more units help, the less the more there are."""
    batches = (1, 4, 8, 16)
    rows = "\n".join(
        f"p50_ms.{units} = {[round(base_ms * (0.35 + 0.65 * batch) / units**0.8 + 0.1 * base_ms, 3) for batch in batches]}"
        for units in (1, 2, 4, 8, 16)
    )
    goal = f'slo = "{slo}"\n' if slo else ""
    return (
        f'[[function]]\nname = "{name}"\nmax_batch = 16\nshare = "1/8"\nmemory = "1GiB"\n{goal}scale = {scale}\nload = "500ms"\n'
        f"[function.profile.h200]\nbatch = {list(batches)}\n{rows}\n"
    )


def a_load(target: str, rate: float, cv: float = 1.0, start: str = "1s") -> str:
    return f'[[load]]\ntarget = "{target}"\nshape = "gamma"\nrate = {rate}\ncv = {cv}\nstart = "{start}"\n'


def a_chain(slo: str, rate: float) -> str:
    steps = f'[[workflow]]\nname = "chain"\nslo = "{slo}"\n' + "".join(
        f'[[workflow.step]]\nname = "s{i}"\nfunction = "s{i}"\n' + (f'after = ["s{i - 1}"]\n' if i else "") for i in range(3)
    )
    return HEAD + "".join(a_function(f"s{i}", base) for i, base in enumerate((4, 8, 6))) + steps + a_load("chain", rate)


def zipf(total: float, count: int = 8) -> str:
    weights = [1 / (place + 1) for place in range(count)]
    goals = ("30ms", "60ms", "120ms", "200ms")
    functions = "".join(a_function(f"f{i}", (1.5, 3, 6, 10)[i % 4], goals[i % 4]) for i in range(count))
    return HEAD + functions + "".join(a_load(f"f{i}", total * w / sum(weights)) for i, w in enumerate(weights))


CASES = {
    "one function": HEAD + a_function("f", 5, "60ms") + a_load("f", 800),
    "hardly any load": HEAD + a_function("f", 5, "60ms") + a_load("f", 10),
    "bursts": HEAD + a_function("f", 5, "60ms") + a_load("f", 800, cv=4.0),
    "a third too much": HEAD + a_function("f", 4, "60ms") + a_load("f", 7_000),
    "a mixture, too much of it": HEAD
    + a_function("light", 2, "30ms")
    + a_function("middling", 8, "60ms")
    + a_function("heavy", 20, "200ms")
    + a_load("light", 4_000)
    + a_load("middling", 1_200)
    + a_load("heavy", 500),
    "a chain, strict": a_chain("22ms", 200),
    "a chain, relaxed": a_chain("200ms", 400),
    "a chain, too much": a_chain("100ms", 2_000),
    "many functions": zipf(1_200),
    "from zero": HEAD + a_function("f", 5, "2s", scale='{ min = 0, idle = "500ms" }') + a_load("f", 2, start="0s"),
}


@cache
def summary(case: str, policy: str) -> Summary:
    return run(scenario.parse(CASES[case]), policy, check=policy == "frontier" and case != "a third too much")


def total(case: str, policy: str) -> TotalRow:
    return summary(case, policy).total


def by_target(case: str, policy: str) -> list[float]:
    return [row.attainment for row in summary(case, policy).targets]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["edf", "fifo"])
@pytest.mark.parametrize("case", CASES)
def test_no_fewer_are_in_time(case: str, other: str):
    assert total(case, "frontier").attainment >= total(case, other).attainment - 0.005


@pytest.mark.parametrize("other", ["edf", "fifo"])
@pytest.mark.parametrize("case", CASES)
def test_an_answer_in_time_costs_no_more(case: str, other: str):
    """An equal part of the calls of each target: those of one may be ten times the work of another's."""
    ours, others = (total(case, policy).cost / sum(by_target(case, policy)) for policy in ("frontier", other))
    assert ours <= 1.02 * others


def test_small_slices_and_full_batches_save_a_third():
    assert total("one function", "frontier").cost < 0.67 * total("one function", "edf").cost


def test_when_there_is_too_much_none_is_starved_for_the_others():
    """All three ask for about the same work. `edf` serves a third of one and three quarters of another."""
    ours, edf = (by_target("a mixture, too much of it", policy) for policy in ("frontier", "edf"))
    assert min(ours) > 0.62 and min(ours) > 1.5 * min(edf)
    assert sum(ours) > 1.1 * sum(edf)
