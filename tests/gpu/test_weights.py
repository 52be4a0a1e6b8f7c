"""Weights that come and go, without a device: the executor's own books, with sets of weights that are names and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lamina.gpu.executor import FinishedBatch, SliceExecutor
from lamina.gpu.runtime import HostRuntime
from lamina.gpu.slicers.null import NullSlicer
from lamina.gpu.weight_cache import NoDeviceMemory, WeightCache

ONE = np.zeros((1, 3), dtype=np.float32)


class Module:
    """A callable with weights."""

    def parameters(self) -> list[Any]:
        return []

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        return batch * 2


@dataclass(eq=False)
class Block:
    key: str
    room: int = 1

    def pending_event(self) -> None:
        return None


@dataclass
class Names:
    """`lamina.gpu.weights.Weights`, with nothing to move. Each set is of one unit; the cache is the real one."""

    cache: WeightCache
    blocks: dict[str, Block] = field(default_factory=dict)

    def stage(self, module: Any, digest: str = "") -> None:
        return None

    def add(self, owner: str, staged: Any) -> Block:
        self.blocks[owner] = Block(owner)
        self.ensure_resident(self.blocks[owner])
        return self.blocks[owner]

    def ensure_resident(self, block: Block) -> None:
        if block.key not in self.cache:
            self.cache.place(block.key, 1, 1.0)

    def remove(self, owner: str, block: Block) -> None:
        if owner in self.cache:
            self.cache.remove(owner)


class Slow(HostRuntime):
    """Batches end when they are told to; warm-up runs fail if `fails`."""

    def __init__(self) -> None:
        self.flying: list[Any] = []
        self.fails: Exception | None = None
        self.freed = 0

    def _free(self) -> None:
        self.freed += 1

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        if items[0] is None and self.fails is not None:
            raise self.fails
        flight = super().launch(plan, items, **options)
        flight.free = self._free  # type: ignore[method-assign]
        if items[0] is not None:
            ended: list[int] = []
            flight.is_done, flight.end = lambda: bool(ended), lambda: ended.append(1)  # type: ignore[attr-defined, method-assign]
            self.flying.append(flight)
        return flight


def standing(capacity: int, *names: str) -> tuple[SliceExecutor, Slow, WeightCache]:
    runtime, cache = Slow(), WeightCache(capacity)
    executor = SliceExecutor(NullSlicer(), runtime, Names(cache))
    for name in names:
        executor.load(name, Module(), ONE, buckets=(1,))
    return executor, runtime, cache


def only(found: list[FinishedBatch]) -> FinishedBatch:
    assert len(found) == 1
    return found[0]


def test_weights_that_were_put_away_come_back_for_the_next_batch():
    executor, runtime, cache = standing(1, "a", "b")
    executor.submit("a", [ONE[0]], 1)
    assert "a" in cache and "b" not in cache and runtime.flying


def test_weights_in_use_are_not_evicted_and_the_load_that_needs_their_place_fails():
    executor, _, _ = standing(1, "a", "b")
    executor.submit("a", [ONE[0]], 1)
    executor.submit("b", [ONE[0]], 2)
    assert isinstance(only(executor.poll()).error, NoDeviceMemory)


def test_when_that_batch_has_ended_there_is_room():
    executor, runtime, cache = standing(1, "a", "b")
    executor.submit("a", [ONE[0]], 1)
    runtime.flying[0].end()
    executor.poll()
    executor.submit("b", [ONE[0]], 2)
    assert "b" in cache and executor.in_flight == 1


def test_weights_are_in_use_exactly_while_a_batch_is_on_its_way():
    executor, runtime, cache = standing(1, "a")
    executor.submit("a", [ONE[0]], 1)
    with pytest.raises(NoDeviceMemory) as found:
        cache.place("b", 1, 1.0)
    runtime.flying[0].end()
    executor.poll()
    assert not found.value.is_permanent and cache.place("b", 1, 1.0) == ["a"]


def test_buffers_of_a_warmup_run_can_be_used_again():
    executor, runtime, _ = standing(2, "a")
    plan = runtime.capture(Module(), (ONE,), 1, executor.slicer.slice(1))
    executor.models.install_graph("a", 1, 1, plan)
    executor.poll()
    assert runtime.freed == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError()])
def test_a_graph_that_cannot_be_run_is_none_and_holds_no_weights(error: Exception):
    executor, runtime, cache = standing(1, "a")
    plan = runtime.capture(Module(), (ONE,), 1, executor.slicer.slice(1))
    runtime.fails = error
    executor.models.install_graph("a", 1, 1, plan)
    assert not executor.models["a"].has_graph(1, 1) and cache.place("b", 1, 1.0) == ["a"]


def test_a_load_that_finds_no_room_leaves_nothing_behind():
    executor, _, cache = standing(1, "a")
    executor.models.pin("a")
    with pytest.raises(NoDeviceMemory):
        executor.load("b", Module(), ONE, buckets=(1,))
    assert "b" not in executor.models and cache.used == 1
    executor.models.unpin("a")
    executor.load("b", Module(), ONE, buckets=(1,))
    assert "b" in executor.models
