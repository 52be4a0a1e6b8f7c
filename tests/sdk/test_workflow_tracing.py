from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import lamina
from lamina import each, when
from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.errors import BadFlow, BadValue
from lamina.expr import Absent, evaluate

from .flow_interpreter import interpret

app = lamina.App("shapes")


@app.function()
def inc(x):
    return x + 1


@app.function()
def add(a, b=100):
    return a + b


@app.function(batch=4)
def double(x):
    return [2 * one for one in x]


@app.function()
def total(xs):
    return sum(xs)


@app.function()
def describe(x):
    return {"score": x, "parts": [x, x + 1]}


FUNCTIONS = {name: function.local for name, function in app.functions.items()}
names = iter(range(1000))


def workflow(body: Callable[..., Any]) -> Any:
    return app.workflow(name=f"w{next(names)}")(body)


def traced(body: Callable[..., Any]) -> Flow:
    return workflow(body).flow


def check(body: Callable[..., Any], **inputs: Any) -> Any:
    """The traced flow and the plain call agree."""
    made = workflow(body)
    for seed in range(5):
        assert interpret(made.flow, FUNCTIONS, inputs, seed) == made(**inputs)
    return made(**inputs)


# ------------------------------------------------------------------ shapes


def test_a_chain_follows_the_data():
    flow = traced(lambda x: inc(inc(x)))
    assert flow.start == ("inc",)
    assert flow.nodes["inc"] == Task("inc", "inc", ("inc-2",), 1, {"args": {"x": ["input", "x"]}})
    assert flow.nodes["inc-2"] == Task("inc-2", "inc", (), 1, {"args": {"x": ["node", "inc"]}})
    assert flow.data == {"result": ["node", "inc-2"]}


def test_steps_that_do_not_need_each_other_start_at_once_and_a_join_waits_for_all():
    flow = traced(lambda x: add(inc(x), double(x)))
    assert flow.start == ("inc", "double")
    assert (flow.nodes["add"].tokens_needed, flow.nodes["inc"].next) == (2, ("add",))


def test_a_predecessor_used_twice_counts_once():
    def body(x):
        y = inc(x)
        return add(y, y)

    assert traced(body).nodes["add"].tokens_needed == 1


def test_an_unused_step_still_runs():
    def body(x):
        double(x)
        return inc(x)

    assert traced(body).start == ("double", "inc")


def test_an_each_holds_its_body_as_a_flow():
    node = traced(lambda xs: each(lambda x: add(inc(x), x), xs)).nodes["each"]
    assert isinstance(node, Each)
    assert node.data == {"items": ["input", "xs"]}
    assert node.body.nodes["inc"].data == {"args": {"x": ["item"]}}
    assert node.body.data == {"result": ["node", "add"]}


def test_an_each_waits_for_what_its_body_uses_from_outside():
    def body(xs, y):
        outer = inc(y)
        return each(lambda x: add(x, outer), xs)

    flow = traced(body)
    assert flow.nodes["inc"].next == ("each",)


def test_an_each_over_a_list_knows_how_many_to_expect():
    node = traced(lambda x: each(inc, [x, x, 3])).nodes["each"]
    assert isinstance(node, Each)
    assert node.expected_items == 3.0


def test_how_many_to_expect_can_be_said():
    node = traced(lambda xs: each(inc, xs, expect=20)).nodes["each"]
    assert isinstance(node, Each)
    assert node.expected_items == 20


def test_a_when_is_a_choice_with_a_branch_each_and_a_merge():
    flow = traced(lambda x: when(x > 3, lambda: inc(x), lambda: double(x)))
    choice = flow.nodes["when"]
    assert isinstance(choice, Choice)
    assert choice.branches == (("inc",), ("double",))
    assert choice.data == {"rules": [[">", ["input", "x"], ["value", 3]]]}
    merged = flow.nodes["merged"]
    assert isinstance(merged, Pass)
    assert (merged.tokens_needed, flow.nodes["then"].next, flow.nodes["otherwise"].next) == (1, ("merged",), ("merged",))


def test_a_when_waits_for_what_its_branches_use_from_outside():
    def body(x):
        a, b = inc(x), double(x)
        return when(x > 3, lambda: add(a, 1), lambda: b)

    assert traced(body).nodes["when"].tokens_needed == 2


def test_a_constant_condition_is_decided_while_tracing():
    assert list(traced(lambda x: when(True, lambda: inc(x), lambda: double(x))).nodes) == ["inc"]


def test_a_workflow_inside_a_workflow_becomes_part_of_it():
    inner = workflow(lambda x: inc(inc(x)))
    assert list(traced(lambda x: double(inner(x))).nodes) == ["inc", "inc-2", "double"]


