"""Hundreds of loads, unloads, moves and batches in any order, with failures at any step: a GPU of numpy arrays, with weights that
come and go, copies of modules for second threads, and batches that take a while."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest

from lamina import encoding
from lamina.gpu.protocol import FunctionLoaded, FunctionLoadFailed, LoadFunction, MoveSlice, RunOnSlice, UnloadFunction
from lamina.gpu.runtime import CaptureLock, HostPlan, HostRuntime, WarmupRun
from lamina.gpu.slicers.null import NullSlicer
from lamina.gpu.weight_cache import WeightCache
from lamina.worker.protocol import BatchDone, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, random, threading, time, torch

app = lamina.App("tested")
chance = random.Random(1)

class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor(float(factor)))
        self.at = None
    def forward(self, rows):
        self.at = rows  # it keeps what it is at, as many do
        time.sleep(0)
        return self.at * self.factor

class Model(lamina.TorchModel):
    factor, holds = 1, None
    def load(self):
        if chance.random() < 0.1:
            raise OSError("no weights today")
        module = Times(self.factor)
        module.itself = [module]
        if self.holds:
            module.lock = threading.Lock()
        return module, torch.zeros(1, 2)
    def post(self, row):
        return [float(value) for value in row]
    def close(self):
        if chance.random() < 0.2:
            raise OSError("cannot be closed")

for factor, batch in enumerate((1, 4, 6, 8), 1):
    parts = {"factor": factor, "holds": factor == 3}
    app.function(gpu="1/4", batch=batch, name=f"f{factor}")(type(f"F{factor}", (Model,), parts))
"""
MOST = {1: 1, 2: 4, 3: 6, 4: 8}
MASKS = [0b1111, 0b11110000, 0b1111 << 12, 0b11, 0b1100, 0b11111, 0xFFFF, 0b1 << 9]


@dataclass(eq=False)
class Block:
    key: str
    room: int = 1
    owners: set[str] = field(default_factory=set)

    def pending_event(self) -> None:
        return None

    def __deepcopy__(self, memo: Any) -> Block:
        return self


class Sets:
    """Weights without bytes: equal ones are one set; two sets of four find room."""

    def __init__(self) -> None:
        self.cache, self.blocks = WeightCache(2), dict[str, Block]()

    def stage(self, module: Any, digest: str = "") -> Any:
        return module

    def add(self, owner: str, module: Any) -> Block:
        key = str(float(module.factor))
        block = self.blocks.setdefault(key, Block(key))
        block.owners.add(owner)
        try:
            self.ensure_resident(block)
        except BaseException:
            self.remove(owner, block)
            raise
        module.block = block
        return block

    def ensure_resident(self, block: Block) -> None:
        if block.key not in self.cache:
            self.cache.place(block.key, 1, 1.0)

    def remove(self, owner: str, block: Block) -> None:
        block.owners.discard(owner)
        if not block.owners:
            if block.key in self.cache:
                self.cache.remove(block.key)
            del self.blocks[block.key]


class Unreliable(HostRuntime):
    def __init__(self, seed: int, sets: Sets) -> None:
        self._chance, self._sets, self.often = random.Random(seed), sets, 0.05
        self.plans: WeakSet[Any] = WeakSet()
        self.wrong: list[str] = []
        turns = CaptureLock()
        self.capturing, self.no_capture = turns.capturing, turns.no_capture  # type: ignore[method-assign]

    def _may_fail(self) -> None:
        if self._chance.random() < self.often:
            raise self._chance.choice([RuntimeError("no"), MemoryError(), SystemExit(1)])

    def _use(self, module: Any) -> None:
        if module.block.key not in self._sets.cache:
            self.wrong.append(f"weights {module.block.key} are not there")

    def plan(self, work: Any, example: Any, bucket: int, slice_: Any) -> HostPlan:
        self._use(work)
        plan = HostPlan(lambda rows: work(torch.from_numpy(rows)).numpy(), example, bucket, slice_)
        plan.module = work  # type: ignore[attr-defined]
        self.plans.add(plan)
        return plan

    def warmup_run(self, work: Any, example: Any, bucket: int, slice_: Any, after: Any = None) -> WarmupRun:
        self._use(work)
        self._may_fail()
        return WarmupRun()

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> HostPlan:
        self._may_fail()
        plan = self.plan(work, example, bucket, slice_)
        number, factor = float(threading.get_ident() % 1009), float(work.factor)
        if work(torch.full((bucket, 2), number))[0][0] != number * factor:
            self.wrong.append("two threads were in one module")
        plan.work = lambda rows: rows * factor  # a graph is without the module
        plan.is_captured = True
        return plan

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        self._use(plan.module)
        if items[0] is not None:
            self._may_fail()
        flight = super().launch(plan, items, **options)
        left = self._chance.randrange(3)

        def is_done() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        flight.is_done = is_done  # type: ignore[method-assign]
        return flight


