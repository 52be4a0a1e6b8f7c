"""Random workflows: what the flow computes, step by step in any order, is what plain Python computes."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import lamina
from lamina import each, when
from lamina.expr import Absent
from tests.properties import examples

from .flow_interpreter import interpret

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
index = st.integers(0, 50)
condition = st.tuples(index, st.sampled_from(sorted(COMPARE)), st.integers(-20, 20), st.sampled_from("&|~ "))


def statement(program: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.just("mix"), index, index),
        st.tuples(st.just("total"), st.lists(index, max_size=3)),
        st.tuples(st.just("pick"), index),
        st.tuples(st.just("each"), st.lists(index, max_size=3), program),
        st.tuples(st.just("count"), index, program),
        st.tuples(st.just("when"), condition, program, program),
    )


programs: st.SearchStrategy[Any] = st.recursive(
    st.lists(st.tuples(st.just("mix"), index, index), max_size=2),
    lambda inner: st.lists(statement(inner), max_size=4),
    max_leaves=25,
)


class World:
    """Functions that remember how they were called, and a program made of them."""

    def __init__(self, program: Any) -> None:
        self.calls: Counter[Any] = Counter()
        self.app = lamina.App("random")
        note = self.calls.update

        @self.app.function()
        def mix(a, b):
            note([("mix", a, b)])
            return (3 * a - b) % 41 - 20

        @self.app.function(batch=3)
        def total(xs):
            note(("total", tuple(one)) for one in xs)
            return [sum(one) for one in xs]

        @self.app.function()
        def parts(x):
            note([("parts", x)])
            return {"low": x - 1, "all": [x, x + 1]}

        @self.app.function()
        def below(x):
            note([("below", x)])
            return list(range(x % 4))

        def run(statements: Any, env: list[Any]) -> Any:
            env = list(env)
            for one in statements:
                env.append(step(one, env))
            return env[-1]

        def step(one: Any, env: list[Any]) -> Any:
            def at(number: int) -> Any:
                return env[number % len(env)]

            match one:
                case ("mix", a, b):
                    return mix(at(a), at(b))
                case ("total", numbers):
                    return total([at(number) for number in numbers])
                case ("pick", a):
                    found = parts(at(a))
                    return mix(found["low"], found["all"][-1])
                case ("each", numbers, body):
                    return total(each(lambda item: run(body, [*env, item]), [at(number) for number in numbers]))
                case ("count", a, body):
                    return total(each(lambda item: run(body, [*env, item]), below(at(a))))
                case ("when", (a, compare, constant, how), then, otherwise):
                    holds = COMPARE[compare](at(a), constant)
                    if how == "~":
                        holds = ~holds
                    elif how != " ":
                        other = at(a + 1) > 0
                        holds = holds & other if how == "&" else holds | other
                    return when(holds, lambda: run(then, env), lambda: run(otherwise, env))
            raise AssertionError(one)

        def body(x, y):
            return run(program, [x, y])

        self.workflow = self.app.workflow(name="w")(body)


@examples(150)
@given(programs, st.integers(-20, 20), st.integers(-20, 20), st.integers(0, 2**16))
def test_a_traced_workflow_computes_what_the_function_computes(program: Any, x: int, y: int, seed: int):
    world = World(program)
    functions = {name: function.local for name, function in world.app.functions.items()}
    expected, wanted = world.workflow(x, y), Counter(world.calls)
    world.calls.clear()
    found = interpret(world.workflow.flow, functions, {"x": x, "y": y}, seed)
    assert (found, world.calls) == (expected, wanted)


@examples(50)
@given(programs)
def test_every_traced_flow_passes_its_own_check(program: Any):
    World(program).workflow.flow.check()


def test_the_interpreter_notices_a_step_that_starts_too_early():
    flow = World([("mix", 0, 1), ("mix", 2, 2)]).workflow.flow
    early = replace(flow, start=("mix", "mix-2"), nodes={**flow.nodes, "mix": replace(flow.nodes["mix"], next=())})
    functions = {"mix": lambda a, b: a}
    with pytest.raises(Absent):
        [interpret(early, functions, {"x": 1, "y": 2}, seed) for seed in range(20)]
