"""State machines: no document and no data makes a server hold more than the language allows, or keep others waiting (H8)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import encoding
from lamina.asl.compile import compile_flow
from lamina.asl.errors import StateError
from lamina.asl.evaluation import DATA_LIMIT_BYTES, Evaluation, EvaluationBudget
from lamina.asl.intrinsics import ExpressionScope, evaluate, parse_call
from lamina.asl.paths import parse_path
from lamina.asl_local_run import LocalStateMachine
from lamina.drivers import realtime

ONES = [1] * 100_000


def machine(states: dict[str, Any], start: str = "A") -> Any:
    return compile_flow({"StartAt": start, "States": states}, "machine", lambda resource: (resource, None))


def outcome(states: dict[str, Any], given: Any, **tasks: Any) -> tuple[str, Any]:
    """Error, or "" and the result."""
    ended = LocalStateMachine(machine(states), tasks).run(given)
    return (ended.error, None) if ended.error else ("", ended.output)


def loop(template: dict[str, Any]) -> dict[str, Any]:
    return {
        "A": {"Type": "Pass", "Parameters": template, "Next": "B"},
        "B": {"Type": "Choice", "Choices": [{"Variable": "$.never", "IsPresent": True, "Next": "C"}], "Default": "A"},
        "C": {"Type": "Succeed"},
    }


@pytest.mark.parametrize(
    "template",
    [
        {"s.$": "States.Format('{}{}', $.s, $.s)"},
        {"s.$": "States.Array($.s, $.s)"},
        {"s.$": "$.s", "more": {"a.$": "$", "b.$": "$"}},
        {"s.$": "States.JsonToString($)"},
        {"s": {"s.$": "$.s"}},
    ],
)
def test_h8_data_that_doubles_in_a_loop_meets_the_limit_of_the_language(template: dict[str, Any]) -> None:
    assert outcome(loop(template), {"s": "x" * 100}) == ("States.DataLimitExceeded", None)


def test_h8_a_value_named_a_thousand_times_is_as_large_as_all_of_them() -> None:
    many = {f"x{number}.$": "$" for number in range(1_000)}
    assert outcome({"A": {"Type": "Pass", "Parameters": many, "End": True}}, ONES[:1_000]) == ("States.DataLimitExceeded", None)


def test_h8_what_no_state_looks_into_may_be_larger() -> None:
    states = {"A": {"Type": "Task", "Resource": "f", "Next": "B"}, "B": {"Type": "Task", "Resource": "f", "End": True}}
    large = "x" * (4 * DATA_LIMIT_BYTES)
    assert outcome(states, large, f=lambda given: given) == ("", large)


def test_h8_what_is_too_large_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = encoding.decode
    monkeypatch.setattr("lamina.values.storage.encoding.decode", lambda blob: decoded.append(len(blob)) or decode(blob))
    states = {"A": {"Type": "Pass", "Parameters": {"parts.$": "States.StringSplit($, ',')"}, "End": True}}
    assert outcome(states, "a," * 10_000_000) == ("States.DataLimitExceeded", None)
    assert max(decoded, default=0) < 1_000


def test_h8_results_of_a_map_are_data_of_its_state_together() -> None:
    states = {
        "A": {
            "Type": "Map",
            "ItemProcessor": {"StartAt": "T", "States": {"T": {"Type": "Task", "Resource": "f", "End": True}}},
            "End": True,
        }
    }
    assert outcome(states, [1, 2, 3], f=lambda item: "x" * 100_000) == ("States.DataLimitExceeded", None)
    assert outcome(states, [1, 2], f=lambda item: "x" * 100_000)[0] == ""


def test_h8_a_map_over_more_items_than_it_takes_is_refused_before_anything_is_made_of_them() -> None:
    body = {"StartAt": "P", "States": {"P": {"Type": "Pass", "End": True}}}
    states = {"A": {"Type": "Map", "ItemSelector": {"x.$": "$"}, "ItemProcessor": body, "End": True}}
    assert outcome(states, ONES) == ("States.Runtime", None)


def test_h8_a_run_has_a_budget_of_steps_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that makes much data anew in every turn stays within the limits of each state, and takes a core for minutes."""
    monkeypatch.setattr("lamina.values.asl_values.MAX_WORK", 200_000)
    again = loop({"a.$": "States.ArrayUnique($.a)", "b.$": "$..*"})
    assert outcome(again, {"a": list(range(2_000))})[0] == "States.Runtime"
    turns = {"A": {"Type": "Pass", "Parameters": {"n.$": "States.MathAdd($.n, 1)"}, "Next": "B"}}
    turns["B"] = {"Type": "Choice", "Choices": [{"Variable": "$.n", "NumericLessThan": 500, "Next": "A"}], "Default": "C"}
    assert outcome({**turns, "C": {"Type": "Succeed"}}, {"n": 0}) == ("", {"n": 500})


