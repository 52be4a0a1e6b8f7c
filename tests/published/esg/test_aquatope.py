"""Aquatope: one configuration per step for ever, found off line."""

from __future__ import annotations

from lamina.published.esg.policies import aquatope
from tests.published.esg.test_esg import CHAIN, MS, TAKES, nodes
from tests.script import Script, a_function


def given(script: Script, **options: object) -> aquatope.Policy:
    policy = aquatope.Policy(**options)  # type: ignore[arg-type]
    functions = [a_function(name, max_batch=4) for name in "fg"]
    script.given(*functions, flows=[CHAIN], devices=nodes(1), policy=policy, takes=TAKES)
    return policy


def plan(script: Script) -> list[tuple[str, int]]:
    script.at(0).arrives("c", target="w", within_us=60 * MS)
    script.finishes()
    return [(batch.function, batch.mask.bit_count()) for batch in script.batches]


def test_the_plan_it_finds_is_in_time(script: Script):
    given(script)
    plan(script)
    assert sum(batch.predicted_us for batch in script.batches) <= 1.1 * 60 * MS


def test_every_call_gets_the_same(script: Script):
    given(script)
    first = plan(script)
    script.finishes()
    script.at(200 * MS).arrives("d", target="w", within_us=60 * MS)
    script.at(220 * MS).finishes()
    assert [(batch.function, batch.mask.bit_count()) for batch in script.batches] == first * 2


def test_it_is_worked_out_once_with_as_many_trials_as_it_may_make(script: Script):
    policy = given(script)
    plan(script)
    script.at(100 * MS).arrives("d", target="w", within_us=60 * MS)
    assert policy.stats["trials"] == 10 + 20 * 3


def test_the_same_seed_finds_the_same_plan():
    found = []
    for seed in (1, 1):
        script = Script()
        given(script, seed=seed)
        found.append(plan(script))
    assert found[0] == found[1]
