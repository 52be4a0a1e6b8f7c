"""Annotation conversion: whatever way a value comes, the function gets what its annotation says."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import ipaddress
import pathlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType

import msgspec
import numpy as np
import pytest

import lamina
from lamina import encoding
from lamina.errors import BadFlow, BadValue, LaminaError
from lamina.sdk.annotation_conversion import converter_to
from lamina.sdk.binding import NOTHING
from lamina.sdk.json_schema import schema_of
from lamina.testing import Runtime

if TYPE_CHECKING:
    from decimal import Decimal


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Circle:
    radius: float
    x: int = 0


class Named(msgspec.Struct, rename="camel"):
    full_name: str = ""


@dataclasses.dataclass
class Picture:
    pixels: np.ndarray
    corners: list[Point] = dataclasses.field(default_factory=list)


class Colour(enum.Enum):
    RED = "red"


class Model:
    """As pydantic's: it validates and dumps itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def model_validate(cls, value: Any) -> Model:
        if not isinstance(value, dict):
            raise ValueError("a model is an object")
        return cls(value["name"])

    def model_dump(self) -> dict[str, Any]:
        return {"name": self.name}


app = lamina.App("typed")


@app.function()
def shift(point: Point, by: int = 1) -> Point:
    return Point(point.x + by, point.y)


@app.function(batch=4)
def xs(point: list[Point]) -> list[int]:
    return [one.x for one in point]


@app.function()
def told(value: Point | None, pair: tuple[int, int], tags: set[str], colour: Colour, day: datetime.date) -> str:
    return f"{value} {pair} {sorted(tags)} {colour.name} {day.year}"


@app.function()
def mean(picture: Picture) -> float:
    return float(picture.pixels.mean()) + len(picture.corners)


@app.function()
def renamed(model: Model) -> Model:
    return Model(model.name + "!")


@app.function()
def loose(x: float, many: list[int]) -> str:
    return f"{type(x).__name__} {many}"


UserId = NewType("UserId", int)


def made(hint: Any, value: Any) -> Any:
    """What a function whose parameter `x` is so annotated gets for a value."""
    convert = converter_to("x", hint, NOTHING)
    return convert(value) if convert is not None else value


def over_the_wire(function: Any, **inputs: Any) -> Any:
    """Encoded and decoded, as a server gets it."""
    runner = function.open()
    result = runner.run([encoding.decode(encoding.encode(inputs))])[0]
    if isinstance(result, Exception):
        raise result
    return encoding.decode(encoding.encode(result))


def test_a_dataclass_arrives_as_one():
    assert over_the_wire(shift, point=Point(1, 2.0)) == {"x": 2, "y": 2.0}


def test_in_process_it_may_be_the_dataclass_or_its_fields():
    assert shift.local(Point(1)) == shift.local({"x": 1}) == Point(2)  # type: ignore[arg-type]


def test_in_a_test_it_may_be_the_dataclass():
    assert Runtime(app).call("shift", Point(1)) == {"x": 2, "y": 0.0}


def test_every_request_of_a_batch_is_made():
    assert xs.open().run([{"point": {"x": 1}}, {"point": {"x": 2}}]) == [1, 2]


def test_what_does_not_fit_fails_alone_and_says_where():
    good, wrong = xs.open().run([{"point": {"x": 1}}, {"point": {"x": "two"}}])
    assert good == 1
    assert isinstance(wrong, BadValue)
    assert wrong.message == "point.x: 'two' is text where a whole number is needed"
    assert wrong.fields == [("point.x", "'two' is text where a whole number is needed")]


def test_tuples_sets_enums_and_dates_arrive_as_such():
    given = {"value": None, "pair": (1, 2), "tags": {"b", "a"}, "colour": Colour.RED, "day": datetime.date(2026, 5, 1)}
    assert over_the_wire(told, **given) == "None (1, 2) ['a', 'b'] RED 2026"


def test_arrays_and_dataclasses_may_be_inside_one():
    assert over_the_wire(mean, picture=Picture(np.ones((2, 2)), [Point(1)])) == 2.0
    assert mean.local({"pixels": [[1, 1]], "corners": []}) == 1.0  # type: ignore[arg-type]


def test_a_model_that_validates_itself_does():
    assert over_the_wire(renamed, model=Model("a")) == {"name": "a!"}


def test_what_a_model_does_not_take_is_a_bad_value():
    with pytest.raises(LaminaError, match="model: a model is an object"):
        over_the_wire(renamed, model=3)


