"""Model files without code: their signatures, model repositories, and a server of nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.sdk.app_loader import load_app
from lamina.sdk.binding import bind
from lamina.sdk.model_bundle import ModelBundle, parse_model_option
from lamina.sdk.model_repository import ModelEntry, parse_pbtxt, read_repository
from lamina.sdk.model_signatures import read_onnx
from lamina.sdk.sample_inputs import samples_of
from lamina.sdk.tensors import Tensor
from tests.sdk.tiny_onnx import model, shaped

pytest.importorskip("onnxruntime", reason="pip install 'lamina[onnx]'")

DOUBLE = [("Add", ["x", "x"], "y")]


def file(
    folder: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], nodes: Any = None, name: str = "m.onnx"
) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shaped(nodes or DOUBLE, inputs, outputs))
    return path


# ------------------------------------------------------------------------- files


def test_a_shared_unknown_first_length_is_a_batch(tmp_path: Path) -> None:
    found = read_onnx(file(tmp_path, {"x": ["n", 4]}, {"y": ["n", 4]}))
    assert found.batched
    assert found.signature.inputs[0].tensor == Tensor("FP32", [4])


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"x": [1, 4]}, {"y": [1, 4]}),
        ({"x": ["n", 4]}, {"y": ["boxes", 4]}),
        ({"x": ["n", 4]}, {"y": [4]}),
        ({"x": ["n"], "z": ["m"]}, {"y": ["n"]}),
        ({"x": []}, {"y": []}),
    ],
)
def test_anything_else_is_not(tmp_path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> None:
    assert not read_onnx(file(tmp_path, inputs, outputs)).batched


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x3a\xff\xff", model(DOUBLE, ["x"], ["y"])[:20]])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BadValue, match="no ONNX model"):
        read_onnx(path)


def opened(*entries: ModelEntry) -> Any:
    return load_app(ModelBundle(list(entries)).target(Path()))


def test_a_file_runs_in_batches_by_itself(tmp_path: Path) -> None:
    app = opened(parse_model_option(f"twice={file(tmp_path, {'x': ['n', 2]}, {'y': ['n', 2]})}"))
    runner = app.functions["twice"].open()
    rows = [{"x": np.array([n, 1], np.float32)} for n in range(3)]
    assert [row.tolist() for row in runner.run(rows)] == [[0, 2], [2, 2], [4, 2]]


def test_items_of_unequal_shape_share_no_array(tmp_path: Path) -> None:
    app = opened(parse_model_option(f"twice={file(tmp_path, {'x': ['n', 'm']}, {'y': ['n', 'm']})}"))
    runner = app.functions["twice"].open()
    rows = [{"x": [1.0]}, {"x": [1.0, 2.0]}, {"x": [3.0]}]
    assert [row.tolist() for row in runner.run(rows)] == [[2], [2, 4], [6]]


def test_a_file_without_a_batch_axis_takes_what_it_takes(tmp_path: Path) -> None:
    app = opened(parse_model_option(f"twice={file(tmp_path, {'x': [1, 2]}, {'y': [1, 2]})}"))
    function = app.functions["twice"]
    assert function.spec.max_batch == 1
    assert function.local(x=[[1, 2]]).tolist() == [[2, 4]]
    with pytest.raises(BadValue, match="shape"):
        function.local(x=[1, 2])


def test_names_that_are_no_python_names_are_inputs_all_the_same(tmp_path: Path) -> None:
    nodes = [("Add", ["input.1", "data:0"], "out/0"), ("Mul", ["input.1", "data:0"], "out/1")]
    inputs = {"input.1": ["n", 1], "data:0": ["n", 1]}
    app = opened(parse_model_option(f"both={file(tmp_path, inputs, {'out/0': ['n', 1], 'out/1': ['n', 1]}, nodes)}"))
    found = app.functions["both"].open().run([{"input.1": [2.0], "data:0": [3.0]}])[0]
    assert {name: array.tolist() for name, array in found.items()} == {"out/0": [5], "out/1": [6]}


def test_an_input_may_be_called_self(tmp_path: Path) -> None:
    nodes = [("Add", ["self", "class"], "inputs")]
    app = opened(parse_model_option(f"m={file(tmp_path, {'self': ['n', 1], 'class': ['n', 1]}, {'inputs': ['n', 1]}, nodes)}"))
    assert app.functions["m"].open().run([{"self": [2.0], "class": [3.0]}])[0].tolist() == [5]


def test_the_schemas_are_those_of_the_tensors(tmp_path: Path) -> None:
    app = opened(parse_model_option(f"twice={file(tmp_path, {'x': ['n', 2]}, {'y': ['n', 2]})}"))
    row = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2, "description": "FP32 of shape [2]"}
    assert [param.schema for param in app.functions["twice"].params] == [row]
    assert app.functions["twice"].result_schema == row
    nodes = [("Add", ["x", "x"], "y"), ("Mul", ["x", "x"], "z")]
    app = opened(parse_model_option(f"both={file(tmp_path, {'x': ['n', 2]}, {'y': ['n', 2], 'z': ['n', 2]}, nodes)}"))
    assert app.functions["both"].result_schema == {"type": "object", "properties": {"y": row, "z": row}, "required": ["y", "z"]}


def test_an_object_of_other_names_is_no_value_of_a_tensor(tmp_path: Path) -> None:
    app = opened(parse_model_option(f"twice={file(tmp_path, {'x': ['n', 2]}, {'y': ['n', 2]})}"))
    with pytest.raises(BadValue, match="unknown parameter 'scale'"):
        bind(app.functions["twice"].params, {"x": [1, 2], "scale": 3})


def test_zeros_of_the_right_shape_are_samples(tmp_path: Path) -> None:
    target = ModelBundle([parse_model_option(f"twice={file(tmp_path, {'x': ['n', 'm', 3]}, {'y': ['n', 'm', 3]})}")]).target(
        tmp_path
    )
    app = load_app(target)
    assert samples_of(app, target)["twice"][0]["x"].shape == (1, 3)


def test_models_may_stand_beside_an_app(tmp_path: Path) -> None:
    path = tmp_path / "beside_app.py"
    path.write_text("import lamina\napp = lamina.App('mine')\n@app.function()\ndef f(x):\n    return x\n")
    entry = parse_model_option(f"twice={file(tmp_path, {'x': ['n', 2]}, {'y': ['n', 2]})}")
    assert list(load_app(ModelBundle([entry], str(path)).target(tmp_path)).functions) == ["f", "twice"]


@pytest.mark.parametrize("text", ["", "twice", "=m.onnx", "twice=", "twice=/nowhere/m.onnx"])
def test_what_is_not_name_and_file_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="--model"):
        parse_model_option(text)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(b"x")
    with pytest.raises(BadValue, match="no kind of model"):
        opened(parse_model_option(f"m={tmp_path / 'm.pkl'}"))


# --------------------------------------------------------------------- repository

CONFIG = """
# what everybody writes
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x", data_type: TYPE_FP32, dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
version_policy: { specific: { versions: [1, 3] } }
parameters { key: "slo" value: { string_value: "50ms" } }
"""


def repository(folder: Path, config: str = CONFIG, versions: tuple[int, ...] = (1, 2, 3)) -> list[ModelEntry]:
    for version in versions:
        file(folder, {"x": ["n", 2]}, {"y": ["n", 2]}, name=f"twice/{version}/model.onnx")
    if config:
        (folder / "twice" / "config.pbtxt").write_text(config)
    return read_repository(folder)


def test_a_repository_is_read_with_its_configuration(tmp_path: Path) -> None:
    entries = repository(tmp_path)
    assert [entry.version for entry in entries] == ["1", "3"]
    assert (entries[0].max_batch, entries[0].instances, entries[0].slo) == (8, 2, "50ms")
    app = opened(*entries)
    assert {name: function.signature.version for name, function in app.functions.items()} == {"twice.v1": "1", "twice": "3"}
    assert app.functions["twice"].spec.max_batch == 8 and app.functions["twice"].spec.slo.latency_us == 50_000


def test_without_a_configuration_the_newest_version_is_served(tmp_path: Path) -> None:
    assert [(entry.version, entry.max_batch) for entry in repository(tmp_path, "")] == [("3", None)]


def test_a_batch_size_of_zero_leaves_the_axis_to_the_caller(tmp_path: Path) -> None:
    app = opened(*repository(tmp_path, "max_batch_size: 0"))
    assert app.functions["twice"].signature.inputs[0].tensor == Tensor("FP32", [-1, 2])


WRONG = {
    'name: "other"': "name",
    "max_batch_size: many": "max_batch_size",
    'input { name: "z" data_type: TYPE_FP32 dims: 2 }': "input 'z'",
    'input { name: "x" data_type: TYPE_INT8 dims: 2 }': "input 'x'",
    'input { name: "x" data_type: TYPE_FP32 dims: 3 }': "input 'x'",
    "version_policy { specific { versions: 7 } }": "version_policy",
    'default_model_filename: "../../secret"': "default_model_filename",
    'default_model_filename: "other.onnx"': "other.onnx",
    'parameters { key: "cores" value { string_value: "x" } }': "cores",
    "input {": "missing",
    "}": "field",
    "max_batch_size": "ends",
    "a { " * 30: "nested",
}


@pytest.mark.parametrize("config", WRONG)
def test_a_configuration_that_does_not_fit_says_where(tmp_path: Path, config: str) -> None:
    with pytest.raises(BadValue, match=WRONG[config]):
        opened(*repository(tmp_path, config))


def test_a_folder_that_cannot_be_a_name_is_refused(tmp_path: Path) -> None:
    file(tmp_path, {"x": ["n"]}, {"y": ["n"]}, name="Bad Name/1/model.onnx")
    with pytest.raises(BadValue, match="Bad Name"):
        read_repository(tmp_path)


def test_the_text_format_is_read() -> None:
    text = "a: 1 b { c: 'x' \"y\" } b < c: -2.5 > d: [1, 2]; d: 3 # end\ne: WORD f: true"
    found = parse_pbtxt(text, "it")
    assert found == {"a": [1], "b": [{"c": ["xy"]}, {"c": [-2.5]}], "d": [1, 2, 3], "e": ["WORD"], "f": [True]}


# ----------------------------------------------------------------------- the whole


@pytest.mark.live
def test_a_model_file_is_all_a_server_needs(tmp_path: Path) -> None:
    path = file(tmp_path, {"x": ["n", 2]}, {"y": ["n", 2]})
    command = [sys.executable, "-m", "lamina", "serve", "--model", f"twice={path}", "--port", "0", "--json", "--store", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]}]}
        try:
            with urllib.request.urlopen(f"{url}/v2/models/twice/infer", json.dumps(body).encode(), timeout=60) as answer:
                said = json.loads(answer.read())
        finally:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert said["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [2.0, 4.0, 6.0, 8.0]}]


def test_a_model_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    assert parse_model_option(str(file(tmp_path, {"x": ["n"]}, {"y": ["n"]}))).name == "m"
