"""Paths and intrinsic functions, on whatever hypothesis thinks of."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.asl import timestamps
from lamina.asl.choice_rules import matches
from lamina.asl.errors import StateError
from lamina.asl.evaluation import Evaluation
from lamina.asl.intrinsics import ExpressionScope, IntrinsicError, evaluate, parse_call
from lamina.asl.paths import NoMatch, PathError, parse_path, parse_reference, put_at

keys = st.text(min_size=1, max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20)


def quoted(key: str) -> str:
    return key.replace("\\", "\\\\").replace("'", "\\'")


def all_places(value: Any, path: str = "$") -> list[tuple[str, Any]]:
    found = [(path, value)]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += all_places(inner, f"{path}['{quoted(key)}']")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += all_places(inner, f"{path}[{index}]")
    return found


def call(text: str, value: Any = None) -> Any:
    return evaluate(parse_call(text), ExpressionScope(value, Evaluation({}, random.Random(0))))


@given(values)
def test_every_place_of_a_value_has_a_path_that_finds_it(value: Any):
    for path, inner in all_places(value):
        assert parse_path(path).find(value) == inner


@given(values, values, st.data())
def test_what_is_placed_is_found_and_nothing_else_moves(value: Any, new: Any, data: st.DataObject):
    path, _ = data.draw(st.sampled_from(all_places(value)))
    changed = put_at(parse_reference(path), value, new)
    assert parse_path(path).find(changed) == new
    for other, inner in all_places(value):
        if not path.startswith(other) and not other.startswith(path):
            assert parse_path(other).find(changed) == inner


@given(st.dictionaries(keys, leaves, max_size=3), st.lists(keys, min_size=1, max_size=4), leaves)
def test_missing_objects_on_the_way_are_made(value: dict[str, Any], way: list[str], new: Any):
    path = parse_path("$" + "".join(f"['{quoted(key)}']" for key in ["fresh", *way]))
    value.pop("fresh", None)
    assert path.find(put_at(path, value, new)) == new


PIECES = st.sampled_from([".a", ".b", "['b']", "[0]", "[7]", "[*]", "..b", "[0:1]", "[?(@.b == 1)]", "x", "[", "]"])
"""Of which paths are made, so that some of them are."""


@given(st.text(max_size=30) | st.lists(PIECES, max_size=4).map("".join))
def test_any_text_is_a_path_or_said_to_be_none(text: str):
    try:
        path = parse_path(f"${text}")
    except PathError:
        return
    try:
        path.find({"a": [1, {"b": None}]}, {})
    except NoMatch:
        assert path.is_reference


@given(st.text(alphabet="$.[]*?()@'\"=<>!&|0123456789abc ,:-\\", max_size=24))
def test_texts_made_of_the_signs_of_paths_do_no_harm(text: str):
    with contextlib.suppress(PathError, NoMatch):
        parse_path(f"${text}").find([{"a": 1, "b": [2, 3]}], {})


@given(st.lists(leaves, max_size=6))
def test_a_wildcard_gives_all_elements(items: list[Any]):
    assert parse_path("$[*]").find(items) == items


@given(st.lists(st.integers(), max_size=8), st.integers(-4, 8), st.integers(-4, 8))
def test_slices_are_those_of_python(items: list[int], start: int, stop: int):
    assert parse_path(f"$[{start}:{stop}]").find(items) == items[start:stop]


@given(st.lists(st.integers(-5, 5), max_size=8), st.integers(-5, 5))
def test_a_filter_keeps_those_for_which_it_holds(items: list[int], limit: int):
    rows = [{"n": item} for item in items]
    assert parse_path(f"$[?(@.n >= {limit} && !(@.n == 3))].n").find(rows) == [n for n in items if n >= limit and n != 3]


def test_brackets_without_end_are_no_path():
    with pytest.raises(PathError):
        parse_path("$[?(" + "(" * 50_000)


@given(st.text(max_size=40))
def test_any_text_is_a_call_or_said_to_be_none(text: str):
    for tried in (text, f"States.Format({text})", f"States.{text}('a')"):
        try:
            parsed = parse_call(tried)
        except IntrinsicError:
            continue
        with contextlib.suppress(StateError):
            evaluate(parsed, ExpressionScope({"a": 1}, Evaluation({}, random.Random(0))))


def json_equal(left: Any, right: Any) -> bool:
    """Equality as JSON has it: 1 and 1.0 are one number, true is none."""
    if isinstance(left, bool) or isinstance(right, bool) or left is None or right is None:
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    return bool(left == right)


@given(values)
def test_json_to_string_and_back(value: Any):
    assert json_equal(call("States.StringToJson(States.JsonToString($.v))", {"v": value}), value)


@given(st.text(max_size=100))
def test_base64_there_and_back(text: str):
    assert call("States.Base64Encode($.t)", {"t": text}) == base64.b64encode(text.encode()).decode()
    assert call("States.Base64Decode(States.Base64Encode($.t))", {"t": text}) == text


@given(st.lists(values, max_size=8), st.integers(1, 5))
def test_partitions_put_together_are_the_array(items: list[Any], size: int):
    parts = call(f"States.ArrayPartition($, {size})", items)
    assert [item for part in parts for item in part] == items
    assert all(0 < len(part) <= size for part in parts)


@given(st.lists(leaves, max_size=8))
def test_unique_elements_are_each_there_once_and_none_is_lost(items: list[Any]):
    unique = call("States.ArrayUnique($)", items)
    assert all(not json_equal(a, b) for i, a in enumerate(unique) for b in unique[:i])
    assert all(any(json_equal(item, kept) for kept in unique) for item in items)


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-5, 5).filter(bool))
def test_ranges_go_up_to_their_end(first: int, last: int, step: int):
    found = call(f"States.ArrayRange({first}, {last}, {step})")
    assert found == list(range(first, last + (1 if step > 0 else -1), step))


@given(st.lists(st.text(max_size=6), max_size=4))
def test_format_puts_values_where_its_holes_are(parts: list[str]):
    holes = "-".join("{}" for _ in parts)
    args = "".join(f", $[{i}]" for i in range(len(parts)))
    assert call(f"States.Format('{holes}'{args})", parts) == "-".join(parts)


@given(st.text(max_size=20))
def test_a_literal_says_what_is_written_in_it(text: str):
    escaped = "".join("\\" + sign if sign in "\\'{}" else sign for sign in text)
    assert call(f"States.Array('{escaped}')") == [text]
    assert call(f"States.Format('{escaped}')") == text


@given(st.integers(-100, 100), st.integers(1, 100))
def test_random_numbers_stay_below_their_end(start: int, span: int):
    assert start <= call(f"States.MathRandom({start}, {start + span})") < start + span


@given(st.datetimes())
def test_timestamps_there_and_back(moment: Any):
    at_us = timestamps.parse_timestamp_us(f"{moment.isoformat(timespec='milliseconds')}Z")
    assert at_us is not None
    assert timestamps.parse_timestamp_us(timestamps.format_timestamp(at_us)) == at_us


@pytest.mark.parametrize(
    "text", ["2026-13-01T00:00:00Z", "2026-01-01 00:00:00Z", "2026-01-01T00:00:00", "2026-01-01T25:00:00Z", 5, None, ""]
)
def test_what_is_no_timestamp(text: Any):
    assert timestamps.parse_timestamp_us(text) is None


@given(st.text(alphabet="ab*\\", max_size=8), st.text(alphabet="ab*\\", max_size=8))
def test_patterns_are_those_of_a_plain_matcher(pattern: str, text: str):
    plain = re.sub(r"\\([*\\])|(\*)|(.)", lambda m: ".*" if m[2] else re.escape(m[1] or m[3]), pattern)
    assert matches(pattern, text) == (re.fullmatch(plain, text) is not None)


def test_a_pattern_that_almost_fits_everywhere_takes_no_time():
    assert not matches("*a" * 40 + "b", "a" * 20_000)


@given(values)
def test_equality_is_that_of_json(value: Any):
    assert json_equal(value, json.loads(json.dumps(value)))
