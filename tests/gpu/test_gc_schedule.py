from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lamina.gpu.gc_schedule import FORCED_COLLECT_AFTER, IDLE_COLLECT_AFTER, QUIET_S, GcSchedule, disable_full_collections

pytestmark = pytest.mark.slow  # each looks through the whole heap, a few times


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    disable_full_collections()
    gc.collect()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def middle_collections(count: int) -> None:
    for _ in range(count):
        gc.collect(1)


def test_no_full_collection_comes_by_itself():
    middle_collections(2 * FORCED_COLLECT_AFTER)
    kept = [[] for _ in range(1_000_000)]  # more than a quarter of what is there, so that the collector would have one
    assert gc.get_count()[2] >= 2 * FORCED_COLLECT_AFTER and len(kept) == 1_000_000


def test_a_collection_runs_when_the_executor_is_idle():
    middle_collections(IDLE_COLLECT_AFTER)
    GcSchedule().collect_if_due(1.0, is_idle=True, is_loading=False)
    assert gc.get_count()[2] == 0


def test_a_batch_does_not_wait_for_one():
    middle_collections(IDLE_COLLECT_AFTER)
    GcSchedule().collect_if_due(1.0, is_idle=False, is_loading=False)
    assert gc.get_count()[2] >= IDLE_COLLECT_AFTER


def test_unless_there_is_much_to_look_at():
    middle_collections(FORCED_COLLECT_AFTER)
    GcSchedule().collect_if_due(1.0, is_idle=False, is_loading=False)
    assert gc.get_count()[2] == 0


def test_there_is_none_while_a_function_is_loaded_for_its_imports_are_still_looked_at():
    middle_collections(FORCED_COLLECT_AFTER)
    GcSchedule().collect_if_due(1.0, is_idle=True, is_loading=True)
    assert gc.get_count()[2] >= FORCED_COLLECT_AFTER


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def frozen_garbage(garbage: GcSchedule, now_s: float) -> weakref.ref[Cycle]:
    """What a function leaves behind that was frozen with it."""
    cycle = Cycle()
    garbage.on_loaded(now_s)
    return weakref.ref(cycle)


def test_frozen_objects_are_collected_once_the_executor_has_been_idle_for_a_while():
    garbage = GcSchedule()
    left = frozen_garbage(garbage, now_s=5.0)
    gc.collect()
    assert left() is not None, "the collector looks at what is frozen, so this test shows nothing"
    garbage.collect_if_due(5.0 + QUIET_S, is_idle=True, is_loading=False)
    assert left() is not None and garbage.has_pending
    garbage.collect_if_due(5.1 + QUIET_S, is_idle=True, is_loading=False)
    assert left() is None and not garbage.has_pending


@pytest.mark.parametrize(("is_idle", "is_loading"), [(False, False), (True, True)])
def test_and_not_soon_after_a_batch_or_a_load(is_idle: bool, is_loading: bool):
    garbage = GcSchedule()
    left = frozen_garbage(garbage, now_s=5.0)
    garbage.collect_if_due(7.0, is_idle=is_idle, is_loading=is_loading)
    garbage.collect_if_due(7.0 + QUIET_S, is_idle=True, is_loading=False)
    assert left() is not None
    garbage.collect_if_due(7.1 + QUIET_S, is_idle=True, is_loading=False)
    assert left() is None


def test_a_function_that_leaves_is_looked_for_too():
    garbage = GcSchedule()
    left = frozen_garbage(garbage, now_s=5.0)
    assert left() is not None
    garbage.collect_if_due(7.0, is_idle=True, is_loading=False)
    cycle = frozen_garbage(GcSchedule(), now_s=7.0)  # frozen by another
    garbage.on_unloaded(now_s=8.0)
    garbage.collect_if_due(8.5, is_idle=True, is_loading=False)
    assert cycle() is not None
    garbage.collect_if_due(9.1, is_idle=True, is_loading=False)
    assert cycle() is None


def test_where_another_thread_was_at_a_collection_it_looks_again():
    garbage, looked = GcSchedule(), list[bool]()
    left = frozen_garbage(garbage, now_s=5.0)

    def meanwhile(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(garbage.collect_if_due(5.1 + QUIET_S, is_idle=True, is_loading=False))

    gc.callbacks.append(meanwhile)
    gc.collect(0)
    gc.callbacks.remove(meanwhile)
    assert looked == [False] and left() is not None and garbage.has_pending
    assert garbage.collect_if_due(5.2 + QUIET_S, is_idle=True, is_loading=False)
    assert left() is None and not garbage.has_pending


def test_memory_goes_back_once_when_the_last_graph_is_captured_and_the_executor_is_quiet():
    garbage, looked = GcSchedule(), list[bool]()
    garbage.on_captured(now_s=5.0)
    looked.append(garbage.collect_if_due(5.5, is_idle=True, is_loading=False))
    looked.append(garbage.collect_if_due(6.5, is_idle=False, is_loading=False))
    looked.append(garbage.collect_if_due(7.0, is_idle=True, is_loading=False))  # it was busy half a second ago
    looked.append(garbage.collect_if_due(6.5 + 1.1 * QUIET_S, is_idle=True, is_loading=False))
    looked.append(garbage.collect_if_due(9.0, is_idle=True, is_loading=False))
    assert looked == [False, False, False, True, False]
