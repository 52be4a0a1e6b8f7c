"""ONNX without code: the batch axis is found by its meaning, and it is said where there is none."""

from __future__ import annotations

import pytest

from lamina.sdk.model_signatures import _Value, _why_unbatched


def value(name: str, *shape: int | str) -> _Value:
    return _Value(name, "FP32", shape)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([value("bytes", "unk__214", 2048)], [value("label", "unk__215", 214)]),  # magika
        (
            [value("x", "DynamicDimension.0", 3, "DynamicDimension.1", "DynamicDimension.2")],
            [value("y", "ConvTranspose_459_o0__d0", 1)],
        ),
        ([value("ids", "batch", "seq"), value("mask", "batch", "seq")], [value("y", "batch", 2)]),
        ([value("x", "", 4)], [value("y", "N", 1)]),
        ([value("image", "batch_size", 3, 224, 224)], [value("y", "unk__1", 1000)]),
    ],
)
def test_an_unknown_first_axis_that_means_a_batch_is_one(inputs: list[_Value], outputs: list[_Value]) -> None:
    assert _why_unbatched(inputs, outputs) == ""


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([value("image", 1, 3, 320, 320)], [value("y", 1, 22)], "input 'image' has the fixed length 1"),
        ([value("audio", "batch", 512), value("state", 2, "batch", 128)], [value("y", "batch", 1)], "input 'state'"),
        ([value("image", "batch", 3)], [value("boxes", "num_boxes", 4)], "'num_boxes'"),
        ([value("text", "length")], [value("y", "tokens", 4)], "'length'"),
        ([], [value("y", "batch")], "no inputs"),
        ([value("x")], [value("y", "batch")], "input 'x' has no first axis"),
    ],
)
def test_what_is_no_batch_is_said_with_its_reason(inputs: list[_Value], outputs: list[_Value], told: str) -> None:
    assert told in _why_unbatched(inputs, outputs)


def test_a_model_whose_first_axis_is_no_batch_after_all_is_run_one_at_a_time() -> None:
    numpy = pytest.importorskip("numpy")
    from lamina.sdk.model_function import RowBatcher
    from lamina.sdk.tensors import Port, Signature, Tensor

    batcher = RowBatcher(
        Signature((Port("x", Tensor("FP32", (2,))),), (Port("y", Tensor("FP32", (2,))),), "onnxruntime_onnx"), True
    )
    rows = [numpy.array([1.0, 2.0], "f4"), numpy.array([3.0, 4.0], "f4")]
    forward = lambda feeds: {"y": feeds["x"].sum(axis=0, keepdims=True)}  # noqa: E731 - it joins what it gets
    found = batcher.run({"x": rows}, forward)
    assert [list(one) for one in found] == [[1.0, 2.0], [3.0, 4.0]]