def test_a_flow_travels_as_plain_data():
    flow = traced(lambda xs, k=2: each(lambda x: when(x > k, lambda: inc(x), 0), xs))
    assert msgspec.convert(msgspec.to_builtins(flow), Flow) == flow


def test_tracing_happens_once_and_only_when_asked():
    runs = []

    def body(x):
        runs.append(x)
        return inc(x)

    made = workflow(body)
    assert runs == []
    assert made.flow is made.flow
    assert len(runs) == 1


# ------------------------------------------------- the same result either way


def test_lists_and_dicts_of_values_are_arguments_and_results():
    assert check(lambda x: {"sum": total([inc(x), 1, double(x)]), "same": [x, {"k": x}]}, x=5) == {
        "sum": 17,
        "same": [5, {"k": 5}],
    }


def test_values_can_be_indexed():
    def body(x):
        d = describe(x)
        return add(d["score"], d["parts"][1]), d["parts"][-1]

    made = workflow(body)
    assert interpret(made.flow, FUNCTIONS, {"x": 3}) == list(made(3)) == [7, 4]


@pytest.mark.parametrize("x", [1, 3, 5])
def test_conditions_compare_and_combine(x: int):
    check(lambda x: when((x < 2) | (x >= 4) & ~(x == 4), lambda: inc(x), lambda: double(x)), x=x)


@pytest.mark.parametrize("x", [0, 1])
def test_a_negated_condition_holds_in_plain_python_too(x: int):
    assert check(lambda x: when(~(x == 0), "yes", "no"), x=x) == ("no" if x == 0 else "yes")


@pytest.mark.parametrize("x", [1, 9])
def test_a_branch_may_be_a_plain_value(x: int):
    check(lambda x: add(when(x > 3, x, 7)), x=x)


@pytest.mark.parametrize("x", [1, 9])
def test_a_when_without_an_otherwise_gives_none(x: int):
    assert check(lambda x: when(x > 3, lambda: inc(x)), x=x) == (10 if x == 9 else None)


@pytest.mark.parametrize("x", [1, 5, 9])
def test_whens_nest(x: int):
    check(
        lambda x: add(when(x > 3, lambda: when(x > 7, lambda: inc(x), lambda: double(inc(x))), lambda: double(x)), inc(x)),
        x=x,
    )


def test_an_inner_each_may_use_the_item_of_the_outer_one():
    assert check(lambda xs, ys: each(lambda x: each(lambda y: add(x, y), ys), xs), xs=[1, 2], ys=[10, 20]) == [
        [11, 21],
        [12, 22],
    ]


def test_a_when_inside_an_each_may_use_item_and_outer_values():
    def body(xs, y):
        outer = inc(y)
        return each(lambda x: when(x > outer, lambda: double(x), lambda: add(x, outer)), xs)

    assert check(body, xs=[1, 5, 9], y=4) == [6, 10, 18]


def test_an_each_inside_a_branch():
    check(lambda x, xs: when(x > 3, lambda: total(each(lambda i: add(i, x), xs)), lambda: 0), x=5, xs=[1, 2])


def test_an_each_over_nothing_is_an_empty_list():
    assert check(lambda xs: each(inc, xs), xs=[]) == []


def test_an_each_whose_body_is_no_step():
    assert check(lambda xs, y: each(lambda x: {"x": x, "y": y}, xs), xs=[1], y=2) == [{"x": 1, "y": 2}]


def test_a_workflow_without_steps():
    assert check(lambda x: {"x": x}, x=1) == {"x": 1}


def test_a_default_of_a_parameter_is_part_of_the_flow():
    made = workflow(lambda x, k=5: add(x, k))
    assert interpret(made.flow, FUNCTIONS, {"x": 1}) == made(1) == 6


def test_a_default_gives_way_to_what_is_given():
    made = workflow(lambda x, k=5: add(x, k))
    assert interpret(made.flow, FUNCTIONS, {"x": 1, "k": 7}) == 8


def test_a_default_of_a_function_is_left_to_the_function():
    assert check(lambda x: add(x), x=1) == 101


# ------------------------------------------------------------------ in process


def test_a_batched_function_is_one_request_inside_a_workflow_in_process():
    assert workflow(lambda x: double(x))(4) == 8


def test_mocks_take_the_place_of_steps():
    made = workflow(lambda x: double(inc(x)))
    assert made.local(1, mocks={"inc": lambda x: 50}) == 100


def test_a_mock_of_an_unknown_function_is_refused():
    with pytest.raises(BadValue, match="mocks: no function 'incr' in app 'shapes'"):
        workflow(lambda x: inc(x)).local(1, mocks={"incr": abs})