def test_plain_annotations_convert_nothing():
    assert over_the_wire(loose, x=1, many=[True, 2]) == "int [True, 2]"


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (list[int], [1, "abc"], "x.1: 'abc' is text where a number is needed"),
        (list[int] | None, [1.5], "x.0: 1.5 is no whole number"),
        (list[list[float]], [[1], ["a"]], "x.1.0: 'a' is text where a number is needed"),
        (dict[str, list[str]], {"a": ["b"], "c": [1]}, "x.c.0: 1 is a number where text is needed"),
        (Sequence[bool], ["on"], "x.0: 'on' is text where true or false is needed"),
        (Sequence[str], "abc", "x: 'abc' is text where a list is needed"),
        (UserId, "7", "x: '7' is text where a number is needed"),
        (list[UserId], ["7"], "x.0: '7' is text where a number is needed"),
    ],
)
def test_entries_of_lists_and_objects_are_checked_as_parameters_are(hint: Any, value: Any, said: str):
    with pytest.raises(BadValue) as error:
        made(hint, value)
    assert error.value.message == said


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (list[float], [1, 2.5]),
        (list[float], np.ones(3)),
        (list[list[float]], [np.ones(2), [1]]),
        (list[int] | list[str], ["a"]),  # which of the two was meant is not known
        (dict[str, int], {"a": np.int64(1)}),
    ],
)
def test_entries_that_fit_stay_as_they_are(hint: Any, value: Any):
    assert made(hint, value) is value or list(made(hint, value)) == list(value)


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [
        (pathlib.Path, "/a/b", pathlib.Path("/a/b")),
        (ipaddress.IPv4Address | None, "10.0.0.1", ipaddress.IPv4Address("10.0.0.1")),
        (bytearray, "aGk=", bytearray(b"hi")),
        (collections.deque[int], [1, 2], collections.deque([1, 2])),
        (collections.OrderedDict[str, Point], {"a": {"x": 1}}, collections.OrderedDict(a=Point(1))),
        (list[int], [1.0, 2], [1, 2]),
        (str | int, b"hi", "hi"),
    ],
)
def test_classes_of_the_standard_library_are_made(hint: Any, value: Any, found: Any):
    assert made(hint, value) == found
    assert type(made(hint, value)) is type(found)


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [
        (Point | Circle, {"x": 1}, Point(1)),
        (Point | Circle, {"radius": 2, "x": 1}, Circle(2.0, 1)),  # both would do: it has more of the fields
        (Point | Circle | None, None, None),
        (Named | Circle, {"fullName": "a"}, Named("a")),
        (Point | Circle | str, "none", "none"),
        (list[Point | Circle], [{"x": 1}, {"radius": 1}], [Point(1), Circle(1.0)]),
        (dict[str, list[Point | Circle]], {"a": [{"x": 1}]}, {"a": [Point(1)]}),
    ],
)
def test_of_several_classes_the_one_that_fits_is_made(hint: Any, value: Any, found: Any):
    assert made(hint, value) == found


@pytest.mark.parametrize(
    ("hint", "value", "said", "way"),
    [
        (Point | Circle, {}, "x: {} is no Point or Circle", "as Point: x.x is missing; as Circle: x.radius is missing"),
        (list[Point | Circle], [{"x": 1}, 3], "x.1: 3 is no Point or Circle", "as Point: x.1: 3 is a number where an object"),
        (list[Point | Circle], "ab", "x: 'ab' is text where a list is needed", "send a list"),
    ],
)
def test_what_fits_none_of_them_is_told_what_each_wants(hint: Any, value: Any, said: str, way: str):
    with pytest.raises(BadValue) as error:
        made(hint, value)
    assert error.value.message == said and error.value.hint.startswith(way)