def test_h8_what_was_measured_is_not_measured_again() -> None:
    large = [list(range(1_000)) for _ in range(20)]
    first = EvaluationBudget()
    first.check({"a": large})
    second = EvaluationBudget(known=first.sizes)
    second.check({"b": large})
    assert second.work < 10 < first.work
    with pytest.raises(StateError, match="DataLimitExceeded"):
        EvaluationBudget(50_000, second.sizes).check([large, large])


# ------------------------------------------------------------------------------------------------ steps

PATHS = ["$..*..*..*..*..*", "$..*", "$..[?(@..b)]", "$[?(@ > 0 || @ < 5 && !(@ == 2))]", "$..['a','b','c']..[0,1,2]"]
CALLS = [
    "States.ArrayContains($, 7)",
    "States.ArrayUnique($)",
    "States.ArrayPartition($, 1)",
    "States.ArrayContains($, $)",
    "States.JsonToString(States.Array($, $, $, $))",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [ONES, {"a": [{"b": [number, number]} for number in range(15_000)]}], ids=["flat", "nested"])
def test_h8_a_path_that_visits_too_many_places_is_given_up(path: str, value: Any) -> None:
    budget = EvaluationBudget()
    with contextlib.suppress(StateError):
        parse_path(path).find(value, None, budget)
    assert budget._steps_left > -200_000


@pytest.mark.parametrize("text", CALLS)
def test_h8_a_call_that_takes_too_many_steps_is_given_up(text: str) -> None:
    with pytest.raises(StateError, match=r"States\.(Runtime|DataLimitExceeded)"):
        evaluate(parse_call(text), ExpressionScope(ONES, Evaluation({}, random.Random(0))))


@pytest.mark.parametrize(("text", "value"), [("States.MathAdd($, 1)", 10**400), ("States.ArrayRange(0, $, 1)", 10**400)])
def test_h8_numbers_without_end_are_errors_of_their_call(text: str, value: Any) -> None:
    with pytest.raises(StateError, match=r"States\.IntrinsicFailure"):
        evaluate(parse_call(text), ExpressionScope(value, Evaluation({}, random.Random(0))))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=30,
)


@given(VALUES, st.integers(1, 400))
def test_the_size_of_a_value_is_near_that_of_its_json(value: Any, limit: int) -> None:
    """Numbers count as one digit; the rest is exact, but for escapes. Parts that are there twice count twice."""
    size = len(encoding.to_json(value))
    for twice, least, most in ((value, size / 12, size + 40), ([value, value], size / 6, 2 * size + 80)):
        try:
            EvaluationBudget(limit).check(twice)
            assert least <= limit
        except StateError:
            assert most >= limit


# --------------------------------------------------------------------------------------------- the loop


def test_h8_a_run_that_goes_round_and_round_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of states without tasks is one chain of questions: seconds of work for 25,000 of them. The event loop turns on."""
    monkeypatch.setattr("lamina.core.workflow.engine.MAX_DATA_REQUESTS", 3_000)

    async def work() -> tuple[str, bool]:
        spinning = asyncio.create_task(LocalStateMachine(machine(loop({"s.$": "$.s"})), {}).run_realtime({"s": "x"}))
        turns = 0
        while not spinning.done():
            await asyncio.sleep(0)
            turns += 1
        return (await spinning).error, turns > 20

    assert asyncio.run(work()) == ("States.Runtime", True)


def test_h8_questions_of_one_run_keep_their_order_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question in a slice of its own gives what all in one go give."""

    def branch(name: str) -> dict[str, Any]:
        return {"StartAt": name, "States": {name: {"Type": "Pass", "Parameters": {"n.$": "$.n"}, "End": True}}}

    states = {
        "A": {"Type": "Parallel", "Branches": [branch("P"), branch("Q"), branch("R")], "Next": "B"},
        "B": {"Type": "Map", "ItemSelector": {"n.$": "$$.Map.Item.Index"}, "ItemProcessor": branch("S"), "End": True},
    }

    def run() -> tuple[Any, list[Any]]:
        local = LocalStateMachine(machine(states), {}, virtual=False)
        ended = local.run({"n": 7})
        return ended.output, [(event.scope, event.node) for _, event, _ in local.history if hasattr(event, "execution_id")]

    in_one_go = run()
    monkeypatch.setattr(realtime, "SLICE_US", 0)
    monkeypatch.setattr(realtime, "COUNTED_US", 0)
    assert run() == in_one_go
    assert in_one_go[0] == [{"n": 0}, {"n": 1}, {"n": 2}]