def test_inside_a_step_calls_are_plain_calls():
    other = lamina.App("other")

    @other.function(batch=4)
    def pairs(x):
        return [(one, one) for one in x]

    @other.function()
    def outer(x):
        return pairs([x, x])

    assert other.workflow(name="w")(lambda x: outer(x))(1) == [(1, 1), (1, 1)]


# --------------------------------------------------------- what cannot be done


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (lambda x: inc(x) if inc(x) > 3 else 0, "when"),
        (lambda x: inc(x) and 3, "when"),
        (lambda x: 0 < inc(x) < 3, "when"),
        (lambda x: [inc(y) for y in inc(x)], "each"),
        (lambda x: len(inc(x)), "function"),
        (lambda x: 3 in inc(x), "function"),
        (lambda x: inc(x) + 1, "function"),
        (lambda x: 1 - inc(x), "function"),
        (lambda x: int(inc(x)), "function"),
        (lambda x: describe(x)[1:], "string or a whole number"),
        (lambda x: (inc(x) > 1)["a"], "index the result of a step"),
    ],
)
def test_what_needs_the_value_itself_says_where_it_is_and_what_to_use(body: Any, hint: str):
    with pytest.raises(BadFlow, match=r"test_workflow_tracing\.py:\d+: ") as caught:
        traced(body)
    assert hint in caught.value.hint


def test_an_attribute_of_a_value_is_named():
    with pytest.raises(BadFlow, match=r"AttributeError: test_workflow_tracing\.py:\d+: \.shape of a value"):
        traced(lambda x: inc(x).shape)


def test_an_error_while_tracing_is_chained_to_its_cause():
    with pytest.raises(BadFlow, match="cannot be traced: ZeroDivisionError") as caught:
        traced(lambda x: inc(1 / 0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_of_another_app_is_refused():
    other = lamina.App("other")
    alien = other.function(name="alien")(lambda x: x)
    with pytest.raises(BadFlow, match="calls 'alien' of another app, 'other'"):
        traced(lambda x: alien(x))


def test_a_value_cannot_leave_its_branch_by_the_back_door():
    def body(x):
        leaked = []
        when(x > 3, lambda: leaked.append(inc(x)), None)
        return double(leaked[0])

    with pytest.raises(BadFlow, match="result of 'inc' outside the each or when it belongs to"):
        traced(body)


def test_an_item_cannot_leave_its_each_by_the_back_door():
    def body(xs):
        leaked = []
        each(lambda x: leaked.append(x), xs)
        return double(leaked[0])

    with pytest.raises(BadFlow, match="outside the each or when"):
        traced(body)


@pytest.mark.parametrize("constant", [object(), {1: 2}, {1, 2}])
def test_a_constant_that_cannot_travel_is_refused(constant: Any):
    with pytest.raises(BadFlow, match=r"test_workflow_tracing\.py:\d+: "):
        traced(lambda x: add(x, constant))


@pytest.mark.parametrize("verb", ["local", "remote", "spawn"])
def test_a_verb_inside_a_workflow_says_to_call(verb: str):
    with pytest.raises(BadFlow, match=f".{verb} of 'inc' inside a workflow"):
        traced(lambda x: getattr(inc, verb)(x))


def test_a_wrong_argument_is_found_while_tracing():
    with pytest.raises(BadValue, match="unknown parameter 'z'"):
        traced(lambda x: inc(z=x))


def test_each_needs_something_to_call():
    with pytest.raises(BadFlow, match="each needs something to call"):
        traced(lambda xs: each(xs, inc))


# ------------------------------------------------------- forms for branches


def test_first_is_the_first_that_is_there():
    def look_up(leaf):
        raise Absent(leaf[1])

    assert evaluate(["first", ["node", "a"], ["value", 2], ["value", 3]], look_up) == 2


def test_when_is_absent_if_its_condition_is_false():
    with pytest.raises(Absent):
        evaluate(["when", ["value", False], ["value", 2]], lambda leaf: None)


def test_a_wrong_path_is_an_error_and_not_an_absence():
    with pytest.raises(BadValue, match="no 'k' in a value of type int"):
        evaluate(["first", ["input", "a", "k"], ["value", 2]], lambda leaf: 1)


@pytest.mark.parametrize("body", [lambda x: f"{inc(x)}", lambda x: str(inc(x)), lambda x: "{}".format(inc(x))])  # noqa: UP032
def test_no_text_is_made_of_a_value_that_is_not_there(body: Callable[..., Any]):
    with pytest.raises(BadFlow, match="cannot make text of"):
        traced(body)


def test_a_wrong_argument_is_told_with_its_line_and_step():
    with pytest.raises(BadFlow, match=r"test_workflow_tracing\.py:\d+: inc\(\.\.\.\): unknown parameter 'z'"):
        traced(lambda x: inc(z=x))
