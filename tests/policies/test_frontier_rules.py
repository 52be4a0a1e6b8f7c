"""Small rules of `frontier` that no whole run shows: each is a line somewhere, and each has a reason."""

from __future__ import annotations

from lamina.policies.frontier.optimizer import MAX_WAIT_BATCHES, WaitBudget

MS = 1_000


def test_a_generous_goal_is_no_leave_to_wait_longer_than_a_few_batches_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=100, time_us=2 * MS) == MAX_WAIT_BATCHES * 2 * MS


def test_company_is_waited_for_three_times_as_long_as_it_should_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=2, time_us=50 * MS) == 6 * MS + 50
