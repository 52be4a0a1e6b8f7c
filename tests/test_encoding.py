"""Encoding of values: JSON types, bytes, tensors, and nothing else; headers that lie are refused."""

from __future__ import annotations

import base64
import contextlib
import math
import time

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lamina import encoding
from lamina.errors import BadValue

DTYPES = ("bool", "int8", "int64", "uint8", "uint64", "float16", "float32", "float64", "complex64", "complex128")
texts = st.text(st.characters(codec="utf-8"), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
tensors = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def a_tensor(dtype: object, shape: object, body: bytes) -> bytes:
    """A tensor as it travels, whatever it claims."""
    head = msgspec.msgpack.encode((dtype, shape))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, len(head).to_bytes(2, "little") + head + body))


def same(left: numpy.ndarray, right: object) -> bool:
    return (
        isinstance(right, numpy.ndarray)
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


# ---------------------------------------------------------------------------------------------------------- round trips


@given(plain)
def test_plain_values_come_back_as_they_went(value: object):
    assert encoding.decode(encoding.encode(value)) == value


@given(tensors)
def test_tensors_come_back_bit_by_bit(tensor: numpy.ndarray):
    assert same(tensor, encoding.decode(encoding.encode(tensor)))


@given(tensors, plain)
def test_tensors_may_be_anywhere_inside_a_value(tensor: numpy.ndarray, value: object):
    back = encoding.decode(encoding.encode({"x": [value, tensor]}))
    assert back["x"][0] == value
    assert same(tensor, back["x"][1])


@given(arrays.arrays("int32", (3, 4)))
def test_the_layout_of_an_array_does_not_matter(tensor: numpy.ndarray):
    for view in (tensor.T, tensor[::2], tensor[:, ::-1], numpy.asfortranarray(tensor), tensor.astype(">i4")):
        back = encoding.decode(encoding.encode(view))
        assert back.shape == view.shape
        assert (back == view).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 5), (1, 1, 1)])
def test_scalars_and_empty_arrays_keep_their_shape(shape: tuple[int, ...]):
    assert encoding.decode(encoding.encode(numpy.zeros(shape, "float32"))).shape == shape


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (numpy.float32(1.5), 1.5),
        (numpy.int64(7), 7),
        (numpy.bool_(True), True),
        (numpy.str_("x"), "x"),
        ((1, 2), [1, 2]),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        ({3}, [3]),
    ],
)
def test_near_relatives_become_the_plain_thing(value: object, back: object):
    assert encoding.decode(encoding.encode(value)) == back


@given(st.lists(plain, max_size=6))
def test_a_list_can_be_taken_apart_and_put_together_without_being_read(elements: list[object]):
    pieces = encoding.list_items(encoding.encode(elements))
    assert [encoding.decode(piece) for piece in pieces] == elements
    assert encoding.decode(encoding.join_list(pieces)) == elements


# ------------------------------------------------------------------------------------------------------------- refusals


class Thing:
    def __repr__(self) -> str:
        return "Thing()"  # an address would name its test anew in every process


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Thing(), "tests.test_encoding.Thing"),
        (Thing, "type"),
        (len, "builtin"),
        ([1, {"x": Thing()}], "Thing"),
        (1j, "complex"),
        (range(3), "range"),
        (2**64, "2\\*\\*64"),
        ("\ud800", "surrogates"),
        (numpy.array([Thing()]), "dtype object"),
        (numpy.array(["x"]), "dtype str"),
        (numpy.array(["2020-01-01"], "datetime64[D]"), "dtype datetime64"),
        (numpy.zeros(2, [("a", "i4")]), "dtype void"),
        (numpy.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
        (numpy.longdouble(1), "longdouble"),
        (numpy.complex64(1), "complex"),
    ],
)
def test_anything_else_is_refused_by_name(value: object, says: str):
    with pytest.raises(BadValue, match=says):
        encoding.encode(value)


def test_a_value_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(BadValue):
        encoding.encode(loop)


