from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.sim.histogram import SUB_BITS, LatencyHistogram, TimeSeries

TIMES = st.lists(st.one_of(st.integers(0, 2000), st.integers(0, 10**7), st.integers(0, 2**50)), min_size=1, max_size=300)


def filled(values: list[int]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(TIMES, st.sampled_from([0.0, 0.5, 0.95, 0.99, 0.999, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_exact_one(values: list[int], part: float):
    rank = max(1, -int(-part * len(values) // 1))
    exact = sorted(values)[rank - 1]
    assert filled(values).quantile_us(part) == pytest.approx(exact, rel=0.01)


@given(TIMES, TIMES)
def test_two_histograms_joined_are_the_histogram_of_both(left: list[int], right: list[int]):
    joined = filled(left)
    joined.merge(filled(right))
    both = filled(left + right)
    assert [joined.quantile_us(p / 20) for p in range(21)] == [both.quantile_us(p / 20) for p in range(21)]
    assert (joined.count, joined.total_us, joined.largest_us) == (both.count, both.total_us, both.largest_us)


@given(TIMES)
def test_the_curve_rises_to_one(values: list[int]):
    curve = filled(values).cdf()
    assert curve == sorted(curve)
    assert curve[-1][1] == 1.0


def test_an_empty_histogram_has_no_times():
    assert (LatencyHistogram().quantile_us(0.99), LatencyHistogram().mean_us, LatencyHistogram().cdf()) == (0.0, 0.0, [])


def test_however_many_times_there_are_they_share_the_buckets_of_their_span():
    rng = random.Random(1)
    histogram = filled([rng.randrange(2**20) for _ in range(20_000)])
    assert len(histogram._counts) <= (20 - SUB_BITS + 1) << SUB_BITS


@given(st.lists(st.lists(st.integers(0, 10**7), max_size=50), max_size=5))
def test_a_series_loses_nothing_when_its_stretches_double(blocks: list[list[int]]):
    series = TimeSeries(bins=16, width_us=10)
    for times_us in blocks:
        series.add_all(times_us)
    assert sum(series.sums) == sum(map(len, blocks))
    assert max(map(max, filter(None, blocks)), default=0) < series.width_us * len(series.sums)


@given(st.lists(st.integers(0, 10**9), max_size=50))
def test_a_block_of_times_counts_as_the_same_times_one_by_one(times_us: list[int]):
    at_once = LatencyHistogram()
    at_once.add_all(times_us)
    one_by_one = filled(times_us)
    for of in (at_once, one_by_one):
        of.add_all([])
    assert (at_once.cdf(), at_once.mean_us, at_once.largest_us) == (one_by_one.cdf(), one_by_one.mean_us, one_by_one.largest_us)


@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)), min_size=1, max_size=50))
def test_a_span_is_spread_over_the_stretches_it_covers(spans: list[tuple[int, int]]):
    series = TimeSeries(bins=16, width_us=10)
    for start_us, length_us in spans:
        series.add_span(start_us, start_us + length_us, 2.0)
    assert sum(series.sums) == pytest.approx(2.0 * sum(length for _, length in spans))
    assert max(series.sums) <= 2.0 * series.width_us * len(spans) + 1e-6


def test_widening_a_series_puts_it_on_another_axis():
    series = TimeSeries(bins=4, width_us=10)
    series.add_all([0, 15, 25, 35])
    series.widen(20)
    assert (series.width_us, series.sums) == (20, [2.0, 2.0, 0.0, 0.0])
