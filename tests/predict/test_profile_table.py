"""Latency from measured points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.predict import profile as profiles
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable

cells = st.tuples(st.integers(1, 64), st.integers(1, 16))
noisy = st.dictionaries(cells, st.floats(0, 1e6), min_size=1, max_size=25)
where = st.tuples(st.integers(1, 200), st.integers(1, 40))


def table(points: dict[tuple[int, int], float], **more: float) -> ProfileTable:
    listed = [Point(batch=batch, units=units, p50_us=us) for (batch, units), us in points.items()]
    return ProfileTable([Profile(function="f", device="gpu", points=listed, load_us=70)], **more)


@given(noisy, where, st.integers(1, 50))
def test_a_bigger_batch_is_never_faster(points: dict[tuple[int, int], float], at: tuple[int, int], more: int):
    known = table(points)
    batch, units = at
    assert known.median_us("f", "gpu", batch, units) <= known.median_us("f", "gpu", batch + more, units) * (1 + 1e-9)


@given(noisy, where, st.integers(1, 50))
def test_a_bigger_slice_is_never_slower(points: dict[tuple[int, int], float], at: tuple[int, int], more: int):
    known = table(points)
    batch, units = at
    assert known.median_us("f", "gpu", batch, units + more) <= known.median_us("f", "gpu", batch, units) * (1 + 1e-9)


@given(st.sets(st.integers(1, 64), min_size=1, max_size=6), st.sets(st.integers(1, 16), min_size=1, max_size=4), st.data())
def test_points_that_make_sense_are_met_exactly(batches: set[int], units: set[int], data: st.DataObject):
    fixed, each = data.draw(st.floats(1, 1e4)), data.draw(st.floats(0.1, 1e3))
    points = {(b, u): (fixed + each * b) / u**0.7 for b in batches for u in units}
    known = table(points)
    for (batch, count), us in points.items():
        assert known.median_us("f", "gpu", batch, count) == pytest.approx(us, rel=1e-12)


@given(noisy)
def test_no_measured_point_is_made_faster(points: dict[tuple[int, int], float]):
    known = table(points)
    for (batch, units), us in points.items():
        assert known.median_us("f", "gpu", batch, units) >= us * (1 - 1e-12)


def test_between_batches_it_is_a_straight_line():
    known = table({(1, 1): 1_000, (5, 1): 3_000})
    assert known.median_us("f", "gpu", 3, 1) == 2_000


def test_beyond_the_largest_batch_the_last_slope_goes_on():
    known = table({(1, 1): 1_000, (5, 1): 3_000})
    assert known.median_us("f", "gpu", 9, 1) == 5_000


def test_from_a_single_batch_size_larger_ones_take_in_proportion():
    known = table({(4, 1): 1_000})
    assert [known.median_us("f", "gpu", n, 1) for n in (1, 4, 8)] == [1_000, 1_000, 2_000]


def test_between_unit_counts_it_is_a_power_law():
    known = table({(1, 1): 1_600, (1, 16): 100})
    assert known.median_us("f", "gpu", 1, 4) == pytest.approx(400)


def test_more_units_than_were_measured_help_no_further():
    known = table({(1, 2): 800, (1, 8): 200})
    assert [known.median_us("f", "gpu", 1, n) for n in (2, 8, 16)] == [800, 200, 200]


def test_fewer_units_than_were_measured_take_longer_in_proportion():
    """Else the smallest slice would look cheaper than those that were measured."""
    known = table({(1, 4): 800, (1, 8): 200})
    assert [known.median_us("f", "gpu", 1, n) for n in (1, 2, 4)] == [3_200, 1_600, 800]


def test_what_was_not_measured_is_unknown():
    known = table({(1, 1): 1_000})
    assert known.latency_us("g", "gpu", 1, 1) == 0
    assert known.latency_us("f", "cpu", 1, 1) == 0
    assert known.median_us("g", "gpu", 1, 1) == 0
    assert known.load_us("g", "gpu") == 0


def test_a_profile_without_points_knows_the_load_alone():
    known = table({})
    assert known.latency_us("f", "gpu", 1, 1) == 0
    assert known.load_us("f", "gpu") == 70


def test_plans_are_made_with_the_slow_end_where_it_was_measured():
    points = [Point(batch=1, units=1, p50_us=1_000, p99_us=1_300), Point(batch=2, units=1, p50_us=2_000)]
    known = ProfileTable([Profile(function="f", device="gpu", points=points)], margin=0.1)
    assert known.latency_us("f", "gpu", 1, 1) == 1_300
    assert known.latency_us("f", "gpu", 2, 1) == math.ceil(2_000 * 1.1)
    assert known.median_us("f", "gpu", 1, 1) == 1_000


def test_it_never_learns():
    known = table({(1, 1): 1_000})
    known.observe("f", "gpu", 1, 1, 9_000)
    known.observe_load("f", "gpu", 9_000)
    assert known.latency_us("f", "gpu", 1, 1) == 1_000
    assert known.load_us("f", "gpu") == 70


@given(noisy, st.integers(1, 200), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_several_slices_at_once_are_the_same_as_one_by_one(points: dict[tuple[int, int], float], batch: int, units: list[int]):
    known = table(points, margin=0.1)
    assert known.latencies_us("f", "gpu", batch, units) == [known.latency_us("f", "gpu", batch, size) for size in units]
    assert known.medians_us("f", "gpu", batch, units) == [known.median_us("f", "gpu", batch, size) for size in units]
    assert known.latencies_us("unknown", "gpu", batch, units) == [0] * len(units)


# -------------------------------------------------------------------------------------------------------------- files


def test_a_profile_survives_its_file(tmp_path):
    before = Profile(function="f", device="gpu", points=[Point(batch=1, units=2, p50_us=3.5)], load_us=7, meta={"driver": "1"})
    profiles.write(before, tmp_path / "f.json")
    assert profiles.read(tmp_path / "f.json") == before
    assert profiles.read_all(tmp_path) == [before]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"function": 1, "device": "g", "points": []}', "\x00"])
def test_a_file_that_is_no_profile_is_named(tmp_path, text: str):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(BadValue, match=r"wrong\.json"):
        profiles.read(path)


def test_a_profile_of_another_version_is_refused(tmp_path):
    path = tmp_path / "new.json"
    path.write_text('{"function": "f", "device": "g", "points": [], "version": 99}')
    with pytest.raises(BadValue, match="version 99"):
        profiles.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadValue, match=r"absent\.json"):
        profiles.read(tmp_path / "absent.json")