@dataclass(slots=True)
class Device(NullSlicer):
    has_device: ClassVar[bool] = True
    fails: Callable[[], bool] = lambda: False

    def slice(self, mask: int) -> Any:
        if mask not in self._catalogue.slices and self.fails():
            raise RuntimeError("no memory for a context")
        return NullSlicer.slice(self, mask)


class Gateway:
    """Says and hears things at random, and keeps account."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sets = Sets()
        self.runtime = Unreliable(seed, self.sets)
        slices = random.Random(seed)
        device = Device(fails=lambda: slices.random() < 0.2)
        self.stage = GpuStage(write_app(folder, APP), runtime=self.runtime, weights=self.sets, device=device)
        self.stage._ours.settimeout(5)
        self.ready: dict[str, int] = {}
        self.coming: dict[str, int] = {}
        self.open: dict[int, list[float]] = {}
        self.right = self.failed = self.loads = self.batches = 0

    def step(self) -> None:
        say = self.chance.choices([self.load, self.unload, self.move, self.run, self.hear], [6, 4, 3, 30, 20])
        say[0]()

    def load(self) -> None:
        if len(self.ready) + len(self.coming) < 5:
            self.loads += 1
            factor = self.chance.randint(1, 4)
            self.coming[name := f"f{factor}#{self.loads}"] = factor
            again = self.chance.random() < 0.3
            self.stage.tell(LoadFunction(name, f"f{factor}", self.chance.choice([0, 0, *MASKS]), 0, is_reload=again))

    def unload(self) -> None:
        if known := [*self.ready, *self.coming]:
            name = self.chance.choice(known)
            self.ready.pop(name, None)
            self.coming.pop(name, None)
            self.stage.tell(UnloadFunction(name))

    def move(self) -> None:
        if self.ready:
            self.stage.tell(MoveSlice(self.chance.choice([*self.ready]), self.chance.choice([0, *MASKS])))

    def run(self) -> None:
        if self.ready and len(self.open) < 12:
            name, factor = self.chance.choice([*self.ready.items()])
            self.batches += 1
            firsts = [float(self.chance.randrange(1000)) for _ in range(self.chance.randint(1, MOST[factor]))]
            after = self.chance.choice([0, *self.open])
            self.open[self.batches] = [first * factor for first in firsts]
            jobs = [JobFrame(n, "c", None, [(("in", "x"), encoding.encode([first, 0]))]) for n, first in enumerate(firsts)]
            self.stage.tell(RunOnSlice(self.batches, name, self.chance.choice(MASKS), after, jobs, [False] * len(jobs)))

    def hear(self) -> None:
        if not self.open and not self.coming:
            return
        match self.stage.hear(BatchDone, FunctionLoaded, FunctionLoadFailed):
            case FunctionLoaded(instance=name) if name in self.coming:
                self.ready[name] = self.coming.pop(name)
                assert self.stage.worker._loader.functions[name].staged is None  # its block has them
            case FunctionLoadFailed(instance=name):
                self.coming.pop(name, None)
            case BatchDone(batch_id=batch_id, results=results):
                expected = self.open.pop(batch_id)
                assert len(results) == len(expected)
                for result, wanted in zip(results, expected, strict=True):
                    if isinstance(result, bytes):
                        assert encoding.decode(result)[0] == wanted, (batch_id, encoding.decode(result), expected)
                        self.right += 1
                    else:
                        self.failed += 1

    def end(self) -> None:
        while self.open or self.coming:
            self.hear()
        while self.ready:
            self.unload()


@pytest.mark.parametrize("seed", range(4))
def test_every_batch_is_answered_once_and_rightly_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    before = set(threading.enumerate())
    gateway = Gateway(tmp_path, seed)
    try:
        for _ in range(1500):
            gateway.step()
        gateway.end()
        worker = gateway.stage.worker
        loading, making, executor = worker._loader, worker._loader.captures, worker._executor
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s and (executor.models._loaded or loading._unloading or loading._loading):
            time.sleep(0.01)
        left = {
            "functions": [*executor.models._loaded],
            "weights": [*gateway.sets.blocks, gateway.sets.cache.used],
            "batches": [*worker._open, *worker._waiting_for_memory, *worker._hang_detector._slices],
            "graphs": [making._under_way, *making._unrequested, making.missing],
            "loads": [*loading._loading, *loading._unloading, *loading.functions],
            "runs": [*executor._slice_queues, *executor.models._warmups],
        }
    finally:
        gateway.stage.close()
    assert gateway.stage.ended_by is None
    assert not gateway.runtime.wrong
    assert not any(any(found) for found in left.values()), left
    assert gateway.right > 100 and gateway.failed > 0 and gateway.loads > 10
    assert len(loading.thread_cache._idle) <= gateway.loads
    del worker, loading, making, executor, gateway.stage
    gc.collect()
    assert [*gateway.runtime.plans] == []
    ends_s = time.monotonic() + 60
    while (left_over := set(threading.enumerate()) - before) and time.monotonic() < ends_s:
        gc.collect()  # again: what a thread that was just ending had in its hands was no garbage yet
        left_over.pop().join(0.1)
    assert set(threading.enumerate()) <= before  # those that waited for their function have ended, too
