"""ONNX without code: the batch axis is found by its meaning, and it is said where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.sdk.model_function import RowBatcher
from lamina.sdk.model_signatures import _Value, _why_unbatched, read_onnx
from lamina.sdk.tensors import Port, Signature, Tensor


def with_output(kind: int, about: bytes) -> bytes:
    """An ONNX file with one output `y`, whose type has this field: 1 is a tensor's, 4 a sequence's."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    return field(7, field(12, field(1, b"y") + field(2, field(kind, about))))


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
        ([value("x", "time", 4)], [value("y", "time", 4)], "the first axis of input 'x' is 'time', and no batch"),
        ([value("ids", "seq_len")], [value("y", "seq_len", 8)], "'seq_len', and no batch"),
        ([], [value("y", "batch")], "no inputs"),
        ([value("x")], [value("y", "batch")], "input 'x' has no first axis"),
    ],
)
def test_what_is_no_batch_is_said_with_its_reason(inputs: list[_Value], outputs: list[_Value], told: str) -> None:
    assert told in _why_unbatched(inputs, outputs)


def test_a_model_whose_first_axis_is_no_batch_after_all_is_run_one_at_a_time() -> None:
    batcher = RowBatcher(
        Signature((Port("x", Tensor("FP32", (2,))),), (Port("y", Tensor("FP32", (2,))),), "onnxruntime_onnx"), True
    )
    rows = [np.array([1.0, 2.0], "f4"), np.array([3.0, 4.0], "f4")]
    forward = lambda feeds: {"y": feeds["x"].sum(axis=0, keepdims=True)}  # noqa: E731 - it joins what it gets
    found = batcher.run({"x": rows}, forward)
    assert [list(one) for one in found] == [[1.0, 2.0], [3.0, 4.0]]


def batcher(outputs: int = 1) -> RowBatcher:
    ports = tuple(Port(f"y{at}", Tensor("FP32", (2,))) for at in range(outputs))
    return RowBatcher(Signature((Port("x", Tensor("FP32", (2,))),), ports, "onnxruntime_onnx"), True, "tiny.onnx")


ROWS = [np.array([1.0, 2.0], "f4"), np.array([3.0, 4.0], "f4")]
Feeds = dict[str, Any]


@pytest.mark.parametrize(
    "mixing",
    [
        lambda feeds: {"y0": np.exp(feeds["x"]) / np.exp(feeds["x"]).sum(axis=0)},  # a softmax over the batch
        lambda feeds: {"y0": feeds["x"] @ feeds["x"].T},  # each against all: its shape tells
    ],
)
def test_requests_that_would_change_each_others_results_are_run_one_at_a_time(
    mixing: Callable[[Feeds], Feeds], caplog: pytest.LogCaptureFixture
) -> None:
    rows, alone = batcher(), [mixing({"x": row[None]})["y0"][0] for row in ROWS]
    for _ in range(2):
        found = rows.run({"x": list(ROWS)}, mixing)
        assert [one.tolist() for one in found] == [one.tolist() for one in alone]
    assert len(caplog.records) == 1 and "tiny.onnx" in caplog.text


def test_independent_rows_are_compared_once() -> None:
    sizes: list[int] = []

    def forward(feeds: Feeds) -> Feeds:
        sizes.append(len(feeds["x"]))
        return {"y0": feeds["x"] * 2}

    rows = batcher()
    for given in (ROWS[:1], [ROWS[0], ROWS[0]], ROWS, ROWS):  # equal rows prove nothing
        rows.run({"x": list(given)}, forward)
    assert sizes == [1, 2, 1, 2, 1, 2]


def test_a_model_that_plays_dice_keeps_its_batches() -> None:
    dice = np.random.default_rng(7)
    rows, sizes = batcher(), list[int]()

    def forward(feeds: Feeds) -> Feeds:
        sizes.append(len(feeds["x"]))
        return {"y0": dice.random(feeds["x"].shape)}

    for _ in range(2):
        rows.run({"x": list(ROWS)}, forward)
    assert sizes == [2, 1, 1, 2]


def test_labels_are_text() -> None:
    labels = np.array(["yes", "no"], dtype=object)
    assert batcher().run({"x": list(ROWS)}, lambda feeds: {"y0": labels[: len(feeds["x"])]}) == ["yes", "no"]


@pytest.mark.parametrize(
    ("content", "said", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n", "not protobuf", "git lfs pull"),
        (with_output(4, b""), "output 'y' is a sequence, and no tensor", "zipmap"),
        (with_output(1, b"\x08\x10"), "output 'y' is bfloat16, which cannot be served", "another type"),
    ],
)
def test_a_file_that_cannot_be_served_says_what_to_do(tmp_path: Path, content: bytes, said: str, hint: str) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(BadValue, match=said) as refused:
        read_onnx(tmp_path / "m.onnx")
    assert hint in refused.value.hint
