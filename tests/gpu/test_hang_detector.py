"""Hang detector: batches that hang, and batches that only wait."""

from __future__ import annotations

from lamina.gpu.hang_detector import STEP_S, HangDetector


def watched(*batches: tuple[int, int, float]) -> HangDetector:
    watch = HangDetector()
    for batch_id, mask, limit_s in batches:
        watch.on_batch_started(batch_id, mask, limit_s)
    return watch


def seen(watch: HangDetector, seconds: float, since_s: float = 100.0) -> list[int]:
    """Batches reported while it looked this long, at every step."""
    steps = round(seconds / STEP_S)
    return [batch_id for step in range(steps) for batch_id in watch.find_hung(since_s + step * STEP_S * 1.001)]


def test_a_batch_past_its_limit_is_told_of_once():
    assert seen(watched((1, 0b1, 1.0)), 3) == [1]


def test_a_batch_without_a_limit_may_run_for_ever():
    assert seen(watched((1, 0b1, 0.0)), 100) == []


def test_a_batch_that_ended_is_forgotten():
    watch = watched((1, 0b1, 1.0))
    watch.on_batch_ended(1, 0b1)
    assert seen(watch, 3) == []


def test_the_time_of_one_that_waits_behind_another_on_its_slice_does_not_run():
    assert seen(watched((1, 0b1, 0.0), (2, 0b1, 1.0)), 3) == []


def test_its_time_begins_when_the_one_before_it_has_ended():
    watch = watched((1, 0b1, 10.0), (2, 0b1, 1.0))
    seen(watch, 3)
    watch.on_batch_ended(1, 0b1)
    assert [*seen(watch, 0.8, 200.0), 0, *seen(watch, 0.5, 300.0)] == [0, 2]


def test_slices_have_nothing_to_do_with_each_other():
    assert seen(watched((1, 0b1, 10.0), (2, 0b10, 1.0)), 3) == [2]


def test_time_in_which_it_could_not_look_does_not_count():
    watch = watched((1, 0b1, 1.0))
    watch.find_hung(100.0)
    assert watch.find_hung(1000.0) == []


def test_the_time_of_a_paused_batch_does_not_run_and_that_of_the_one_that_preempts_it_does():
    watch = watched((1, 0b1, 1.0), (2, 0b1, 1.0))
    steps = [watch.find_hung(100.0 + step * STEP_S * 1.001, paused={1}) for step in range(30)]
    assert [batch_id for found in steps for batch_id in found] == [2]
    watch.on_batch_ended(2, 0b1)
    assert seen(watch, 3, since_s=110.0) == [1], "it goes on where it was"


def test_when_all_of_a_slice_are_paused_none_is_blamed():
    watch = watched((1, 0b1, 1.0))
    assert [watch.find_hung(100.0 + step * STEP_S * 1.001, paused={1}) for step in range(30)] == [[]] * 30
