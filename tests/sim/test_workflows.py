from __future__ import annotations

from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.sim.scenario import Scenario, parse

from .conftest import PAGES, SMALL


def flow_of(steps: str) -> Flow:
    return parse(SMALL + PAGES[: PAGES.index("[[workflow.step]]")] + steps).flows[0]


def test_a_chain_hands_over_one_token():
    flow = flow_of('step = [{ function = "a" }, { function = "b", after = ["a"] }]')
    assert flow.start == ("a",)
    assert flow.nodes == {"a": Task("a", "a", ("b",)), "b": Task("b", "b")}


def test_a_join_waits_for_all_before_it():
    flow = flow_of('step = [{ function = "a" }, { function = "b" }, { name = "end", after = ["a", "b"] }]')
    assert flow.start == ("a", "b")
    assert flow.nodes["end"] == Pass("end", (), 2)


def test_what_follows_a_choice_waits_for_the_branch_that_was_taken_and_no_other():
    flow = flow_of(
        'step = [{ name = "way", choice = [{ odds = 1, steps = [{ function = "a" }, { name = "a2", function = "a" }] },'
        ' { odds = 3 }] }, { function = "b", after = ["way"] }]'
    )
    assert flow.nodes["way"] == Choice("way", (("a", "a2"), ("way.end",)), 1, (1.0, 3.0))
    assert flow.nodes["way.end0"] == Pass("way.end0", ("way.end",), 2)
    assert flow.nodes["way.end"] == Pass("way.end", ("b",))
    assert flow.nodes["b"].tokens_needed == 1


def test_a_choice_at_the_end_needs_no_join():
    flow = flow_of('step = [{ name = "way", choice = [{ odds = 1, steps = [{ function = "a" }] }, { odds = 3 }] }]')
    assert flow.nodes.keys() == {"way", "a"}


def test_an_each_has_a_flow_of_its_own(pages: Scenario):
    each = pages.flows[0].nodes["parts"]
    assert isinstance(each, Each)
    assert (each.expected_items, each.body.start) == (3.0, ("look",))
    assert each.body.functions == ("b", "a")
