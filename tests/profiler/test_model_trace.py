"""Model traces: static records of torch modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.errors import BadValue
from lamina.profiler.model_trace import predict_profile, trace_model

torch = pytest.importorskip("torch")

app = lamina.App("traced")


def net() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@app.function(gpu=lamina.GPU(), batch=8)
class Seen(lamina.TorchModel):
    def load(self) -> Any:
        return net(), torch.zeros(1, 3, 32, 32)


@app.function(gpu=lamina.GPU(), batch=8)
def unseen(x: Any) -> Any:
    return x


def test_arithmetic_is_counted_per_batch() -> None:
    record = trace_model("net", net(), (torch.zeros(1, 3, 32, 32),))
    assert record["flops_b1"] == 2 * 32 * 32 * 8 * 27 + 2 * 8 * 4
    assert record["flops_b8"] == 8 * record["flops_b1"]


def test_weights_do_not_grow_with_the_batch() -> None:
    record = trace_model("net", net(), (torch.zeros(1, 3, 32, 32),))
    assert record["read_bytes_b8"] < 8 * record["read_bytes_b1"]
    assert [row[0] for row in record["operators"]] == ["conv", "elementwise", "pool", "matmul"]


def test_tracing_leaves_the_module_where_it_is() -> None:
    module = net()
    trace_model("net", module, (torch.zeros(1, 3, 32, 32),))
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_a_module_that_looks_at_its_numbers_cannot_be_traced() -> None:
    class Looks(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(BadValue, match=r"'looks' cannot be traced"):
        trace_model("looks", Looks(), (torch.zeros(1, 3),))


def test_a_model_that_was_never_run_gets_a_profile() -> None:
    profile = predict_profile(app.functions["seen"], "h200")
    assert profile.meta["source"] == "predicted" and profile.traits is not None
    assert max(point.batch for point in profile.points) == 8
    assert all(0 < point.p50_us < point.p99_us for point in profile.points)


def test_a_function_that_is_no_model_is_refused_with_advice() -> None:
    with pytest.raises(BadValue, match="no torch model"):
        predict_profile(app.functions["unseen"], "h200")


def predict(folder: Path) -> Any:
    from click.testing import CliRunner

    from lamina.cli.profile import command

    words = [f"{__file__}:seen", "--predict", "h200", "--json", "--out", str(folder)]
    return CliRunner().invoke(command, words, catch_exceptions=False)


def test_the_command_writes_it_as_often_as_it_is_asked(tmp_path: Path) -> None:
    for _ in range(2):
        told = json.loads(predict(tmp_path).stdout)
        assert told["source"] == "predicted" and Path(told["file"]) == tmp_path / "seen.h200.json"
        assert (tmp_path / "seen.h200.json").exists()


def test_places_worth_measuring_are_within_the_largest_batch(tmp_path: Path) -> None:
    assert "batch 2 on 6 units" in json.loads(predict(tmp_path).stdout)["worth_measuring"]
    assert "batch 32" not in json.loads(predict(tmp_path).stdout)["worth_measuring"]


def test_a_guess_never_replaces_a_measured_profile(tmp_path: Path) -> None:
    measured = '{"function": "seen", "device": "h200", "points": [{"batch": 1, "units": 1, "p50_us": 5}]}'
    (tmp_path / "seen.h200.json").write_text(measured)
    with pytest.raises(BadValue, match="was measured"):
        predict(tmp_path)
    assert (tmp_path / "seen.h200.json").read_text() == measured
