"""The way to a device and back: measured from batches, and part of every expected end."""

from __future__ import annotations

import random

import pytest

from lamina.core.events import BatchFinished
from lamina.core.scheduling.leases import WayEstimate
from tests.script import BIG_GPU, Script, a_function

MS = 1_000


def learnt(*ways_us: int) -> WayEstimate:
    estimate = WayEstimate()
    for way_us in ways_us:
        estimate.observe(way_us)
    return estimate


def test_a_steady_way_is_planned_with_as_it_is():
    assert learnt(*[3 * MS] * 100).planning_us == pytest.approx(3 * MS, rel=0.01)


def test_a_way_that_spreads_is_seldom_longer_than_what_is_planned_with():
    rng = random.Random(1)
    estimate, longer = learnt(3 * MS), 0
    for _ in range(2_000):
        way_us = int(3 * MS * rng.lognormvariate(0, 0.2))
        longer += way_us > estimate.planning_us
        estimate.observe(way_us)
    assert longer < 0.12 * 2_000


def test_one_stall_of_the_machine_is_no_longer_way():
    assert learnt(*[200] * 20, 500 * MS).planning_us < 2 * MS


@pytest.mark.parametrize("before_us", [0, 200, 1 * MS])
def test_a_way_that_is_longer_for_good_is_known_after_a_handful_of_batches(before_us: int):
    assert learnt(*[before_us] * 50, *[3 * MS] * 12).planning_us >= 3 * MS


def test_a_way_that_is_far_shorter_is_believed_at_once():
    assert learnt(*[30 * MS] * 50, 1 * MS).planning_us == pytest.approx(1 * MS, rel=0.25)


def test_what_nothing_can_prove_wrong_is_believed_less_and_less():
    estimate = learnt(*[30 * MS] * 50)
    for _ in range(10):
        estimate.relax()
    assert estimate.planning_us < 1 * MS


# ------------------------------------------------------------------------ in the controller


def served(script: Script, way_us: int, times: int = 30) -> Script:
    """One call after another, each alone, on a device that far away."""
    script.given(a_function(), devices=[BIG_GPU], takes={"f": 10 * MS})
    for number in range(times):
        script.at(number * 100 * MS).arrives(f"c{number}")
        script.at(script.now_us + 10 * MS + way_us).finishes(took_us=10 * MS)
    return script.at(times * 100 * MS)


def the_device(script: Script):
    return script.controller.state.devices[BIG_GPU.id]


def test_what_a_batch_took_beside_its_own_time_is_the_way(script: Script):
    assert the_device(served(script, way_us=3 * MS)).way_us == pytest.approx(3 * MS, rel=0.01)


def test_an_expected_end_has_the_way_in(script: Script):
    served(script, way_us=3 * MS).arrives("last")
    [batch] = script.controller.state.batches.values()
    assert batch.expected_end_us - script.now_us == pytest.approx(13 * MS, rel=0.01)


def test_a_booked_batch_makes_its_way_while_the_one_before_it_runs(script: Script):
    served(script, way_us=3 * MS).arrives("first")
    script.arrives("second")
    script.at(script.now_us + 10 * MS)
    first, second = script.controller.state.batches.values()
    assert second.behind is first
    assert second.expected_end_us - first.expected_end_us == 10 * MS


def test_a_booked_batch_says_nothing_about_the_way(script: Script):
    """It waits for the one before it, however long that takes."""
    served(script, way_us=3 * MS).arrives("first")
    script.arrives("second")
    before_us = the_device(script).way_us
    script.at(script.now_us + 10 * MS)
    assert len(script.controller.state.batches) == 2
    script.at(script.now_us + 3 * MS).finishes(took_us=10 * MS)
    after_us = the_device(script).way_us
    script.at(script.now_us + 10 * MS).finishes(took_us=10 * MS)
    assert the_device(script).way_us == after_us == pytest.approx(before_us, rel=0.01)


def test_a_warm_up_says_nothing_about_the_way_nor_about_its_function(script: Script):
    """It waited for what the next batches find made."""
    served(script, way_us=3 * MS).arrives("first")
    seen = script.predictor.seen
    seen.clear()
    [batch] = script.controller.state.batches.values()
    script.at(script.now_us + 300 * MS).tell(BatchFinished(batch.id, 150 * MS, is_warmup=True))
    assert not script.controller.state.batches and not seen
    assert the_device(script).way_us == pytest.approx(3 * MS, rel=0.01)
    script.arrives("second")
    script.at(script.now_us + 13 * MS).finishes(took_us=10 * MS)
    assert seen == [("f", 1, 10 * MS)]
