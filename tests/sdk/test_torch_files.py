"""Torch files without code: exported graphs, and weights beside a config.json."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.sdk.app_loader import load_app
from lamina.sdk.model_bundle import ModelBundle, parse_model_option
from lamina.sdk.model_signatures import read_pt2
from lamina.sdk.tensors import Tensor

FLOAT, LONG = 7, 5


def graph(sizes: list[Any], limits: dict[str, Any] | None = None, dtype: int = FLOAT) -> dict[str, Any]:
    """An exported model of one input and one output, as far as its metadata goes."""

    def length(size: Any) -> dict[str, Any]:
        if isinstance(size, int):
            return {"as_int": size}
        return {"as_expr": {"expr_str": f"Symbol('{size}', positive=True, integer=True)"}}

    about = {"dtype": dtype, "sizes": [length(size) for size in sizes]}
    specs = {"input_specs": [{"parameter": {}}, {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}]}
    specs["output_specs"] = [{"user_output": {"arg": {"as_tensor": {"name": "y"}}}}]
    inner = {"graph": {"tensor_values": {"x": about, "y": about}}, "signature": specs}
    return {"graph_module": inner, "range_constraints": limits or {}}


def archive(path: Path, model: Any, config: dict[str, Any] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("m/models/model.json", json.dumps(model))
        made.writestr("m/data/weights/model_weights_config.json", json.dumps({"config": config or {}}))
    return path


def test_a_graph_tells_its_tensors_and_its_batch(tmp_path: Path) -> None:
    found = read_pt2(archive(tmp_path / "m.pt2", graph(["s0", 4], {"s0": {"min_val": 2, "max_val": 64}})))
    assert (found.batched, found.least, found.most) == (True, 2, 64)
    assert found.signature.inputs[0].tensor == Tensor("FP32", [4])


def test_a_graph_of_one_shape_has_no_batch(tmp_path: Path) -> None:
    found = read_pt2(archive(tmp_path / "m.pt2", graph([1, 4], dtype=LONG)))
    assert not found.batched and found.signature.outputs[0].tensor == Tensor("INT64", [1, 4])


def test_a_pickle_among_the_weights_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.pt2", graph([1]), {"w": {"path_name": "weight_0", "use_pickle": True}})
    with pytest.raises(BadValue, match="pickle"):
        read_pt2(path)


@pytest.mark.parametrize("model", [{}, [], {"graph_module": 7}, graph([1], dtype=99)])
def test_what_is_no_exported_model_is_refused(tmp_path: Path, model: Any) -> None:
    with pytest.raises(BadValue):
        read_pt2(archive(tmp_path / "m.pt2", model))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"x")
    with pytest.raises(BadValue, match="no exported model"):
        read_pt2(tmp_path / "m.pt2")


def functions(path: Path, more: str = "") -> Any:
    return load_app(ModelBundle([parse_model_option(f"m={path}{more}")]).target(path.parent)).functions


def poison(path: Path, trace: Path) -> None:
    """Put a pickle that leaves a trace where torch keeps sample inputs, and would open it."""
    with zipfile.ZipFile(path) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as made:
        for name, content in parts.items():
            evil = f"cos\nsystem\n(S'touch {trace}'\ntR.".encode()
            made.writestr(name, evil if "sample_inputs" in name else content)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ",gpu=1/4"], ids=["cpu", "as for a gpu"])
def test_an_exported_model_runs_in_batches_of_any_size(tmp_path: Path, more: str) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'lamina[torch]'")

    class Twice(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, image: Any) -> Any:
            return image * 2, image.sum(1)

    batch = torch.export.Dim("batch", min=2, max=16)
    made = torch.export.export(Twice(), (torch.rand(3, 2),), dynamic_shapes={"image": {0: batch}})
    path = tmp_path / "twice.pt2"
    torch.export.save(made, path)
    poison(path, tmp_path / "run")
    function = functions(path, more)["m"]
    assert function.spec.max_batch == 16 and function.spec.gpu == ("may" if more else "no")
    rows = [{"image": np.array([n, 1], np.float32)} for n in range(3)]
    runner = function.open()
    for count in (1, 3):
        found = runner.run(rows[:count])
        assert [[part.tolist() for part in row.values()] for row in found] == [[[2 * n, 2], n + 1] for n in range(count)]
    assert not (tmp_path / "run").exists(), "the pickle in it was opened"


SAFE = {"module": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 1, "bias": False}}
SAFE |= {"inputs": {"x": ["FP32", [-1, 2]]}, "outputs": {"y": ["FP32", [-1, 1]]}}


def safetensors(folder: Path, config: Any = SAFE) -> Path:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("<2f", 3, 5))
    (folder / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("more", ["", ",gpu=1/4"], ids=["cpu", "as for a gpu"])
def test_weights_beside_a_config_run(tmp_path: Path, more: str) -> None:
    pytest.importorskip("torch", reason="pip install 'lamina[torch]'")
    function = functions(safetensors(tmp_path), more)["m"]
    rows = [{"x": [1, 0]}, {"x": [0, 1]}]
    assert [row.tolist() for row in function.open().run(rows)] == [[3], [5]]


@pytest.mark.parametrize("config", [{}, {**SAFE, "more": 1}, {**SAFE, "inputs": {"x": ["FP8", [1]]}}])
def test_a_config_that_says_too_little_or_too_much_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(BadValue):
        functions(safetensors(tmp_path, config))


@pytest.mark.parametrize(
    ("more", "says"),
    [(",slo", "no setting"), (",colour=red", "no setting"), (",cores=two", "whole number"), (",gpu=7", "gpu.share")],
)
def test_settings_behind_a_file_are_checked(tmp_path: Path, more: str, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        functions(safetensors(tmp_path), more)


def test_settings_behind_a_file_are_the_functions(tmp_path: Path) -> None:
    spec = functions(safetensors(tmp_path), ",slo=50ms,cores=2,batch=4,gpu=1/4")["m"].spec
    assert (spec.slo.latency_us, spec.cores, spec.max_batch, spec.share) == (50_000, 2, 4, 0.25)


@pytest.mark.parametrize("shape", [[-1, -1], [1, 2]])
def test_a_gpu_takes_batches_of_one_shape(tmp_path: Path, shape: list[int]) -> None:
    config = {**SAFE, "inputs": {"x": ["FP32", shape]}}
    with pytest.raises(BadValue, match="gpu: input 'x'"):
        functions(safetensors(tmp_path, config), ",gpu=1/4")
