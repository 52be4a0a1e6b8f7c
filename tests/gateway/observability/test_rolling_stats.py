"""Rolling statistics of the recent past, as `top` shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.actions import JobRef, StartBatch
from lamina.gateway.observability.metrics import WINDOW_S, RollingStats

SECOND = 1_000_000


def batch(number: int, mask: int = 0b11, after: int = 0) -> StartBatch:
    return StartBatch(number, "see", "see-1", "gpu0", mask, (JobRef(number, f"c{number}", 0, "see"),), behind=after)


def test_held_is_the_lease_and_used_what_the_device_measured():
    recent = RollingStats()
    recent.on_batch_started(0, batch(1))
    recent.on_batch_finished(1_000, 1, 400)
    share = recent.usage_shares(2_000)[1]["gpu0", "see"]
    assert (share.held, share.used, share.jobs) == (2 * 1_000, 2 * 400, 1)


def test_a_booked_batch_holds_its_slice_only_from_the_end_of_the_one_before():
    recent = RollingStats()
    recent.on_batch_started(0, batch(1))
    recent.on_batch_started(100, batch(2, after=1))
    recent.on_batch_finished(1_000, 1, 900)
    recent.on_batch_finished(1_500, 2, 450)
    assert recent.usage_shares(2_000)[1]["gpu0", "see"].held == 2 * (1_000 + 500)


def test_what_is_older_than_the_window_does_not_count():
    recent = RollingStats()
    recent.on_batch_started(0, batch(1))
    recent.on_batch_finished(1_000, 1, 400)
    assert recent.usage_shares((WINDOW_S + 1) * SECOND)[1] == {}


def test_a_batch_that_was_never_started_counts_for_nothing():
    recent = RollingStats()
    recent.on_batch_finished(1_000, 7, 400)
    assert recent.usage_shares(2_000)[1] == {}


def test_p99_and_the_part_in_time_are_those_of_the_last_minute():
    recent = RollingStats()
    recent.now_us = 1
    recent.replies_of("see").append((recent.now_us, 9_000_000, False))
    recent.now_us = 100 * SECOND
    for latency_us in range(1, 101):
        recent.replies_of("see").append((recent.now_us, latency_us * 1_000, latency_us <= 90))
    found = recent.call_stats(101 * SECOND, "see")
    assert (found["answers"], found["p50_ms"], found["p99_ms"], found["met"]) == (100, 51.0, 100.0, pytest.approx(0.9))


def test_a_target_without_answers_has_no_percentiles():
    assert RollingStats().call_stats(0, "see")["p99_ms"] is None


@given(st.lists(st.integers(0, 40 * SECOND), max_size=60), st.integers(0, 90 * SECOND))
def test_the_rate_of_replies_is_that_of_the_whole_statistics(gaps: list[int], later_us: int):
    recent, now_us = RollingStats(), 0
    for gap in gaps:
        now_us += gap
        recent.replies_of("see").append((now_us, 5_000, True))
    now_us += later_us
    wanted = recent.call_stats(now_us, "see")["per_s"]
    assert recent.reply_rate(now_us, "see") == wanted == recent.call_stats(now_us, "see")["per_s"]
    assert recent.reply_rate(now_us, "other") == 0.0
