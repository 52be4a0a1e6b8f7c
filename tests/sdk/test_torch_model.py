"""A torch module as a function, on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lamina
from lamina.errors import BadValue, LoadFailed

torch = pytest.importorskip("torch", reason="torch is not installed")

app = lamina.App("tested")


@app.function(gpu="1/4", batch=4)
class Classify(lamina.TorchModel):
    def load(self) -> tuple[Any, Any]:
        module = torch.nn.Linear(3, 2)
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.copy_(torch.tensor([0.0, 1.0]))
        return module, torch.zeros(1, 3)

    def pre(self, image: Any, scale: float = 1.0) -> Any:
        return np.asarray(image) * scale

    def post(self, row: Any) -> Any:
        return row.tolist()


def test_its_parameters_are_those_of_pre():
    assert [(param.name, param.required) for param in Classify.params] == [("image", True), ("scale", False)]


def test_one_request_is_prepared_run_and_answered():
    assert Classify.local([1, 2, 3], scale=2.0) == [12.0, 13.0]


def test_requests_of_one_batch_fail_alone():
    results = Classify.open().run([{"image": [1, 2, 3]}, {"image": [1, 2]}, {}])
    assert results[0] == [6.0, 7.0] and [type(one) for one in results[1:]] == [BadValue, BadValue]


def test_a_load_that_returns_something_else_says_what_to_return():
    @app.function(name="wrong", batch=2)
    class Wrong(lamina.TorchModel):
        def load(self) -> Any:
            return torch.nn.Linear(1, 1)

    with pytest.raises(LoadFailed, match="returned Linear"):
        Wrong.open()


def test_it_cannot_be_called_like_a_python_object():
    with pytest.raises(BadValue, match="whole batches"):
        Classify.target()(image=1)


# ------------------------------------------------------------------ weights


def saved(folder: Path, module: Any) -> Path:
    safetensors = pytest.importorskip("safetensors.torch")
    path = folder / "model.safetensors"
    safetensors.save_file(module.state_dict(), path)
    return path


def net(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5, dtype=torch.bfloat16), torch.nn.BatchNorm1d(5))


def test_weights_come_from_a_safetensors_file(tmp_path: Path):
    one, other = net(1), net(2)
    lamina.load_weights(other, saved(tmp_path, one))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pkl"])
def test_a_pickle_is_refused_by_its_name(tmp_path: Path, name: str):
    with pytest.raises(BadValue, match="pickle"):
        lamina.load_weights(net(1), tmp_path / name)


def test_a_pickle_under_another_name_is_refused_by_its_contents(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    torch.save(net(1).state_dict(), path)
    with pytest.raises(BadValue, match="no safetensors file"):
        lamina.load_weights(net(1), path)


def test_weights_of_another_module_are_refused(tmp_path: Path):
    with pytest.raises(BadValue, match="does not fit"):
        lamina.load_weights(torch.nn.Linear(3, 5), saved(tmp_path, net(1)))


def test_a_file_cut_short_is_refused(tmp_path: Path):
    path = saved(tmp_path, net(1))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadValue, match="not where its header says"):
        lamina.load_weights(net(2), path)
