"""The executor on the host: the same code that drives a GPU, on numpy arrays and null slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue, UnknownTarget
from lamina.gpu.executor import ExecutorLost, FinishedBatch, SliceExecutor
from lamina.gpu.runtime import HostRuntime
from lamina.gpu.slicers.null import NullSlicer

ONE = np.zeros((1, 3), dtype=np.float32)


def rows(*values: float) -> list[Any]:
    return [np.full(3, value, dtype=np.float32) for value in values]


def double(batch: np.ndarray) -> np.ndarray:
    return batch * 2


@pytest.fixture
def executor() -> SliceExecutor:
    made = SliceExecutor(NullSlicer())
    made.load("double", double, ONE, buckets=(1, 2, 4, 8))
    return made


def only(finished: list[FinishedBatch]) -> FinishedBatch:
    assert len(finished) == 1
    return finished[0]


def test_every_item_gets_its_own_result(executor: SliceExecutor):
    ticket = executor.submit("double", rows(1, 2, 3), 1)
    done = only(executor.poll())
    assert done.ticket == ticket and [float(row[0]) for row in done.outputs or []] == [2.0, 4.0, 6.0]


def test_a_batch_runs_in_the_next_larger_bucket(executor: SliceExecutor):
    seen: list[int] = []

    def work(batch: np.ndarray) -> np.ndarray:
        seen.append(len(batch))
        return batch

    executor.load("watch", work, ONE, buckets=(1, 4))
    executor.submit("watch", rows(1, 2), 1)
    assert seen == [4]


def test_results_of_several_tensors_stay_together(executor: SliceExecutor):
    executor.load("two", lambda batch: (batch, batch.sum(axis=1)), ONE, buckets=(2,))
    executor.submit("two", rows(1, 2), 1)
    first, second = only(executor.poll()).outputs or []
    assert float(first[1]) == 3.0 and float(second[1]) == 6.0


def test_batches_on_two_slices_both_come_back(executor: SliceExecutor):
    tickets = {executor.submit("double", rows(1), 1), executor.submit("double", rows(2), 2)}
    assert {done.ticket for done in executor.poll()} == tickets


def test_an_error_ends_its_batch_and_no_other(executor: SliceExecutor):
    def fails(batch: np.ndarray) -> np.ndarray:
        raise ArithmeticError("no")

    executor.load("fails", fails, ONE, buckets=(1,))
    bad, good = executor.submit("fails", rows(1), 1), executor.submit("double", rows(1), 1)
    found = {done.ticket: done.error for done in executor.poll()}
    assert isinstance(found[bad], ArithmeticError) and found[good] is None


def test_out_of_memory_halves_the_batch_until_it_fits_and_remembers(executor: SliceExecutor):
    sizes: list[int] = []

    def hungry(batch: np.ndarray) -> np.ndarray:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise MemoryError
        return batch

    executor.load("hungry", hungry, ONE, buckets=(1, 2, 4, 8))
    executor.submit("hungry", rows(*range(8)), 1)
    done = only(executor.poll())
    assert [float(row[0]) for row in done.outputs or []] == [float(n) for n in range(8)]
    sizes.clear()
    executor.submit("hungry", rows(1, 2, 3, 4), 1)
    assert only(executor.poll()).error is None and sizes == [2, 2]


def test_one_item_that_does_not_fit_is_an_error(executor: SliceExecutor):
    def hungry(batch: np.ndarray) -> np.ndarray:
        raise MemoryError

    executor.load("hungry", hungry, ONE, buckets=(1, 2))
    executor.submit("hungry", rows(1, 2), 1)
    assert isinstance(only(executor.poll()).error, MemoryError)


def test_a_batch_without_a_graph_runs_eagerly_and_captures_nothing(executor: SliceExecutor):
    for _ in range(3):
        executor.submit("double", rows(1), 1)
        executor.poll()
    assert not executor.models["double"].plans[1, 1].is_captured and not executor.has_work


def test_a_slice_can_be_prepared_before_a_function_moves_there(executor: SliceExecutor):
    executor.models.prepare("double", [0b1100], [2])
    assert executor.models["double"].has_graph(2, 0b1100)


def test_a_batch_takes_the_next_larger_graph_rather_than_none(executor: SliceExecutor):
    executor.models.prepare("double", [1], [8])
    assert executor.models["double"].bucket_for(1, 1) == 8 and executor.models["double"].bucket_for(1, 2) == 1


@pytest.mark.parametrize("count", [0, 9])
def test_a_batch_that_has_no_bucket_is_refused(executor: SliceExecutor, count: int):
    with pytest.raises(BadValue, match="items"):
        executor.submit("double", rows(*range(count)), 1)


def test_a_mask_that_is_no_slice_is_refused(executor: SliceExecutor):
    with pytest.raises(BadValue, match="not a slice"):
        executor.submit("double", rows(1), 0b101)


def test_an_unknown_function_is_named(executor: SliceExecutor):
    with pytest.raises(UnknownTarget, match="triple"):
        executor.submit("triple", rows(1), 1)


def test_what_is_unloaded_is_gone(executor: SliceExecutor):
    executor.unload("double")
    with pytest.raises(UnknownTarget):
        executor.submit("double", rows(1), 1)


def test_what_has_batches_under_way_is_not_unloaded(executor: SliceExecutor):
    executor.submit("double", rows(1), 1)
    with pytest.raises(BadValue, match="under way"):
        executor.unload("double")


class Dying(HostRuntime):
    """A device that fails for good while batches are on it."""

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        flight = super().launch(plan, items)
        flight.is_done = self._die  # type: ignore[method-assign]
        return flight

    def _die(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


def test_when_the_device_fails_all_that_is_under_way_ends_and_nothing_more_is_taken():
    executor = SliceExecutor(NullSlicer(), Dying())
    executor.load("double", double, ONE, buckets=(1,))
    tickets = {executor.submit("double", rows(1), mask) for mask in (1, 2, 2)}
    found = executor.poll()
    assert {done.ticket for done in found} == tickets and all(isinstance(done.error, ExecutorLost) for done in found)
    with pytest.raises(ExecutorLost):
        executor.submit("double", rows(1), 1)


def test_what_does_not_fit_is_halved_where_no_graph_could_be_made(executor: SliceExecutor):
    """Its graph was refused for want of memory; a plan of that size that was tried in vain must not be taken again."""

    def hungry(batch: np.ndarray) -> np.ndarray:
        if len(batch) > 2:
            raise MemoryError
        return batch * 2

    executor.load("hungry", hungry, ONE, buckets=(1, 2, 4, 8, 16))
    executor.models.install_graph("hungry", 16, 1, MemoryError())
    executor.submit("hungry", rows(*range(16)), 1)
    done = only(executor.poll())
    assert done.error is None and [float(row[0]) for row in done.outputs or []] == [2.0 * n for n in range(16)]


def test_a_plan_without_a_graph_is_not_ready(executor: SliceExecutor):
    executor.load("eager", double, ONE, buckets=(1, 4))
    executor.submit("eager", rows(1, 2), 1)
    assert not executor.models.is_ready("eager", 2, 1)


def test_pieces_of_a_batch_that_fail_at_once_end_it_once(executor: SliceExecutor):
    def broken(batch: np.ndarray) -> np.ndarray:
        raise ArithmeticError

    executor.load("broken", broken, ONE, buckets=(1, 2, 4))
    executor.models["broken"].on_out_of_memory(4)
    executor.submit("broken", rows(1, 2, 3, 4), 1)
    assert isinstance(only(executor.poll()).error, ArithmeticError)


class Spoilt(HostRuntime):
    """A capture that fails so many times."""

    def __init__(self, failures: int, error: type[Exception] = RuntimeError) -> None:
        self.left, self._error = failures, error

    def capture(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self._error("spoilt")
        return super().capture(*args, **options)


def made_by(runtime: Spoilt) -> Any:
    executor = SliceExecutor(NullSlicer(), runtime)
    executor.load("double", double, ONE, buckets=(1, 4))
    return executor.models.capture("double", 4, 1)


def test_a_graph_that_was_spoilt_once_is_made_again():
    assert made_by(Spoilt(1)).is_captured


def test_why_there_is_no_graph_is_told_without_what_would_keep_its_remains():
    told = made_by(Spoilt(2))
    assert str(told) == "spoilt" and told.__traceback__ is None


def test_what_does_not_fit_is_not_tried_twice():
    runtime = Spoilt(1, MemoryError)
    assert isinstance(made_by(runtime), MemoryError) and runtime.left == 0


def test_a_batch_without_a_graph_waits_for_a_size_that_libraries_know(executor: SliceExecutor):
    functions = executor.models
    assert [functions.bucket_for("double", 2), functions.bucket_for("double", 2, {1, 8})] == [2, 8]


def test_a_size_that_did_not_fit_is_not_waited_for(executor: SliceExecutor):
    executor.models["double"].on_out_of_memory(8)
    assert executor.models.bucket_for("double", 2, {1, 8}) == 2 and not executor.models.can_fit("double", 8)
