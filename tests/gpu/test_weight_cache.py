"""Eviction order of the weight cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.gpu.weight_cache import NoDeviceMemory, WeightCache


def test_nothing_is_evicted_while_there_is_room():
    cache = WeightCache(100)
    assert cache.place("a", 60, 10) == [] and cache.place("b", 40, 10) == []


def test_what_is_used_more_stays():
    cache = WeightCache(100)
    for key in ("often", "seldom"):
        cache.place(key, 50, 10)
    for key in ("often", "often", "seldom"):
        cache.pin(key)
        cache.unpin(key)
    assert cache.place("new", 50, 10) == ["seldom"]


def test_of_equal_use_the_one_that_is_dear_to_bring_back_stays():
    cache = WeightCache(100)
    for key, cost_us in (("dear", 1000), ("cheap", 10)):
        cache.place(key, 50, cost_us)
        cache.pin(key)
        cache.unpin(key)
    assert cache.place("new", 50, 10) == ["cheap"]


def test_what_was_popular_long_ago_sinks_below_what_is_used_now():
    cache = WeightCache(100)
    cache.place("old", 50, 10)
    for _ in range(5):
        cache.pin("old")
        cache.unpin("old")
    gone = []
    for turn in range(20):
        gone += cache.place(f"new{turn}", 50, 10)
        cache.pin(f"new{turn}")
        cache.unpin(f"new{turn}")
    assert "old" in gone


def test_what_runs_does_not_go():
    cache = WeightCache(100)
    cache.place("a", 100, 10)
    cache.pin("a")
    with pytest.raises(NoDeviceMemory, match="no room"):
        cache.place("b", 10, 10)
    assert "a" in cache and "b" not in cache


def test_where_there_is_less_room_than_it_seems_the_least_worth_goes_next():
    cache = WeightCache(100)
    for key, cost_us in (("dear", 30), ("cheap", 10), ("new", 1)):
        cache.place(key, 10, cost_us)
        cache.pin(key)
        cache.unpin(key)
    cache.pin("new")
    assert [cache.evict_next("new") for _ in range(3)] == ["cheap", "dear", None]
    cache.check()
    assert cache.used == 10 and cache.evictions == 2


def test_what_runs_is_not_evicted_nor_what_the_room_is_for():
    cache = WeightCache(100)
    cache.place("runs", 10, 1)
    cache.pin("runs")
    cache.place("comes", 10, 1)
    assert cache.evict_next("comes") is None


def test_what_is_larger_than_the_device_evicts_nothing():
    cache = WeightCache(100)
    cache.place("a", 100, 10)
    with pytest.raises(NoDeviceMemory):
        cache.place("b", 101, 10)
    assert "a" in cache


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=60))
def test_it_never_holds_more_than_it_can(steps: list[tuple[int, int, bool]]):
    cache, running = WeightCache(100), set()
    for number, size, ends in steps:
        key = str(number)
        if key not in cache:
            try:
                running -= set(cache.place(key, size, size))
            except NoDeviceMemory:
                continue
        if key not in running:
            cache.pin(key)
            running.add(key)
        if ends:
            cache.unpin(key)
            running.discard(key)
        cache.check()
        assert all(one in cache for one in running)
