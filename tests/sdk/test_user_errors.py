from __future__ import annotations

import os
import traceback

import lamina
from lamina.sdk.user_errors import MAX_TRACE_CHARS, message_of, user_frames_only, user_trace

HOME = os.path.dirname(lamina.__file__)


def user_code(x):
    try:
        return {}[x]
    except KeyError as error:
        raise ValueError(f"no label {x}") from error


def caught() -> BaseException:
    function = lamina.App("test").function()(user_code)
    return function.open().run([{"x": 3}])[0]


def test_the_trace_has_user_frames_and_none_of_the_platform():
    trace = user_trace(caught())
    assert "in user_code" in trace
    assert HOME not in trace


def test_the_trace_keeps_chained_causes():
    trace = user_trace(caught())
    assert trace.index("KeyError: 3") < trace.index("direct cause") < trace.index("ValueError: no label 3")


def test_telling_leaves_the_error_as_it_was():
    error = caught()
    before = "".join(traceback.format_exception(error))
    user_trace(error)
    assert "".join(traceback.format_exception(error)) == before


def test_cleaning_cuts_the_error_itself_down_to_user_frames():
    text = "".join(traceback.format_exception(user_frames_only(caught())))
    assert "in user_code" in text
    assert HOME not in text


def test_errors_in_a_group_are_cleaned_too():
    group = ExceptionGroup("several", [caught()])
    assert HOME not in "".join(traceback.format_exception(user_frames_only(group)))


def test_a_loop_of_causes_does_not_hang():
    error = ValueError("a")
    error.__cause__ = KeyError("b")
    error.__cause__.__cause__ = error
    assert user_frames_only(error) is error


def test_a_long_trace_is_cut_in_the_middle():
    trace = user_trace(ValueError("x" * 10 * MAX_TRACE_CHARS))
    assert len(trace) < MAX_TRACE_CHARS + 100
    assert "characters left out" in trace


def test_an_error_that_cannot_be_shown_is_still_named():
    class Bad(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Bad" in message_of(Bad())
