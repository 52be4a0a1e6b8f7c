from __future__ import annotations

from typing import Any

import pytest

from lamina.errors import BadValue
from lamina.sdk.binding import NOTHING, Param, bind, bind_arguments, bind_named

ONE = (Param("x"),)
ONE_OPTIONAL = (Param("x", required=False),)
TWO = (Param("image"), Param("scale", required=False))


TYPED = (Param("text", schema={"type": "string"}), Param("lang", required=False, schema={"type": "string"}))
OBJECT = (Param("options", schema={"type": "object"}), Param("lang", required=False))


@pytest.mark.parametrize("body", [3, None, {"y": 1}, {}, [1, 2], "text"])
def test_one_parameter_takes_the_whole_body(body: Any):
    assert bind(ONE, body) == {"x": body}


@pytest.mark.parametrize("params", [ONE, (*ONE, Param("lang", required=False))])
@pytest.mark.parametrize("value", [3, None, [1, 2], "text"])
def test_an_object_with_the_names_and_a_bare_value_mean_the_same_whatever_optional_parameter_is_added(params: Any, value: Any):
    assert bind(params, {"x": value}) == bind(params, value) == {"x": value}


def test_a_bare_value_is_for_the_first_parameter_where_none_is_required():
    assert bind((Param("x", required=False), Param("y", required=False)), 3) == {"x": 3}


def test_a_bare_object_is_the_value_of_a_parameter_that_takes_objects():
    assert bind(OBJECT, {"a": 1}) == {"options": {"a": 1}}
    assert bind(OBJECT, {"options": {"a": 1}, "lang": "en"}) == {"options": {"a": 1}, "lang": "en"}


def test_an_object_with_more_than_the_name_of_the_only_parameter_is_its_value():
    assert bind(ONE, {"x": 1, "y": 2}) == {"x": {"x": 1, "y": 2}}


@pytest.mark.parametrize("body", [{"input": 1}, {}, {"a": 1}, 3])
def test_the_input_of_a_state_machine_is_the_whole_body(body: Any):
    assert bind((Param("input", required=False, is_whole=True),), body) == {"input": body}


def test_an_object_is_not_taken_for_a_text():
    with pytest.raises(BadValue, match="unknown parameter 'what'"):
        bind(TYPED, {"what": "hi"})
    with pytest.raises(BadValue, match="unknown parameter 'what'"):
        bind(TYPED[:1], {"what": "hi"})


def test_one_optional_parameter_may_have_no_body():
    assert bind(ONE_OPTIONAL, NOTHING) == {}


def test_one_parameter_without_a_body_is_missing():
    with pytest.raises(BadValue, match="missing parameter 'x'"):
        bind(ONE, NOTHING)


def test_several_parameters_take_an_object_with_their_names():
    assert bind(TWO, {"image": 1, "scale": 2}) == {"image": 1, "scale": 2}


def test_what_has_a_default_may_be_left_out():
    assert bind(TWO, {"image": 1}) == {"image": 1}


def test_a_missing_parameter_is_named():
    with pytest.raises(BadValue, match="missing parameter 'image'"):
        bind(TWO, {"scale": 2})


def test_an_unknown_parameter_is_named_and_the_close_one_suggested():
    with pytest.raises(BadValue, match="unknown parameter 'imgae'") as caught:
        bind(TWO, {"imgae": 1})
    assert caught.value.hint == "did you mean 'image'?"


def test_several_required_parameters_refuse_anything_but_an_object():
    with pytest.raises(BadValue, match="list given where an object is needed"):
        bind((Param("x"), Param("y")), [1, 2])


@pytest.mark.parametrize("body", [NOTHING, None, {}])
def test_no_parameter_takes_an_empty_body(body: Any):
    assert bind((), body) == {}


def test_no_parameter_refuses_a_body():
    with pytest.raises(BadValue, match="takes no input"):
        bind((), {"x": 1})


def test_named_inputs_of_one_parameter_are_by_name_too():
    assert bind_named(ONE, {"x": {"x": 1}}) == {"x": {"x": 1}}


def test_python_arguments_are_named_by_position():
    assert bind_arguments(TWO, (1,), {"scale": 2}) == {"image": 1, "scale": 2}


def test_an_argument_given_twice_is_refused():
    with pytest.raises(BadValue, match="'image' is given twice"):
        bind_arguments(TWO, (1,), {"image": 2})


def test_too_many_arguments_are_refused():
    with pytest.raises(BadValue, match="3 arguments given where 2 fit"):
        bind_arguments(TWO, (1, 2, 3), {})
