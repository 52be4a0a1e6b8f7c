from __future__ import annotations

import sys
from typing import Any

import numpy
import pytest

import lamina
from lamina.errors import BadValue
from lamina.sdk.runner import Runner


def runner(target: Any, **options: Any) -> Runner:
    return lamina.App("test").function(name="f", **options)(target).open()


def test_a_plain_function_runs_once_per_call():
    assert runner(lambda x: x + 1).run([{"x": 1}, {"x": 2}]) == [2, 3]


def test_a_call_that_raises_fails_alone():
    results = runner(lambda x: 1 / x).run([{"x": 0}, {"x": 1}])
    assert isinstance(results[0], ZeroDivisionError)
    assert results[1] == 1


def test_a_batched_function_gets_a_list_per_parameter_with_defaults_filled_in():
    seen = []

    def target(x, y=5):
        seen.append((x, y))
        return x

    runner(target, batch=8).run([{"x": 1}, {"x": 2, "y": 6}])
    assert seen == [([1, 2], [5, 6])]


def test_a_batched_result_may_be_an_array():
    results = runner(lambda x: numpy.array(x) * 2, batch=8).run([{"x": 1}, {"x": 2}])
    assert results == [2, 4]


def test_a_result_of_the_wrong_length_names_function_and_both_lengths():
    results = runner(lambda x: x[:1], batch=8).run([{"x": 1}, {"x": 2}, {"x": 3}])
    assert [str(error)[:49] for error in results] == ["function 'f' returned 1 results for a batch of 3;"] * 3


@pytest.mark.parametrize("result", [None, 3, "abc", {"a": 1}])
def test_a_result_that_is_no_list_is_an_error(result: Any):
    [error] = runner(lambda x: result, batch=8).run([{"x": 1}])
    assert isinstance(error, TypeError)
    assert type(result).__name__ in str(error)


def reciprocals(x: list[float]) -> list[float]:
    return [1 / one for one in x]


def test_one_bad_request_does_not_fail_its_neighbours():
    results = runner(reciprocals, batch=8).run([{"x": x} for x in (1, 2, 0, 4, 5)])
    assert [type(one) for one in results] == [float, float, ZeroDivisionError, float, float]


def test_what_must_not_run_twice_fails_as_a_whole():
    seen = []

    def target(x):
        seen.append(x)
        raise ValueError

    results = runner(target, batch=8, idempotent=False).run([{"x": 1}, {"x": 2}])
    assert (seen, [type(one) for one in results]) == ([[1, 2]], [ValueError, ValueError])


def test_an_exception_in_the_list_fails_that_request_only():
    error = ValueError("blurred")
    assert runner(lambda x: [1, error], batch=8).run([{"x": 1}, {"x": 2}]) == [1, error]


def test_a_call_without_a_required_input_fails_alone():
    results = runner(lambda x: x, batch=8).run([{}, {"x": 2}])
    assert isinstance(results[0], BadValue)
    assert results[1] == 2


def test_sys_exit_ends_the_call_and_not_the_process():
    [error] = runner(lambda: sys.exit(3)).run([{}])
    assert str(error) == "function 'f' called sys.exit(3)"


def test_a_class_is_made_loaded_called_and_closed_in_this_order():
    steps = []

    class Model:
        def __init__(self):
            steps.append("init")

        def load(self):
            steps.append("load")

        def __call__(self, x):
            steps.append("call")

        def close(self):
            steps.append("close")

    opened = runner(Model)
    opened.run([{"x": 1}])
    opened.close()
    opened.close()
    assert steps == ["init", "load", "call", "close"]
