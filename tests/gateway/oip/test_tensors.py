"""Raw tensors to values and back: not a bit is lost."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import encoding
from lamina.errors import BadValue
from lamina.gateway.oip import json_tensors, row_conversion, tensors
from lamina.gateway.oip.model_catalog import ServedModel, make_model
from lamina.gateway.oip.tensors import SIZES, InputTensor
from lamina.gateway.oip.validation import MAX_ROWS, validate_request
from lamina.gateway.routes.router import CallTarget
from lamina.sdk.binding import Param
from lamina.sdk.tensors import NUMPY, Port, Signature, Tensor
from lamina.types import FunctionSpec, Slo

FIXED = sorted(SIZES)


def model(tensor: Tensor | None = None, *, batch: int = 1, outputs: tuple[Port, ...] = (), required: bool = True) -> ServedModel:
    tensor = tensor or Tensor("FP32", [4])
    signature = Signature((Port("x", tensor, required),), outputs or (Port("output", tensor),))
    target = CallTarget("m", "function", (Param("x"),), Slo(), signature=signature)
    return make_model(target, FunctionSpec(name="m", max_batch=batch))


def through(one: ServedModel, given: InputTensor) -> Any:
    """What comes back when the function gives back what it gets."""
    count = validate_request(one, [given], [])
    calls = row_conversion.split_rows(one, [given], count)
    blobs = [encoding.encode(encoding.decode(call["x"])) for call in calls]
    return row_conversion.join_rows(one, blobs)[0]


@given(st.sampled_from(FIXED), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans(), st.randoms())
def test_every_bit_of_every_dtype_comes_back(dtype: str, shape: list[int], batched: bool, rng: Any) -> None:
    shape = [max(1, shape[0]), *shape[1:]] if batched else shape
    raw = bytes(rng.randrange(2 if dtype == "BOOL" else 256) for _ in range(SIZES[dtype] * math.prod(shape)))
    inner = shape[1:] if batched else shape
    back = through(model(Tensor(dtype, [-1] * len(inner)), batch=8 if batched else 1), InputTensor("x", dtype, shape, raw))
    assert (back.dtype, back.shape) == (dtype, shape)
    assert bytes(back.data) == raw


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6), st.booleans())
def test_bytes_of_any_kind_come_back(elements: list[bytes], batched: bool) -> None:
    shape = [len(elements), 1] if batched else [len(elements)]
    one = model(Tensor("BYTES", [1] if batched else [-1]), batch=8 if batched else 1)
    raw = tensors.join_bytes(elements)
    back = through(one, InputTensor("x", "BYTES", shape, raw))
    assert (bytes(back.data), back.shape) == (raw, shape)


@given(st.integers(0, 0xFFFFFFFF) | st.integers(0x7F7F0000, 0x7F810000))  # any, and those around infinity
def test_narrowing_rounds_to_the_nearest_and_keeps_nan(bits: int) -> None:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    back = struct.unpack("<f", tensors.bf16_to_fp32(tensors.fp32_to_bf16(struct.pack("<I", bits))))[0]
    if math.isnan(value):
        assert math.isnan(back)
    elif math.isinf(back):
        assert math.isinf(value) or abs(value) >= 3.3895e38  # beyond the largest there is
    else:
        assert abs(back - value) <= abs(value) * 2**-8 + 1e-40


def test_a_batched_model_gets_one_value_per_row() -> None:
    one = model(batch=8)
    raw = np.arange(8, dtype=np.float32).tobytes()
    calls = row_conversion.split_rows(one, [InputTensor("x", "FP32", [2, 4], raw)], 2)
    assert [encoding.decode(call["x"]).tolist() for call in calls] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_value_without_a_type_travels_as_json() -> None:
    target = CallTarget("m", "function", (Param("x"), Param("y", required=False)), Slo())
    one = make_model(target, None)
    given = InputTensor("x", "BYTES", [1], tensors.join_bytes([b'{"a": [1, null]}']))
    call = row_conversion.split_rows(one, [given], validate_request(one, [given], []))[0]
    assert encoding.decode(call["x"]) == {"a": [1, None]}
    assert bytes(row_conversion.join_rows(one, [call["x"]])[0].data)[4:] == b'{"a":[1,null]}'
    with pytest.raises(BadValue, match="x: an element: not JSON"):  # and not the body, which is
        row_conversion.split_rows(one, [InputTensor("x", "BYTES", [1], tensors.join_bytes([b"abc"]))], 1)


PORTS = (Port("a", Tensor("INT32", [1])), Port("b", Tensor("FP32", [])))


@pytest.mark.parametrize("result", [{"a": [7], "b": 0.5}, [[7], 0.5], {"b": np.float32(0.5), "a": np.array([7])}])
def test_several_outputs_come_by_name_or_in_order(result: Any) -> None:
    outputs = row_conversion.join_rows(model(outputs=PORTS), [encoding.encode(result)])
    assert [(one.name, one.shape, bytes(one.data)) for one in outputs] == [
        ("a", [1], struct.pack("<i", 7)),
        ("b", [], struct.pack("<f", 0.5)),
    ]


@pytest.mark.parametrize("result", [{"a": [7]}, "text", {"a": ["x"], "b": 1}, {"a": [1.5], "b": 1}, [1, 2, 3]])
def test_a_function_that_gives_what_it_does_not_promise_is_found_out(result: Any) -> None:
    with pytest.raises(row_conversion.InvalidOutput):
        row_conversion.join_rows(model(outputs=PORTS), [encoding.encode(result)])


def test_rows_of_different_shapes_are_the_functions_fault() -> None:
    one = model(Tensor("FP32", [-1]), batch=8)
    with pytest.raises(row_conversion.InvalidOutput, match="different shapes"):
        row_conversion.join_rows(one, [encoding.encode(np.zeros(n, np.float32)) for n in (1, 2)])


# ----------------------------------------------------------------------- checks

FLOATS = np.zeros(4, np.float32).tobytes()
WRONG = {
    "another name": InputTensor("y", "FP32", [4], FLOATS),
    "another dtype": InputTensor("x", "FP64", [4], FLOATS * 2),
    "no such dtype": InputTensor("x", "FP8", [4], FLOATS),
    "another length": InputTensor("x", "FP32", [3], FLOATS[:12]),
    "another rank": InputTensor("x", "FP32", [4, 1], FLOATS),
    "rank 0": InputTensor("x", "FP32", [], FLOATS[:4]),
    "rank 33": InputTensor("x", "FP32", [1] * 33, FLOATS[:4]),
    "a negative length": InputTensor("x", "FP32", [-4], FLOATS),
    "too few bytes": InputTensor("x", "FP32", [4], FLOATS[:15]),
    "too many bytes": InputTensor("x", "FP32", [4], FLOATS + b"0"),
    "a product over 2^63": InputTensor("x", "FP32", [2**62, 2**62], FLOATS),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_input_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(BadValue):
        validate_request(model(), [WRONG[name]], [])


def test_a_missing_input_is_refused_and_an_optional_one_is_not() -> None:
    assert validate_request(model(required=False), [], []) == 0
    with pytest.raises(BadValue, match="x: missing"):
        validate_request(model(), [], [])


def test_an_input_given_twice_is_refused() -> None:
    given = InputTensor("x", "FP32", [4], FLOATS)
    with pytest.raises(BadValue, match="twice"):
        validate_request(model(), [given, given], [])


@pytest.mark.parametrize("count", [0, MAX_ROWS + 1])
def test_a_batch_of_nothing_or_of_too_much_is_refused(count: int) -> None:
    with pytest.raises(BadValue, match="rows"):
        validate_request(model(batch=8), [InputTensor("x", "FP32", [count, 4], FLOATS * count)], [])


def test_an_empty_tensor_is_a_tensor() -> None:
    back = through(model(Tensor("FP32", [-1, 3])), InputTensor("x", "FP32", [0, 3], b""))
    assert (back.shape, bytes(back.data)) == ([0, 3], b"")


def test_an_empty_tensor_of_a_billion_rows_is_refused() -> None:
    with pytest.raises(BadValue, match="holds nothing"):
        validate_request(model(Tensor("FP32", [-1, -1])), [InputTensor("x", "FP32", [10**9, 0], b"")], [])


def test_a_bool_is_a_byte_of_zero_or_one() -> None:
    with pytest.raises(BadValue, match="0 or 1"):
        validate_request(model(Tensor("BOOL", [2])), [InputTensor("x", "BOOL", [2], b"\x01\x02")], [])


@pytest.mark.parametrize("wanted", [["z"], ["output", "output"]])
def test_outputs_that_are_not_there_or_asked_for_twice_are_refused(wanted: list[str]) -> None:
    with pytest.raises(BadValue, match="output"):
        validate_request(model(), [InputTensor("x", "FP32", [4], FLOATS)], wanted)


@pytest.mark.parametrize("raw", [b"\x05\x00\x00\x00abc", b"\x01\x00\x00", b"\x00\x00\x00\x00" * 3])
def test_bytes_that_are_not_the_elements_they_say_are_refused(raw: bytes) -> None:
    one = model(Tensor("BYTES", [2]))
    given = InputTensor("x", "BYTES", [2], raw)
    with pytest.raises(BadValue):
        row_conversion.split_rows(one, [given], validate_request(one, [given], []))


# ------------------------------------------------------------------ JSON numbers


@given(st.sampled_from([dtype for dtype in FIXED if "INT" in dtype]), st.data())
def test_integers_come_back_from_json_exactly(dtype: str, data: Any) -> None:
    info = np.iinfo(NUMPY[dtype])
    numbers_in = data.draw(st.lists(st.integers(int(info.min), int(info.max)), max_size=5))
    raw = json_tensors.to_raw("x", dtype, str(numbers_in).encode())
    assert json_tensors.to_list("x", dtype, raw, len(numbers_in)) == numbers_in


@given(st.sampled_from(["FP16", "FP32", "FP64", "BF16"]), st.randoms())
def test_floats_come_back_from_json_exactly(dtype: str, rng: Any) -> None:
    width = SIZES[dtype]
    raw = bytes(rng.randrange(256) for _ in range(4 * width))
    shown = json_tensors.to_list("x", dtype, raw, 4)
    if all(number is not None for number in shown):
        assert json_tensors.to_raw("x", dtype, encoding.to_json(shown)) == raw


@pytest.mark.parametrize("nested", [b"[1, 2, 3, 4]", b"[[1, 2], [3, 4]]", b"[[[1], [2]], [[3], [4]]]"])
def test_data_may_be_flat_or_nested(nested: bytes) -> None:
    assert json_tensors.to_raw("x", "INT8", nested) == b"\x01\x02\x03\x04"


BAD_DATA = [
    ("INT8", b"[128]"),
    ("UINT8", b"[-1]"),
    ("INT32", b"[1.5]"),
    ("INT32", b"[true]"),
    ("BOOL", b"[1]"),
    ("FP32", b"[1e39]"),
]
BAD_DATA += [
    ("FP16", b"[70000]"),
    ("FP32", b"[null]"),
    ("BYTES", b"[1]"),
    ("FP8", b"[1]"),
    ("FP64", b"[1e999]"),
    ("INT64", b"{}"),
]
BAD_DATA += [("UINT64", b"[18446744073709551616]"), ("FP32", b'["1"]'), ("INT8", b"[" * 100 + b"]" * 100)]


@pytest.mark.parametrize(("dtype", "data"), BAD_DATA)
def test_data_of_another_kind_is_refused(dtype: str, data: bytes) -> None:
    with pytest.raises(BadValue):
        json_tensors.to_raw("x", dtype, data)


def test_what_json_has_no_number_for_is_null() -> None:
    raw = np.array([1, np.nan, np.inf], np.float32).tobytes()
    assert json_tensors.to_list("x", "FP32", raw, 3) == [1.0, None, None]
