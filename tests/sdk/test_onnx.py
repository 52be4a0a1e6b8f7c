from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest

import lamina
from lamina.errors import BadValue, LoadFailed
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.onnx import MAX_SESSIONS

from . import tiny_onnx

X = numpy.array([1, 2], dtype=numpy.float32)


@pytest.fixture
def doubler(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "doubler.onnx"
    path.write_bytes(tiny_onnx.model([("Add", ["x", "x"], "y")], ["x"], ["y"]))
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "two.onnx"
    path.write_bytes(tiny_onnx.model([("Add", ["a", "b"], "sum"), ("Sub", ["a", "b"], "gap")], ["a", "b"], ["sum", "gap"]))
    return path


def test_a_model_with_one_input_takes_the_array_itself(doubler: Path):
    assert lamina.onnx_model(doubler).run(X).tolist() == [2, 4]


def test_a_model_takes_its_inputs_by_name(doubler: Path):
    assert lamina.onnx_model(str(doubler)).run({"x": X}).tolist() == [2, 4]


def test_several_outputs_come_by_name(two: Path):
    found = lamina.onnx_model(two).run({"a": X, "b": X})
    assert {name: array.tolist() for name, array in found.items()} == {"sum": [2, 4], "gap": [0, 0]}


def test_several_inputs_need_names(two: Path):
    with pytest.raises(BadValue, match=r"two\.onnx has 2 inputs") as caught:
        lamina.onnx_model(two).run(X)
    assert caught.value.hint == "give a dict with a, b"


def test_threads_follow_the_units_of_the_batch(doubler: Path):
    model = lamina.onnx_model(doubler)
    with active_context(BatchContext(units=2)):
        assert model.session().get_session_options().intra_op_num_threads == 2


def test_a_session_is_kept_for_each_number_of_units(doubler: Path):
    model = lamina.onnx_model(doubler)
    first = model.session(1)
    model.session(2)
    assert model.session(1) is first


def test_the_least_used_session_goes_when_there_are_too_many(doubler: Path):
    model = lamina.onnx_model(doubler)
    first, second = model.session(1), model.session(2)
    for threads in (1, *range(3, MAX_SESSIONS + 2)):
        model.session(threads)
    assert model.session(1) is first
    assert model.session(2) is not second


def test_a_missing_file_is_named():
    with pytest.raises(BadValue, match=r"no model at 'nowhere\.onnx'"):
        lamina.onnx_model("nowhere.onnx")


def test_a_file_that_is_no_model_cannot_be_loaded(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(LoadFailed, match=r"text\.onnx cannot be loaded"):
        lamina.onnx_model(tmp_path / "text.onnx").run(X)


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "any.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(LoadFailed, match="onnxruntime is not installed") as caught:
        lamina.onnx_model(tmp_path / "any.onnx").run(X)
    assert "lamina[onnx]" in caught.value.hint
