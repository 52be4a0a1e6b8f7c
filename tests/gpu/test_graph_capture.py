"""Graph capture: a secondary thread captures with a clone of the module; on a GPU, all graphs come to be while batches run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.gpu.driver import NoGpu, open_driver
from lamina.gpu.protocol import ExecutorUsage, FunctionLoaded, FunctionLoadFailed, LoadFunction, RunOnSlice
from lamina.gpu.weights import MOST_COPIED_BYTES, WeightBlock, _at, _layout, clone_module, layerwise_wait
from lamina.worker.protocol import BatchDone, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

torch = pytest.importorskip("torch", reason="torch is not installed")


class Stateful(torch.nn.Module):  # type: ignore[misc]
    """It keeps what it is at in an attribute, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.seen: Any = None

    def forward(self, rows: Any) -> Any:
        self.seen = rows
        return self.layer(self.seen) * self.scale


def test_a_second_module_has_the_same_weights() -> None:
    module = Stateful()
    made = clone_module(module)
    module.layer.weight.data = torch.full((2, 2), 7.0)  # as paging does it
    assert made.layer.weight is module.layer.weight and made.scale is module.scale


def test_a_second_module_keeps_its_state_for_itself() -> None:
    module = Stateful()
    clone_module(module)(torch.ones(1, 2))
    assert module.seen is None


def test_a_hook_of_one_is_none_of_the_other() -> None:
    module, called = Stateful(), []
    made = clone_module(module)
    module.layer.register_forward_pre_hook(lambda *_: called.append(1))
    made(torch.ones(1, 2))
    assert not called


def test_of_a_module_that_cannot_be_copied_there_is_no_second() -> None:
    module = Stateful()
    module.lock = threading.Lock()
    assert clone_module(module) is None


def test_of_a_callable_there_is_none_either() -> None:
    assert clone_module(lambda rows: rows) is None


@pytest.mark.parametrize(("length", "is_copied"), [(4, True), (MOST_COPIED_BYTES // 4 + 1, False)])
def test_a_second_module_costs_little_memory(length: int, is_copied: bool) -> None:
    module = Stateful()
    module.seen = [torch.zeros(length)]  # neither a parameter nor a buffer
    assert (clone_module(module) is not None) is is_copied


class Stream:
    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


def waits(module: Any, *inputs: Any) -> tuple[bool, list[Any]]:
    """Its tensors lie one after the other in a block that comes in pieces."""
    spots, size = _layout(module)
    host = torch.zeros(size, dtype=torch.uint8)
    for tensor, spot in spots:
        tensor.data = _at(torch, host, spot)
    block, stream = WeightBlock("k", host, size, host.data_ptr(), size), Stream()
    block.pieces = list(range(0, size, block.piece_bytes))
    assert len(block.pieces) > 1
    with torch.inference_mode(), layerwise_wait(module, block, stream) as waiting:
        module(*inputs)
    return waiting.is_complete, stream.waited


def test_each_layer_waits_for_its_own_weights() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
    complete, waited = waits(module, torch.ones(1, 1024))
    assert complete and len(waited) == 4  # pieces of 4 MiB: each weight is one, and its bias in the next


def test_weights_of_a_layer_that_is_not_called_have_not_been_waited_for() -> None:
    """Attention uses its last layer without calling it."""
    module = torch.nn.MultiheadAttention(1024, 4, batch_first=True)
    rows = torch.ones(1, 1, 1024)
    complete, _ = waits(module.eval(), rows, rows, rows)
    assert not complete


# --------------------------------------------------------------------------------------------------------- on a GPU

APP = """
import lamina, torch

app = lamina.App("tested")

class Layers(lamina.TorchModel):
    def load(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
        return torch.nn.Sequential(*layers).half(), torch.zeros(1, 1024).half()
    def post(self, row):
        return round(float(abs(row).sum()), 2)

class Locked(Layers):
    def load(self):
        import threading
        module, example = super().load()
        module.lock = threading.Lock()
        return module, example

app.function(gpu=lamina.GPU(3 / 15), batch=8, name="layers")(Layers)
app.function(gpu=lamina.GPU(3 / 15), batch=8, name="locked")(Locked)
"""
BUCKETS = (1, 2, 4, 8)
LIKELY = [0b111 << start for start in range(0, 15, 3)]
UNLIKELY = [0b1 << start for start in range(15)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[GpuStage]:
    try:
        open_driver(0)
    except NoGpu as error:
        pytest.skip(str(error))
    made = GpuStage(write_app(tmp_path, APP), "green")
    yield made
    made.close()


@pytest.mark.gpu
@pytest.mark.live
@pytest.mark.parametrize("name", ["layers", "locked"])
def test_all_graphs_are_made_while_batches_run_without_one(stage: GpuStage, name: str) -> None:
    """The module has 16 MiB of weights: its graphs wait for them piece by piece."""
    stage.tell(LoadFunction(name, name, 0, 0))
    assert isinstance(found := stage.hear(FunctionLoaded, FunctionLoadFailed), FunctionLoaded), found
    leaves = [(("in", "x"), encoding.encode([0.5] * 1024))]
    answers = set()
    for turn in range(60):
        count, mask = 1 + turn % 8, UNLIKELY[turn % 15]
        jobs = [JobFrame(number, "c", None, leaves, 0) for number in range(count)]
        stage.tell(RunOnSlice(turn + 1, name, mask, 0, jobs, [False] * count))
        answers |= {encoding.decode(result) for result in stage.hear(BatchDone).results}
    while stage.hear(ExecutorUsage).graphs_missing:
        pass
    held = stage.worker._loader.functions[name]
    plans = stage.worker._executor.models[name].plans
    assert not stage.worker._loader.captures.graphs_of(held).uncapturable
    assert {(bucket, mask) for bucket in BUCKETS for mask in LIKELY} <= plans.keys()
    assert len(answers) <= 2, answers  # by batch size the last digit may differ
