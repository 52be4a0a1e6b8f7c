"""Segments: long graphs in pieces, and batches that preempt them between two. On the host; for a GPU see `test_executor_gpu`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.runtime import HostRuntime
from lamina.gpu.segments import AHEAD_US, LEAST_SEGMENTS, SEGMENT_US, can_launch, cut_graph, group_pieces, is_long, piece_bounds
from lamina.gpu.slicers.null import NullSlicer

ONE = np.zeros((1, 3), dtype=np.float32)


def rows(*values: float) -> list[Any]:
    return [np.full(3, value, dtype=np.float32) for value in values]


class Long:
    """A module of several steps, which notes when each of them runs."""

    def __init__(self, name: str, steps: int, seen: list[str]) -> None:
        self._name, self._steps, self._seen = name, steps, seen

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        for _ in range(self._steps):
            batch = self._step(batch)
        return batch

    def _step(self, batch: np.ndarray) -> np.ndarray:
        self._seen.append(self._name)
        return batch + 1

    @property
    def segments(self) -> list[Any]:
        return [self._step] * self._steps


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def executor(seen: list[str]) -> SliceExecutor:
    made = SliceExecutor(NullSlicer())
    made.load("long", Long("long", 5, seen), ONE, buckets=(1, 2))
    made.load("other", Long("other", 3, seen), ONE, buckets=(1, 2))
    made.load("quick", lambda batch: seen.append("quick") or batch * 10, ONE, buckets=(1, 2))
    for name in ("long", "other", "quick"):
        made.models.prepare(name, [1, 3])
    seen.clear()
    return made


def run_all(executor: SliceExecutor) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for _ in range(100):
        for done in executor.poll():
            assert done.error is None
            found[done.ticket] = [float(row[0]) for row in done.outputs or []]
        if not executor.has_work:
            return found
    raise AssertionError("it does not end")


def test_a_batch_that_preempts_runs_between_two_segments_and_the_other_goes_on_as_if_nothing_had_been(executor, seen):
    long = executor.submit("long", rows(1, 2), 1)
    executor.poll()
    executor.poll()
    quick = executor.submit("quick", rows(7), 1, preempts=[long])
    found = run_all(executor)
    assert seen == ["long", "long", "quick", "long", "long", "long"]
    assert found == {quick: [70.0], long: [6.0, 7.0]}


def test_what_is_given_to_a_slice_without_preempting_waits_for_the_batch_before_it(executor, seen):
    executor.submit("long", rows(1), 1)
    executor.poll()
    executor.submit("quick", rows(7), 1)
    run_all(executor)
    assert seen == ["long"] * 5 + ["quick"]


def test_a_paused_batch_goes_on_when_the_last_of_those_that_preempt_it_has_ended(executor, seen):
    long = executor.submit("long", rows(1), 3)
    executor.poll()
    executor.submit("other", rows(1), 1, preempts=[long])
    executor.submit("quick", rows(2), 1, preempts=[long])
    run_all(executor)
    assert seen[0] == "long" and set(seen[1:5]) == {"other", "quick"} and seen[5:] == ["long"] * 4


def test_two_segmented_graphs_of_one_slice_do_not_interleave_because_they_share_memory(executor, seen):
    long = executor.submit("long", rows(1), 1)
    executor.poll()
    executor.submit("other", rows(1), 1, preempts=[long])
    run_all(executor)
    assert seen == ["long"] * 5 + ["other"] * 3


def test_what_has_ended_or_runs_in_one_go_is_waited_for(executor, seen):
    quick = executor.submit("quick", rows(1), 1)
    late = executor.submit("quick", rows(2), 1, preempts=[quick, 99])
    assert run_all(executor) == {quick: [10.0], late: [20.0]}


def test_remaining_segments_are_told(executor):
    long = executor.submit("long", rows(1), 1)
    assert executor.remaining_segments(long) == 5
    executor.poll()
    assert executor.remaining_segments(long) == 4
    run_all(executor)
    assert executor.remaining_segments(long) == 0


def test_a_batch_that_is_paused_is_told_once_for_each_pause(executor):
    long = executor.submit("long", rows(1), 1)
    executor.poll()
    assert executor.take_paused() == []
    for left in (4, 2):  # one segment runs in the poll that ends the other batch, and one after it
        executor.submit("quick", rows(1), 1, preempts=[long])
        ((ticket, segments, left_us),) = executor.take_paused()
        assert (ticket, segments) == (long, left) and left_us >= 0
        assert executor.take_paused() == []
        executor.poll()
        executor.poll()
    run_all(executor)


def test_a_model_with_a_paused_batch_is_not_unloaded(executor):
    long = executor.submit("long", rows(1), 1)
    executor.poll()
    executor.submit("quick", rows(1), 1, preempts=[long])
    for name in ("long", "quick"):
        with pytest.raises(BadValue, match="under way"):
            executor.unload(name)
    run_all(executor)
    executor.unload("long")


def test_what_is_not_preemptible_runs_whole(seen):
    executor = SliceExecutor(NullSlicer())
    executor.load("long", Long("long", 5, seen), ONE, buckets=(1,))
    executor.models.prepare("long", [1])
    executor.submit("long", rows(1), 1)
    assert seen == []
    run_all(executor)
    seen.clear()
    executor.submit("long", rows(1), 1, preemptible=False)
    assert seen == ["long"] * 5


def test_paused_batches_are_told(executor):
    long = executor.submit("long", rows(1), 1)
    executor.poll()
    executor.poll()
    assert executor.paused == frozenset()
    executor.submit("other", rows(7), 2, preempts=[long])
    assert executor.paused == {long}
    run_all(executor)
    assert executor.paused == frozenset()


def test_one_that_waits_for_what_was_there_before_is_told_as_paused_too(executor):
    """Else its time runs while it waits, and the hang detector ends the process."""
    work = executor.reserve(())
    long = executor.submit("long", rows(1), 1, preempted_by=[work])
    for _ in range(3):
        assert executor.poll() == []
    assert executor.paused == {long}
    executor.release(work)
    assert executor.paused == frozenset()
    assert set(run_all(executor)) == {long}


class TimedRuntime(HostRuntime):
    """A runtime whose graphs take so long, and which captures those that are told to be long in segments."""

    def __init__(self, took_us: int) -> None:
        self.took_us = took_us
        self.captured: list[int] = []

    def wants_segments(self, took_us: int) -> bool:
        return is_long(took_us)

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ):
        self.captured.append(work_sm_us)
        plan = super().capture(work, example, bucket, slice_)
        plan.work = work if is_long(work_sm_us) else work.__call__  # a bound method has no segments
        return plan

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        flight = super().launch(plan, items, **options)
        if items[0] is None:
            flight._found = self.took_us, []
        return flight


@pytest.mark.parametrize(("took_us", "captures"), [(500, [0]), (5_000, [0, 5_000])])
def test_a_graph_is_timed_whole_and_captured_again_if_it_is_long(seen, took_us: int, captures: list[int]):
    runtime = TimedRuntime(took_us)
    executor = SliceExecutor(NullSlicer(), runtime)
    executor.load("long", Long("long", 5, seen), ONE, buckets=(1,))
    executor.models.prepare("long", [1])
    assert runtime.captured == captures
    assert executor.models["long"].plans[1, 1].is_cut == (len(captures) == 2)
    executor.models.prepare("long", [2])
    assert runtime.captured == [*captures, took_us], "on another slice it is known before"


class FakeEditor:
    """Graphs as sets of nodes; a clone has nodes of its own."""

    def __init__(self, nodes: int, fails_at: int = -1) -> None:
        self.whole = [("whole", place) for place in range(nodes)]
        self.graphs: dict[str, set[tuple[str, int]]] = {"whole": set(self.whole)}
        self.removed, self.clones, self.fails_at = 0, 0, fails_at
        self.pieces: list[list[int]] = []

    def clone_graph(self, graph: str) -> str:
        self.clones += 1
        name = f"clone{self.clones}"
        self.graphs[name] = {(name, place) for _, place in self.graphs[graph]}
        return name

    def find_in_clone(self, node: tuple[str, int], clone: str) -> tuple[str, int]:
        assert node in self.graphs[node[0]] and (clone, node[1]) in self.graphs[clone]
        return clone, node[1]

    def remove_node(self, node: tuple[str, int]) -> None:
        self.removed += 1
        self.graphs[node[0]].remove(node)

    def instantiate(self, graph: str) -> int:
        if len(self.pieces) == self.fails_at:
            raise RuntimeError("out of memory")
        self.pieces.append(sorted(place for _, place in self.graphs[graph]))
        return len(self.pieces) - 1

    def destroy_graph_source(self, graph: str) -> None:
        del self.graphs[graph]


@given(st.integers(1, 300), st.integers(2_000, 60_000))
def test_halving_gives_the_pieces_with_few_removals_and_leaves_nothing(nodes: int, expected_us: int):
    bounds, editor = piece_bounds(nodes, expected_us), FakeEditor(nodes)
    made = cut_graph(editor, "whole", editor.whole, bounds)
    assert [editor.pieces[one] for one in made] == [list(range(*ends)) for ends in itertools.pairwise(bounds)]
    assert editor.removed <= nodes * math.ceil(math.log2(max(2, len(bounds) - 1)))
    assert set(editor.graphs) == {"whole"} and len(editor.graphs["whole"]) == nodes


def test_a_cut_that_fails_leaves_no_graph():
    editor = FakeEditor(40, fails_at=3)
    with pytest.raises(RuntimeError):
        cut_graph(editor, "whole", editor.whole, list(range(0, 41, 5)))
    assert set(editor.graphs) == {"whole"}


def test_a_short_graph_stays_whole():
    assert piece_bounds(300, LEAST_SEGMENTS * SEGMENT_US - 1) == [0, 300]


@given(st.integers(1, 5_000), st.integers(0, 10**6))
def test_pieces_cover_the_graph_without_an_empty_one(nodes: int, expected_us: int):
    bounds = piece_bounds(nodes, expected_us)
    assert bounds[0] == 0 and bounds[-1] == nodes
    assert all(first < last for first, last in itertools.pairwise(bounds))


@given(st.lists(st.floats(0, 5_000), min_size=1, max_size=50), st.integers(1, 3_000))
def test_segments_are_neighbours_in_order_and_as_long_as_wanted_unless_one_piece_is_longer(
    times_us: list[float], segment_us: int
):
    groups = group_pieces(times_us, segment_us)
    assert [place for group in groups for place in group] == list(range(len(times_us)))
    lengths = [sum(times_us[place] for place in group) for group in groups]
    for group, length in zip(groups, lengths, strict=True):
        assert group and (length <= segment_us or len(group) == 1)
    for place, (length, after) in enumerate(zip(lengths, groups[1:], strict=False)):
        assert length + times_us[after[0]] > segment_us, f"segment {place} could have been longer"


# ------------------------------------------------------------------------------------------------- how far ahead


@pytest.mark.parametrize(
    ("in_flight_us", "ran_us", "next_us", "is_launched"),
    [
        ([], 0, 5_000, True),  # nothing runs: however long it is
        ([400], 0, 400, True),
        ([400, 400], 350, 10, False),  # two are enough
        ([1_100], 0, 1_100, False),  # kernels longer than a segment
        ([1_100], 1_050, 1_100, True),  # the first is about to end
        ([1_100], 9_000, AHEAD_US, True),  # it should have ended by now
    ],
)
def test_no_more_is_in_flight_than_an_urgent_batch_may_wait_for(
    in_flight_us: list[float], ran_us: float, next_us: float, is_launched: bool
) -> None:
    assert can_launch(in_flight_us, ran_us, next_us) is is_launched
