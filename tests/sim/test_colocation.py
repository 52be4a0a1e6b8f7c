"""Colocated batches on one device, and their changing pace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.planner.interference import ColocatedBatch
from lamina.sim.colocation import BatchWork, ColocatedBatches, CompletedWork
from lamina.types import NEVER_US
from tests.properties import examples


class Each:
    """Every neighbour costs a half of one's own time."""

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        return 1 + 0.5 * len(neighbours)


class Shares:
    """By name and size: nobody is like another."""

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        return 1 + sum(other.share * other.batch for other in neighbours) / (1 + function.batch)


def entry(batch_id: int, work_us: int, ready_us: int = 0, after: int = 0, transfer_us: int = 0, batch: int = 1) -> BatchWork:
    return BatchWork(batch_id, ColocatedBatch(f"f{batch_id}", batch, 0.25), ready_us, after, transfer_us, work_us)


def until_empty(crowd: ColocatedBatches) -> dict[int, CompletedWork]:
    while crowd.next_us < NEVER_US:
        crowd.advance(crowd.next_us)
    return {ended.batch_id: ended for ended in crowd.take_finished()}


def test_alone_a_batch_takes_what_it_takes():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(5, entry(1, 100, ready_us=20, transfer_us=7))
    assert until_empty(crowd) == {1: CompletedWork(1, 20, 127, 100)}


def test_a_batch_that_comes_later_slows_down_those_that_were_there_from_then_on():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(40, entry(2, 200))
    ended = until_empty(crowd)
    assert ended[1].end_us == 40 + 60 * 1.5  # the other 60 at the pace of two
    assert ended[2].end_us == 130 + 200 - 60  # the 90 beside the first were worth 60, the rest it had for itself


def test_a_batch_that_leaves_sets_the_others_free():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 100))
    assert crowd.remove(30, 2) == ((0, 30),)
    assert until_empty(crowd) == {1: CompletedWork(1, 0, 110, 110)}


def test_a_booked_batch_begins_when_the_one_before_really_ends():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 30, after=1))
    crowd.add(50, entry(3, 500))  # the first now takes 125
    ended = until_empty(crowd)
    assert (ended[2].start_us, ended[2].end_us) == (125, 125 + 45)


def test_a_batch_booked_behind_one_that_is_lost_begins_at_that_moment():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 30, after=1))
    crowd.remove(10, 1)
    assert until_empty(crowd)[2] == CompletedWork(2, 10, 40, 30)


def test_a_booked_batch_that_is_lost_never_had_a_slice():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 30, after=1))
    assert crowd.remove(10, 2) == ()
    assert until_empty(crowd) == {1: CompletedWork(1, 0, 100, 100)}


def test_a_transfer_is_not_felt_by_any_batch():
    crowd = ColocatedBatches(Each(), "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 50, transfer_us=100))
    assert until_empty(crowd) == {1: CompletedWork(1, 0, 100, 100), 2: CompletedWork(2, 0, 150, 50)}


def test_a_late_look_finds_everything_at_its_own_time():
    late, on_time = ColocatedBatches(Each(), "d"), ColocatedBatches(Each(), "d")
    for crowd in (late, on_time):
        crowd.add(0, entry(1, 100))
        crowd.add(0, entry(2, 30, after=1))
        crowd.add(0, entry(3, 500))
    late.advance(10_000)
    assert {ended.batch_id: ended for ended in late.take_finished()} == until_empty(on_time)


def test_without_a_model_no_batch_feels_another():
    crowd = ColocatedBatches(None, "d")
    crowd.add(0, entry(1, 100))
    crowd.add(0, entry(2, 100))
    assert {ended.end_us for ended in until_empty(crowd).values()} == {100}


Plan = list[tuple[int, int, int, int, bool]]
PLANS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 200), st.integers(0, 30), st.integers(1, 8), st.booleans()),
    min_size=1,
    max_size=9,
)
"""Gap to the one before, work, transfer, size, and whether it is booked behind that one."""


def entries(plan: Plan) -> list[tuple[int, BatchWork]]:
    made, at_us = list[tuple[int, BatchWork]](), 0
    for number, (gap_us, work_us, transfer_us, size, booked) in enumerate(plan, start=1):
        at_us += gap_us
        after = number - 1 if booked else 0
        made.append((at_us, entry(number, work_us, at_us, after, transfer_us, size)))
    return made


def played(plan: Plan) -> dict[int, CompletedWork]:
    crowd = ColocatedBatches(Shares(), "d")
    for at_us, one in entries(plan):
        crowd.add(at_us, one)
    return until_empty(crowd)


@examples(40)
@given(PLANS)
def test_small_steps_lead_to_the_same_ends(plan: Plan):
    """Brute force: half a microsecond at a time."""
    step, left, ends = 0.5, dict[int, float](), dict[int, float]()
    begins: dict[int, float] = {}
    made, now, model = [one for _, one in entries(plan)], 0.0, Shares()
    while len(ends) < len(made):
        for one in made:
            before_us = ends.get(one.behind, 0.0 if not one.behind else NEVER_US)
            if one.batch_id not in begins and now >= before_us and now >= one.ready_us:
                begins[one.batch_id] = now + one.transfer_us
                left[one.batch_id] = one.work_us
        working = [one for one in made if one.batch_id not in ends and now >= begins.get(one.batch_id, NEVER_US) - 1e-6]
        for one in working:
            others = [other.running for other in working if other is not one]
            left[one.batch_id] -= step / model.slowdown(one.running, others, "d")
        now += step
        ends |= {one.batch_id: now for one in working if left[one.batch_id] <= 1e-6}
    found = played(plan)
    assert {name: ended.end_us for name, ended in found.items()} == pytest.approx(ends, abs=3.0 * len(plan))


@given(PLANS)
def test_all_work_is_done_and_no_batch_is_faster_than_alone(plan: Plan):
    found = played(plan)
    assert found.keys() == set(range(1, len(plan) + 1))
    assert all(found[one.batch_id].device_us >= one.work_us for _, one in entries(plan))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 10_000))
def test_beside_neighbours_that_stay_the_pace_is_that_of_the_model(sizes: list[int], work_us: int):
    crowd, model = ColocatedBatches(Shares(), "d"), Shares()
    for number, size in enumerate(sizes, start=2):
        crowd.add(0, entry(number, 10_000_000, batch=size))
    mine = entry(1, work_us, ready_us=17)
    crowd.add(17, mine)
    crowd.advance(9_000_000)
    [ended] = crowd.take_finished()
    others = [ColocatedBatch(f"f{number}", size, 0.25) for number, size in enumerate(sizes, start=2)]
    assert ended.device_us == pytest.approx(work_us * model.slowdown(mine.running, others, "d"), abs=1.0)


@given(PLANS, st.lists(st.integers(0, 4_000), max_size=30))
def test_being_looked_at_now_and_then_changes_nothing(plan: Plan, looks: list[int]):
    crowd, coming = ColocatedBatches(Shares(), "d"), entries(plan)
    for at_us, one in sorted([*coming, *((look_us, None) for look_us in looks)], key=lambda pair: pair[0]):
        if one is None:
            crowd.advance(at_us)
        else:
            crowd.add(at_us, one)
    found = {name: ended.end_us for name, ended in until_empty(crowd).items()}
    assert found == pytest.approx({name: ended.end_us for name, ended in played(plan).items()}, abs=1)
