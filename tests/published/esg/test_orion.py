"""Orion: sizes for the whole call before it begins."""

from __future__ import annotations

import pytest

from lamina.planner.deadline_split import series_parallel_runs, step_functions
from lamina.published.esg.policies import orion
from lamina.published.esg.preplanned_policy import LatencyDistribution
from tests.published.esg.test_esg import CHAIN, MS, TAKES, nodes
from tests.script import Script, a_function


def given(script: Script, units: int = 4, **options: object) -> orion.Policy:
    policy = orion.Policy(spread=0.0, **options)  # type: ignore[arg-type]
    functions = [a_function(name, max_batch=4) for name in "fg"]
    script.given(*functions, flows=[CHAIN], devices=nodes(1, units), policy=policy, takes=TAKES)
    return policy


@pytest.mark.parametrize("within_ms", [15, 20, 30, 40])
def test_the_plan_is_in_time_in_nineteen_of_twenty_cases(script: Script, within_ms: int):
    """Times vary by half: a plan whose median is in time would be late in many."""
    policy = orion.Policy(spread=0.5, batches=(1,))
    functions = [a_function(name, max_batch=4) for name in "fg"]
    script.given(*functions, flows=[CHAIN], devices=nodes(1, 8), policy=policy, takes=TAKES)
    script.at(0).arrives("c", target="w", within_us=within_ms * MS, expires_us=900 * MS)
    view = script.controller.view
    plan = policy.plan_steps(view, CHAIN, within_ms * MS)
    run = series_parallel_runs(CHAIN)
    spread = LatencyDistribution.log_normal(run, list(plan.steps), policy.spread, 2_000, seed=9)
    planned = {step: float(config.time_us) for step, config in plan.steps.items()}
    fastest = {step: float(policy._tables.tables[name].time_us.min()) for step, name in step_functions(CHAIN).items()}
    assert spread.quantile_us(fastest, 0.95) <= within_ms * MS, "it can be done"
    assert spread.quantile_us(planned, 0.94) <= within_ms * MS


def sizes(script: Script) -> list[tuple[str, int]]:
    return [(batch.function, batch.mask.bit_count()) for batch in script.batches]


def test_what_a_step_took_does_not_change_the_size_of_the_next(script: Script):
    given(script)
    for turn, took_ms in enumerate((5, 45)):
        script.at(turn * 100 * MS).arrives(f"c{turn}", target="w", within_us=60 * MS)
        script.at((turn * 100 + took_ms) * MS).finishes()
        script.finishes()
    assert sizes(script)[:2] == sizes(script)[2:]


def test_a_tighter_deadline_gets_faster_sizes(script: Script):
    given(script)
    script.at(0).arrives("loose", target="w", within_us=400 * MS)
    script.at(40 * MS).finishes(took_us=40 * MS)
    script.at(80 * MS).finishes(took_us=40 * MS)
    script.at(100 * MS).arrives("tight", target="w", within_us=40 * MS)
    loose, _, tight = (batch.mask.bit_count() for batch in script.batches)
    assert loose < tight


def test_a_search_that_is_cut_off_early_stays_at_small_sizes(script: Script):
    given(script, rounds=1)
    script.at(0).arrives("c", target="w", within_us=60 * MS, expires_us=900 * MS)
    assert script.batches[0].mask.bit_count() <= 2


def test_a_batch_that_the_queue_cannot_fill_is_a_miss(script: Script):
    """With 400 ms the plan is to run four at once; there is one."""
    policy = given(script)
    script.at(0).arrives("c", target="w", within_us=400 * MS)
    script.finishes()
    assert {name: policy.stats[name] for name in ("planned", "missed")} == {"planned": 2, "missed": 2}


def test_a_plan_that_could_be_followed_is_none(script: Script):
    policy = given(script, batches=(1,))
    script.at(0).arrives("c", target="w", within_us=400 * MS)
    script.finishes()
    assert policy.stats["planned"] == 2
    assert "missed" not in policy.stats


def test_having_to_wait_for_room_is_a_miss_too(script: Script):
    policy = given(script, units=1, batches=(1,))
    script.at(0).arrives("c", "d", target="w", within_us=400 * MS)
    script.at(40 * MS).finishes()
    assert (policy.stats["planned"], policy.stats["missed"]) == (2, 1)


def test_it_plans_with_the_95th_percentile_and_not_with_the_median():
    """Of steps whose times vary much, the median would be within the deadline on fewer units."""
    chosen = []
    for options in ({}, {"part": 0.5}):
        policy = orion.Policy(spread=0.3, batches=(1,), **options)  # type: ignore[arg-type]
        script = Script()
        functions = [a_function(name, max_batch=4) for name in "fg"]
        script.given(*functions, flows=[CHAIN], devices=nodes(1, 4), policy=policy, takes=TAKES)
        script.at(0).arrives("c", target="w", within_us=55 * MS, expires_us=900 * MS)
        chosen.append(script.batches[0].mask.bit_count())
    assert chosen[0] > chosen[1]
