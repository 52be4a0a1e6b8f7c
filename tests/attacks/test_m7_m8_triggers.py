"""M7: a wall clock that is set does not stop triggers. M8: triggers slower than their clock do not pile up."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import encoding
from lamina.errors import BadValue, LaminaError, StoreDown
from lamina.sdk.triggers import Trigger
from lamina.state.kv_state import StateTable, StateWrite
from lamina.state.trigger_starts import MAX_QUEUED
from lamina.state.triggers import TriggerClock, Triggers

HOUR_US = 3_600_000_000
NOON_US = 1_800_000_000_000_000 - 1_800_000_000_000_000 % (24 * HOUR_US) + 12 * HOUR_US


class Starter:
    """Starts that end when they are told to."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.inputs: list[dict[str, bytes]] = []
        self.ends: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.down: LaminaError | None = None

    def start(self, target: str, inputs: dict[str, bytes], key: str, started: Any, ended: Any) -> None:
        if self.down is not None:
            started(self.down)
            return
        self.keys.append(key)
        self.inputs.append(inputs)
        self.ends[key] = ended
        started(key)

    def follow(self, id: str, ended: Any) -> None:
        ended()

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        self.end(id)

    def end(self, id: str) -> None:
        self.ends.pop(id)()


class Wall:
    def __init__(self) -> None:
        self.offset_us = 0

    def __call__(self) -> int:
        return time.time_ns() // 1000 + self.offset_us


def opened(starter: Starter, wall: Any = None, **options: Any) -> Triggers:
    app = lamina.App("clocks")
    app.every("100ms", **options)(app.function(name="tick")(lambda due: None))
    triggers = Triggers(StateTable("clocks"), starter, None, *([wall] if wall is not None else []))
    triggers.set_app("clocks", app.triggers)
    triggers.open()
    return triggers


# ------------------------------------------------------------------------------------- M7


@pytest.mark.parametrize("jump_us", [-HOUR_US, -10_000_000, HOUR_US])
@pytest.mark.slow
def test_m7_a_clock_that_is_set_by_an_hour_goes_on_and_every_start_is_a_new_one(jump_us: int):
    async def work() -> list[str]:
        wall, starter = Wall(), Starter()
        triggers = opened(starter, wall, overlap="allow")

        async def until(count: int) -> None:
            while len(starter.keys) < count:
                await asyncio.sleep(0.01)

        await until(3)
        wall.offset_us += jump_us
        await until(8)
        wall.offset_us -= jump_us
        await until(13)
        triggers.close()
        return starter.keys

    keys = asyncio.run(asyncio.wait_for(work(), 60))
    assert len(set(keys)) == len(keys)


