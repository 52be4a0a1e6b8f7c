"""Closed-loop clients and charged decisions: what an open load in a controller that decides in no time cannot show."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from lamina.core.actions import Reply
from lamina.drivers.driver import Ending
from lamina.errors import BadScenario
from lamina.sim import scenario
from lamina.sim.decision_charge import DecisionCharge
from lamina.sim.run import run
from lamina.sim.scenario import Scenario

WORLD = """
[scenario]
seed = 1
noise = 0.0
{limit}
[[device]]
kind = "h200"
units = 1
[[function]]
name = "f"
share = "100%"
memory = "1GiB"
slo = {{ latency = "{slo}", on_miss = "serve" }}
scale = {{ min = 1, max = 1 }}
load = "1ms"
profile.h200 = {{ batch = [1], p50_ms = {{ 1 = [10] }} }}
[[load]]
target = "f"
{load}
start = "100ms"
"""


def world(load: str, *, limit: str = 'duration = "1100ms"', slo: str = "10s") -> Scenario:
    return scenario.parse(WORLD.format(load=load, limit=limit, slo=slo))


def test_clients_ask_again_as_soon_as_they_are_answered():
    total = run(world('shape = "closed"\nclients = 3'), "fifo", check=True).total
    assert total.in_time == total.offered == 102  # a second of calls of 10 ms, and two more that waited when it was over
    assert total.utilisation > 0.85


def test_clients_think_between_an_answer_and_the_next_call():
    rows = [run(world(f'shape = "closed"\nclients = 1\nthink = "{ms}ms"'), "fifo").total for ms in (0, 40)]
    assert rows[0].offered == 100
    assert 12 <= rows[1].offered <= 32  # a call every 50 ms


def test_a_client_that_is_turned_away_waits_before_it_asks_again():
    total = run(_hopeless(), "frontier").total
    assert 0 < sum(total.refused.values()) <= 4 * 101


def _hopeless() -> Scenario:
    """No call can be in time, and a late one is worth nothing."""
    return scenario.parse(
        WORLD.format(load='shape = "closed"\nclients = 4', limit='duration = "1100ms"', slo="5ms").replace("serve", "shed")
    )


def test_the_same_seed_gives_the_same_run():
    world_ = world('shape = "closed"\nclients = 5\nthink = "7ms"')
    assert run(world_, "edf") == run(world_, "edf")


def test_clients_without_a_duration_are_refused_because_they_never_stop():
    with pytest.raises(BadScenario, match="never end"):
        world('shape = "closed"\nclients = 3', limit="calls = 100")


def test_open_and_closed_loads_share_a_device():
    text = WORLD.format(load='shape = "closed"\nclients = 1', limit='duration = "1100ms"', slo="10s")
    both = scenario.parse(text + '[[load]]\ntarget = "f"\nrate = 20\ntenant = "open"\n')
    assert run(both, "fifo").total.offered > 60


# ------------------------------------------------------------------ decisions that take time


def clock(step_us: int):  # type: ignore[no-untyped-def]
    """Every decision takes this long: the clock is read once before and once after."""
    ticks = count()
    return lambda: ((next(ticks) + 1) // 2) * step_us * 1_000


def test_a_slow_controller_makes_calls_late_and_a_fast_one_does_not():
    made = world('shape = "poisson"\nrate = 50', slo="40ms")
    free = run(made, "fifo").total.attainment
    assert run(made, "fifo", decisions=DecisionCharge(clock_ns=clock(1))).total.attainment == pytest.approx(free, abs=0.03)
    assert run(made, "fifo", decisions=DecisionCharge(clock_ns=clock(30_000))).total.attainment < free - 0.3


def test_events_wait_for_the_decision_before_them():
    """Two events a call of 3 ms each: a second can hold no more than 166 calls, however fast the device is."""
    fast = scenario.parse(
        WORLD.format(load='shape = "poisson"\nrate = 400', limit='duration = "1100ms"', slo="50ms").replace("[10]", "[0.01]")
    )
    charge = DecisionCharge(clock_ns=clock(3_000))
    ended: list[int] = []

    def on_end(now_us: int, ending: Ending) -> None:
        if isinstance(ending, Reply):
            ended.append(now_us)

    total = run(fast, "fifo", decisions=charge, on_end=on_end).total
    assert total.attainment < 0.6
    assert min(after - before for before, after in pairwise(ended)) >= 3_000
    assert charge.total_us == pytest.approx(3_000 * len(charge.times_us))
    assert charge.quantile_us(0.5) == 3_000


def test_less_than_a_microsecond_is_carried_over_not_lost():
    ticks = count()
    charge = DecisionCharge(clock_ns=lambda: next(ticks) * 250)
    run(world('shape = "poisson"\nrate = 50'), "fifo", decisions=charge)
    assert charge.total_us == pytest.approx(0.25 * len(charge.times_us))
    assert charge._rest_us < 1
