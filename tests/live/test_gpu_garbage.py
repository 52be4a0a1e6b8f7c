from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lamina.live.gpu_garbage import MUCH, SOME, collect, collect_by_hand


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    collect_by_hand()
    gc.collect()
    yield
    gc.set_threshold(*before)


def middle_collections(count: int) -> None:
    for _ in range(count):
        gc.collect(1)


def test_no_full_collection_comes_by_itself():
    middle_collections(2 * MUCH)
    kept = [[] for _ in range(1_000_000)]  # more than a quarter of what is there, so that the collector would have one
    assert gc.get_count()[2] >= 2 * MUCH and len(kept) == 1_000_000


def test_one_is_had_when_nobody_is_served():
    middle_collections(SOME)
    assert collect(is_idle=True, is_loading=False)
    assert gc.get_count()[2] == 0


def test_who_is_served_does_not_wait_for_one():
    middle_collections(SOME)
    assert not collect(is_idle=False, is_loading=False)


def test_unless_there_is_much_to_look_at():
    middle_collections(MUCH)
    assert collect(is_idle=False, is_loading=False)


def test_there_is_none_while_a_function_is_loaded_for_its_imports_are_still_looked_at():
    middle_collections(MUCH)
    assert not collect(is_idle=True, is_loading=True)