def strikes(trigger: Trigger, wall: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """When a clock strikes, and for what time, if the wall clock shows these times at these moments."""
    clock, found = TriggerClock(trigger, wall[0][1]), []
    planned = clock.next_strike(wall[0][1], wall[0][0])
    for now_s, now_us in wall:
        if planned[0] <= now_us:
            clock.strike(*planned, now_us, now_s)
            found.append((now_s, planned[0]))
        planned = clock.next_strike(now_us, now_s)
    return found


def walk(*pieces: tuple[int, int], step_s: int = 60) -> list[tuple[float, int]]:
    """A wall clock that shows so much time from each of these on, looked at every minute."""
    moments, now_s = [], 0.0
    for begins_us, minutes in pieces:
        for minute in range(minutes):
            moments.append((now_s, begins_us + minute * step_s * 1_000_000))
            now_s += step_s
    return moments


def test_m7_a_job_of_every_five_minutes_goes_on_when_the_clock_is_set_back_by_an_hour():
    trigger = Trigger("cron", "t", cron="*/5 * * * *")
    found = strikes(trigger, walk((NOON_US + 1, 31), (NOON_US - HOUR_US // 2 + 1, 61)))
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(found)]
    assert len(found) >= 17
    assert max(gaps) <= 600.0


def test_m7_a_daily_job_does_not_run_twice_because_of_an_hour():
    trigger = Trigger("cron", "t", cron="0 12 * * *")
    found = strikes(trigger, walk((NOON_US - 300_000_000, 20), (NOON_US - HOUR_US, 26 * 60)))
    assert [due for _, due in found] == [NOON_US, NOON_US + 24 * HOUR_US]


def test_m7_times_that_a_jump_forward_passes_are_made_up_for_once():
    trigger = Trigger("every", "t", every_us=60_000_000)
    found = strikes(trigger, walk((NOON_US + 1, 5), (NOON_US + HOUR_US + 1, 5)))
    assert len(found) <= 10 and max(due for _, due in found) > NOON_US + HOUR_US


@given(st.lists(st.tuples(st.integers(-3 * 60, 3 * 60), st.integers(5, 40)), min_size=1, max_size=6))
def test_m7_whatever_the_clock_does_it_strikes_at_least_every_other_interval_and_hardly_ever_more_often(jumps: list[Any]):
    trigger = Trigger("every", "t", every_us=120_000_000)
    pieces, at_us = [], NOON_US
    for jump, minutes in jumps:
        at_us += jump * 60_000_000
        pieces.append((at_us + 1, minutes))
        at_us += minutes * 60_000_000
    moments = walk(*pieces)
    found = strikes(trigger, moments)
    times = [moments[0][0], *(at_s for at_s, _ in found), moments[-1][0]]
    assert max(after - before for before, after in itertools.pairwise(times)) <= 3 * 120.0 + 60.0
    assert len(found) <= len(moments) / 2 + len(jumps) + 1


# ------------------------------------------------------------------------------------- M8


def test_m8_a_clock_skips_while_its_last_start_is_under_way():
    async def work() -> tuple[int, int, int]:
        starter = Starter()
        triggers = opened(starter)
        while triggers.skipped < 5:
            await asyncio.sleep(0.01)
        during = len(starter.keys)
        starter.end(starter.keys[0])
        while len(starter.keys) < 2:
            await asyncio.sleep(0.01)
        triggers.close()
        return during, len(starter.keys), len(starter.ends)

    assert asyncio.run(asyncio.wait_for(work(), 60)) == (1, 2, 1)


@pytest.fixture(autouse=True)
def _one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, changes start what they start in one turn: there is no loop to go on in."""
    monkeypatch.setattr("lamina.state.triggers.SLICE_S", 60.0)


def watching(starter: Starter, overlap: str | None) -> tuple[Triggers, Any]:
    """Triggers of one function that is told changes, and what tells it."""
    app = lamina.App("clocks")
    app.on_change("k", overlap=overlap)(app.function(name="told")(lambda version: None))
    triggers = Triggers(StateTable("clocks"), starter, None)
    triggers.set_app("clocks", app.triggers)

    def tell(number: int) -> None:
        triggers._on_change([StateWrite("app/clocks", "k", "value", None, number, (app.triggers[0].name,), number)])

    return triggers, tell


@pytest.mark.parametrize(("overlap", "at_once"), [(None, 5), ("allow", 5), ("skip", 1), ("queue", 1), ("cancel", 1)])
def test_m8_changes_start_as_many_at_once_as_their_trigger_allows(overlap: str | None, at_once: int):
    starter = Starter()
    _, tell = watching(starter, overlap)
    for number in range(5):
        tell(number)
    assert len(starter.ends) == at_once


def test_m8_a_queue_starts_one_after_the_other_in_order_and_is_bounded():
    starter = Starter()
    triggers, tell = watching(starter, "queue")
    for number in range(MAX_QUEUED + 11):
        tell(number)
    while starter.ends:
        starter.end(next(iter(starter.ends)))
    versions = [encoding.decode(one["version"]) for one in starter.inputs]
    assert versions == list(range(MAX_QUEUED + 1))
    assert triggers.skipped == 10


def test_m8_cancel_ends_what_is_under_way_for_the_newest():
    starter = Starter()
    _, tell = watching(starter, "cancel")
    for number in range(3):
        tell(number)
    assert starter.cancelled == starter.keys[:2]
    assert list(starter.ends) == [starter.keys[2]]


def test_m8_a_change_that_could_not_start_anything_is_tried_again_and_started_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.state.triggers.START_RETRY_S", 0.01)

    async def work() -> int:
        starter = Starter()
        _, tell = watching(starter, None)
        starter.down = StoreDown("away")
        tell(1)
        await asyncio.sleep(0)
        starter.down = None
        while not starter.keys:
            await asyncio.sleep(0.01)
        return len(starter.keys)

    assert asyncio.run(asyncio.wait_for(work(), 60)) == 1


def test_m8_an_unknown_way_to_overlap_is_named():
    with pytest.raises(BadValue, match="overlap: 'drop' is none of skip, queue, cancel, allow"):
        lamina.App("a").every("1s", overlap="drop")
