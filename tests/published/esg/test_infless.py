"""INFless: a fixed share of the deadline per step."""

from __future__ import annotations

from lamina.core.workflow.flow import Flow, Task
from lamina.published.esg.policies import infless
from lamina.types import ScaleSpec
from tests.published.esg.test_esg import CHAIN, MS, TAKES, chain, nodes, parallel
from tests.script import Script, a_function


def given(script: Script, units: int = 4, **more: int) -> Script:
    functions = [a_function(name, max_batch=4, **more) for name in "fg"]
    return script.given(*functions, flows=[CHAIN], devices=nodes(1, units), policy=infless.Policy(), takes=TAKES)


def units(script: Script) -> list[int]:
    return [batch.mask.bit_count() for batch in script.batches]


def test_time_that_a_step_saved_is_not_passed_on(script: Script):
    """Each step has 25 of the 50 ms, whatever the one before it took; ESG gives the second one unit here."""
    given(script).at(0).arrives("c", target="w", within_us=50 * MS)
    script.at(5 * MS).finishes()
    assert units(script) == [2, 2]


def test_time_that_a_step_wasted_is_not_made_up_for(script: Script):
    given(script).at(0).arrives("c", target="w", within_us=100 * MS, expires_us=900 * MS)
    script.at(70 * MS).finishes()
    assert script.batches[-1].predicted_us > 30 * MS


def test_a_longer_function_has_a_larger_share(script: Script):
    """A quarter and three quarters of 40 ms: one unit is enough for both."""
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    takes = {"f": parallel(10 * MS), "g": parallel(30 * MS)}
    script.given(*(a_function(n) for n in "fg"), flows=[flow], devices=nodes(1), policy=infless.Policy(), takes=takes)
    script.at(0).arrives("c", target="w", within_us=40 * MS + 100)
    script.finishes()
    assert units(script) == [1, 1]


def test_the_largest_batch_that_is_there_and_in_time_is_taken(script: Script):
    script.given(a_function("f", max_batch=4), devices=nodes(1, 1), policy=infless.Policy(), takes=TAKES)
    script.at(0).arrives("busy", within_us=900 * MS)
    script.arrives("x", "y", "z", within_us=85 * MS)
    script.finishes()
    assert [len(batch.jobs) for batch in script.batches] == [1, 3]


def test_where_the_input_is_does_not_matter(script: Script):
    """Two nodes; the step before ran on one of them, and the other has less room left."""
    functions = [a_function(name, scale=ScaleSpec(min=2)) for name in "fgx"]
    takes = TAKES | {"x": 900 * MS}
    script.given(*functions, flows=[CHAIN], devices=nodes(2, 4), policy=infless.Policy(), takes=takes)
    script.at(0).arrives("c", target="w", within_us=200 * MS)
    script.arrives("x1", "x2", target="x", within_us=2_000 * MS)
    crowded = script.batches[-1].device
    script.at(30 * MS).finishes()
    assert script.batches[-1].device == crowded


def test_esg_is_different_here(script: Script):
    chain(script).at(0).arrives("c", target="w", within_us=50 * MS)
    script.at(5 * MS).finishes()
    assert units(script) == [2, 1]