def test_the_schema_names_every_class_that_there_may_be():
    found = schema_of(list[Point | Circle])
    assert found["items"] == {"anyOf": [{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Circle"}]}
    assert set(found["$defs"]) == {"Point", "Circle"}


def test_a_class_of_attrs_is_made():
    attrs = pytest.importorskip("attrs")
    kind = attrs.make_class("Kind", {"x": attrs.field(type=int)})
    assert made(kind, {"x": 1}) == kind(1)


def test_a_field_of_a_model_inside_of_a_dataclass_has_its_whole_name():
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", size=(int, ...))
    outer = dataclasses.make_dataclass("Outer", [("parts", list[inner])])
    with pytest.raises(BadValue) as error:
        made(outer, {"parts": [{"size": 1}, {}]})
    assert error.value.fields == [("x.parts.1.size", "Field required")]


def test_a_note_for_readers_changes_nothing():
    with pytest.raises(BadValue, match=r"x\.0: 'a' is text where a number is needed"):
        made(Annotated[list[int], "sizes in millimetres"], ["a"])


@pytest.mark.parametrize(
    ("hint", "value", "said", "way"),
    [
        (Point, {"y": 1}, "x.x is missing", ""),
        (Point, 3, "x: 3 is a number where an object is needed", "send an object"),
        (list[Point], [{"x": 1}, {"x": None}], "x.1.x: None is nothing where a whole number is needed", "send a whole number"),
        (datetime.date, "soon", "x: 'soon' is no date such as '2026-01-31'", "send a date such as '2026-01-31'"),
        (uuid.UUID, 7, "x: 7 is a number where a UUID is needed", "send a UUID"),
        (pathlib.Path, 7, "x: 7 is a number where text is needed", "send text"),
        (ipaddress.IPv4Address, "a.b", "x: Expected 4 octets in 'a.b'", ""),
        (dict[int, str], {"a": "b"}, "x: its names: a value where a whole number is needed", ""),
        (collections.deque[int], 3, "x: 3 is a number where a list is needed", ""),
        (list[collections.deque[Point]], [[{"x": "a"}]], "x.0.0.x: 'a' is text where a whole number is needed", ""),
        (collections.deque[collections.deque[int]], [[1, "a"]], "x.0.1: 'a' is text where a whole number is needed", ""),
        (tuple[int, str], [1], "x: Expected `array` of length 2, got 1, not [1]", ""),
        (Literal["a", "b"], "c", "x: Invalid enum value 'c'", "send 'a' or 'b'"),
        (float, b"1", "x: b'1' is bytes where a number is needed", "send a number as JSON, with content-type: application/json"),
        (dict, b"{", "x: b'{' is bytes where an object is needed", "send an object as JSON, with content-type: application/json"),
    ],
)
def test_what_does_not_fit_is_told_by_field_value_and_what_to_send(hint: Any, value: Any, said: str, way: str):
    with pytest.raises(BadValue) as error:
        made(hint, value)
    assert (error.value.message, error.value.hint) == (said, way)


def test_text_where_a_list_is_needed_is_the_callers_mistake():
    with pytest.raises(BadValue, match="many: 'abc' is text where a list is needed"):
        over_the_wire(loose, x=1, many="abc")


def test_nothing_is_a_mistake_unless_the_annotation_or_the_default_says_otherwise():
    with pytest.raises(BadValue, match="x: None is nothing where a number is needed"):
        over_the_wire(doubled, x=None)
    assert over_the_wire(either, x=None) == over_the_wire(sloppy, x=None) == "fine"


def test_arrays_which_json_has_no_word_for_are_let_through():
    assert over_the_wire(loose, x=np.ones(2), many=[]) == "ndarray []"


def test_either_of_two_kinds_is_taken_and_a_third_is_not():
    assert over_the_wire(either, x="a") == over_the_wire(either, x=1) == "fine"
    with pytest.raises(BadValue, match="text or a number is needed"):
        over_the_wire(either, x=[])


def test_annotations_tell_other_tools_what_is_wanted():
    assert [param.type for param in loose.params] == ["number", "array"]
    assert [param.type for param in (*either.params, *xs.params)] == ["", ""]


@app.function()
def either(x: str | int | None) -> str:
    return "fine"


@app.function()
def sloppy(x: str = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
    return "fine"


@app.function()
def found(n: int) -> list[Point]:
    return [Point(number) for number in range(n)]


@app.function()
def doubled(x: int) -> int:
    return 2 * x


@app.workflow()
def traced(point: Point, n: int) -> dict[str, Any]:
    moved = shift(point)
    return {"first": doubled(moved.x), "given": point.y, "all": lamina.each(lambda one: doubled(one.x), found(n))}  # type: ignore[attr-defined]


@app.workflow()
async def awaited(point: Point) -> int:
    moved = await shift.aio(point)
    if moved.x > 2:
        return await doubled.aio(moved.x)
    return moved.x


def test_a_workflow_asks_for_fields_as_python_does():
    expected = {"first": 4, "given": 0.5, "all": [0, 2]}
    assert traced(Point(1, 0.5), 2) == expected
    assert Runtime(app).call("traced", {"x": 1, "y": 0.5}, 2) == expected


@pytest.mark.parametrize("x", [1, 2])
def test_a_workflow_that_awaits_asks_for_fields_too(x: int):
    assert awaited.local(Point(x)) == Runtime(app).call("awaited", Point(x))


def test_what_is_no_field_is_still_refused():
    other = lamina.App("other")
    moved = other.function(name="moved")(shift.target)

    @other.workflow()
    def wrong(point: Point) -> Any:
        return moved(point).z  # type: ignore[attr-defined]

    with pytest.raises(BadFlow, match=r"\.z of a value"):
        _ = wrong.flow


def only_checked(x: int, when: Decimal, tags: set[str], note: Note) -> str:
    return type(tags).__name__


@dataclasses.dataclass
class Note:
    price: Decimal


def test_a_name_that_only_a_type_checker_sees_is_not_checked_and_takes_no_other_with_it():
    function = lamina.App("half").function()(only_checked)
    given = {"when": "1.5", "tags": ["a"], "note": {"price": 1}}
    assert over_the_wire(function, x=1, **given) == "set"
    with pytest.raises(BadValue, match="x: 'one' is text where a number is needed"):
        over_the_wire(function, x="one", **given)
    assert [param.type for param in function.params] == ["integer", "", "", ""]
