"""Random worlds of loads: whatever functions are loaded together, with homes or without, long graphs or failing ones, moved and
unloaded in the middle, each becomes ready, fails, or leaves. Nothing waits for what may not begin before it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lamina.gpu.protocol import FunctionLoaded, FunctionLoadFailed, FunctionUnloaded, LoadFunction, MoveSlice, UnloadFunction
from lamina.gpu.runtime import HostRuntime
from lamina.gpu.slicer import all_masks
from lamina.gpu.slicers import open_slicer
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("worlds")

class Sum(lamina.TorchModel):
    def load(self):
        return torch.nn.Linear(2, 2, bias=False), torch.zeros(1, 2)

for number in range(8):
    app.function(
        gpu=("1/4", "1/16", "1/1", "1/2")[number % 4],
        batch=(1, 4)[number % 2],
        slo=(None, "25ms", "5s")[number % 3],
        objective=("deadline", "latency")[number // 4],
        name=f"f{number}",
    )(type(f"F{number}", (Sum,), {}))
"""
MASKS = all_masks(open_slicer("null").device)


class World(HostRuntime):
    """Graphs that are long are found out to be so at their first replay; some captures fail."""

    def __init__(self, rng: random.Random) -> None:
        self.long_us, self.failing = rng.choice([0, 30_000, 300_000]), rng.choice([0.0, 0.0, 0.3])
        self.rng = rng

    def wants_segments(self, took_us: int) -> bool:
        return took_us > 2_000

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> Any:
        if self.rng.random() < self.failing:
            raise RuntimeError("it cannot be captured")
        return super().capture(work, example, bucket, slice_, block)

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        flight = super().launch(plan, items, **options)
        if items[0] is None and self.long_us:
            flight._found = self.long_us, []
        return flight


@pytest.mark.parametrize("seed", range(24))
def test_every_load_comes_to_an_end(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stage = GpuStage(write_app(tmp_path, APP), runtime=World(random.Random(seed)))
    try:
        waiting, loaded = set[str](), list[str]()
        for number in rng.sample(range(8), rng.randint(1, 8)):
            name = f"f{number}"
            home = rng.choice([0, rng.choice(MASKS)])
            stage.tell(LoadFunction(f"{name}#1", name, home, 0, is_reload=rng.random() < 0.2))
            waiting.add(f"{name}#1")
            if rng.random() < 0.3:
                stage.tell(MoveSlice(f"{name}#1", rng.choice(MASKS)))
            if rng.random() < 0.15:
                stage.tell(UnloadFunction(f"{name}#1"))
        while waiting:
            frame = stage.hear(FunctionLoaded, FunctionLoadFailed, FunctionUnloaded)
            waiting.discard(frame.instance)
            if isinstance(frame, FunctionLoaded):
                loaded.append(frame.instance)
        for instance in loaded:
            stage.tell(UnloadFunction(instance))
        left = set(loaded)
        while left:
            left.discard(stage.hear(FunctionUnloaded).instance)
    finally:
        stage.close()
