"""Eviction order of the weight cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.gpu.weight_cache import NoDeviceMemory, WeightCache


def test_nobody_goes_while_there_is_room():
    shelf = WeightCache(100)
    assert shelf.place("a", 60, 10) == [] and shelf.place("b", 40, 10) == []


def test_what_is_used_more_stays():
    shelf = WeightCache(100)
    for key in ("often", "seldom"):
        shelf.place(key, 50, 10)
    for key in ("often", "often", "seldom"):
        shelf.use(key)
        shelf.done(key)
    assert shelf.place("new", 50, 10) == ["seldom"]


def test_of_equal_use_the_one_that_is_dear_to_bring_back_stays():
    shelf = WeightCache(100)
    for key, cost_us in (("dear", 1000), ("cheap", 10)):
        shelf.place(key, 50, cost_us)
        shelf.use(key)
        shelf.done(key)
    assert shelf.place("new", 50, 10) == ["cheap"]


def test_what_was_popular_long_ago_sinks_below_what_is_used_now():
    shelf = WeightCache(100)
    shelf.place("old", 50, 10)
    for _ in range(5):
        shelf.use("old")
        shelf.done("old")
    gone = []
    for turn in range(20):
        gone += shelf.place(f"new{turn}", 50, 10)
        shelf.use(f"new{turn}")
        shelf.done(f"new{turn}")
    assert "old" in gone


def test_what_runs_does_not_go():
    shelf = WeightCache(100)
    shelf.place("a", 100, 10)
    shelf.use("a")
    with pytest.raises(NoDeviceMemory, match="no room"):
        shelf.place("b", 10, 10)
    assert "a" in shelf and "b" not in shelf


def test_where_there_is_less_room_than_it_seems_the_least_worth_goes_next():
    shelf = WeightCache(100)
    for key, cost_us in (("dear", 30), ("cheap", 10), ("new", 1)):
        shelf.place(key, 10, cost_us)
        shelf.use(key)
        shelf.done(key)
    shelf.use("new")
    assert [shelf.drop("new") for _ in range(3)] == ["cheap", "dear", None]
    shelf.check()
    assert shelf.used == 10 and shelf.evictions == 2


def test_what_runs_is_not_evicted_nor_what_the_room_is_for():
    shelf = WeightCache(100)
    shelf.place("runs", 10, 1)
    shelf.use("runs")
    shelf.place("comes", 10, 1)
    assert shelf.drop("comes") is None


def test_what_is_larger_than_the_device_evicts_nothing():
    shelf = WeightCache(100)
    shelf.place("a", 100, 10)
    with pytest.raises(NoDeviceMemory):
        shelf.place("b", 101, 10)
    assert "a" in shelf


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=60))
def test_it_never_holds_more_than_it_can(steps: list[tuple[int, int, bool]]):
    shelf, running = WeightCache(100), set()
    for number, size, ends in steps:
        key = str(number)
        if key not in shelf:
            try:
                running -= set(shelf.place(key, size, size))
            except NoDeviceMemory:
                continue
        if key not in running:
            shelf.use(key)
            running.add(key)
        if ends:
            shelf.done(key)
            running.discard(key)
        shelf.check()
        assert all(one in shelf for one in running)