@pytest.mark.parametrize(
    ("dtype", "shape", "body"),
    [
        ("object", [1], b"x" * 8),
        ("float33", [1], b"x" * 4),
        ("<f4", [1], b"x" * 4),
        ("", [1], b""),
        ("float32", [2], b"x" * 4),
        ("float32", [1], b"x" * 5),
        ("float32", [], b""),
        ("int8", [-1], b""),
        ("int8", [-1, -1], b"x"),
        ("int8", [1] * 33, b"x"),
        ("int8", [2**32, 2**32], b""),
        ("int8", [0, 2**63], b""),
        ("int8", [0, 2**64 - 1], b""),
        ("int8", [2**62, 0], b""),
        ("int8", [2**20, 2, 0], b""),
        ("int8", "3", b"xxx"),
        (8, [1], b"x"),
        ("int8", [1.5], b"x"),
    ],
)
def test_a_tensor_that_lies_about_itself_is_refused(dtype: object, shape: object, body: bytes):
    with pytest.raises(BadValue, match="not a value"):
        encoding.decode(a_tensor(dtype, shape, body))


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(BadValue, match="hashable"):
        encoding.decode(b"\x81" + a_tensor("int8", [1], b"x") + b"\x01")


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xd4\x05\x00",
        b"\xc7\x01\x01\xff",
        b"\x91" * 100_000,
    ],
    ids=["empty", "no opcode", "two values", "long list", "long text", "other extension", "short tensor", "deep"],
)
def test_what_is_no_value_is_refused(blob: bytes):
    with pytest.raises(BadValue, match="not a value"):
        encoding.decode(blob)


@given(st.binary(max_size=60))
def test_no_bytes_whatever_raise_anything_but_bad_value(blob: bytes):
    for read in (encoding.decode, encoding.list_items, encoding.from_json):
        with contextlib.suppress(BadValue):
            read(blob)


@given(tensors, st.data())
def test_a_damaged_tensor_is_refused_or_is_still_a_value(tensor: numpy.ndarray, data: st.DataObject):
    blob = bytearray(encoding.encode(tensor))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(BadValue):
        encoding.decode(bytes(blob))


@pytest.mark.parametrize("blob", [encoding.encode(3), encoding.encode({"a": 1}), b"", b"\x92\x01", b"\x91" * 100_000])
def test_only_a_list_can_be_gone_over(blob: bytes):
    with pytest.raises(BadValue, match="needs a list"):
        encoding.list_items(blob)


# ----------------------------------------------------------------------------------------------------------------- JSON


@given(plain)
def test_json_is_what_a_client_would_expect(value: object):
    def as_json(inner: object) -> object:
        if isinstance(inner, bytes):
            return base64.b64encode(inner).decode()
        if isinstance(inner, list):
            return [as_json(element) for element in inner]
        if isinstance(inner, dict):
            return {key: as_json(element) for key, element in inner.items()}
        if isinstance(inner, float) and math.isinf(inner):
            return None
        return inner

    assert encoding.from_json(encoding.to_json(value)) == as_json(value)


@given(arrays.arrays("float32", arrays.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=st.floats(-1, 1, width=32)))
def test_a_tensor_becomes_nested_lists(tensor: numpy.ndarray):
    assert encoding.from_json(encoding.to_json(tensor)) == tensor.tolist()


@pytest.mark.parametrize("value", [Thing(), 1j, numpy.array([1j]), numpy.longdouble(1), "\ud800", {(1, 2): 3}], ids=repr)
def test_what_has_no_json_form_is_refused(value: object):
    with pytest.raises(BadValue, match="no JSON form"):
        encoding.to_json(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1,2",
        b"NaN",
        b"Infinity",
        b"1e999",
        b"9" * 5_000,
        b'"\\ud800"',
        b"\xff",
        b'"\x00"',
        b"[]x",
        b"{'a':1}",
        b"[1,]",
        b"\xef\xbb\xbf1",
    ],
)
def test_what_is_not_json_is_refused(text: bytes):
    with pytest.raises(BadValue, match="not JSON"):
        encoding.from_json(text)


@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_bounded_exactly(before: bytes, after: bytes):
    most = encoding.MAX_DEPTH
    encoding.from_json(before * most + b"1" + after * most)
    with pytest.raises(BadValue, match="nested deeper than 64"):
        encoding.from_json(before * (most + 1) + b"1" + after * (most + 1))


def test_a_million_levels_are_refused_like_a_hundred():
    with pytest.raises(BadValue, match="nested deeper"):
        encoding.from_json(b"[" * 1_000_000 + b"]" * 1_000_000)


@given(st.recursive(st.just([]), lambda inner: st.lists(inner | st.just('[{"\\'), max_size=3), max_leaves=60), st.integers(1, 6))
def test_brackets_in_texts_do_not_count_as_depth(value: list, limit: int):
    def depth(inner: object) -> int:
        return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0

    assert encoding._is_deeper_than(msgspec.json.encode(value), limit) == (depth(value) > limit)


def test_looking_for_depth_is_cheap_on_a_large_body():
    """A megabyte of small lists, as images come, must not hold up everybody else."""
    body = b"[" + b",".join([b'[1.5,"]]]]",3.5]'] * 65_000) + b"]"
    began = time.process_time()
    encoding._is_deeper_than(body, encoding.MAX_DEPTH)
    assert time.process_time() - began < 0.5
