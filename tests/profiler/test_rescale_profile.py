"""Reprofiling: a profile of which some points were measured again."""

from __future__ import annotations

import pytest

from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.idle_reprofile import rescale_profile

PROFILE = Profile(
    function="f",
    device="gpu",
    points=[Point(batch=b, units=u, p50_us=1_000 * b / u, p99_us=1_200 * b / u) for u in (1, 2, 4) for b in (1, 8)],
    load_us=7,
    meta={"machine": "m"},
)


def at(profile: Profile, batch: int, units: int) -> float:
    return ProfileTable([profile]).median_us("f", "gpu", batch, units)


def test_a_place_that_was_measured_is_as_it_was_measured():
    assert at(rescale_profile(PROFILE, {(8, 2): [5_000, 6_000, 90_000]}), 8, 2) == 6_000


def test_the_rest_of_its_row_changes_with_it():
    assert at(rescale_profile(PROFILE, {(8, 2): [8_000]}), 1, 2) == pytest.approx(1_000)


def test_rows_that_were_not_measured_again_change_as_the_others_did():
    assert at(rescale_profile(PROFILE, {(8, 2): [8_000], (1, 2): [1_000]}), 8, 4) == pytest.approx(4_000)


def test_a_place_the_profile_did_not_have_is_added():
    found = rescale_profile(PROFILE, {(4, 2): [9_000]})
    assert at(found, 4, 2) == pytest.approx(9_000)


def test_tails_keep_their_distance_from_the_median():
    [point] = [p for p in rescale_profile(PROFILE, {(8, 2): [8_000]}).points if (p.batch, p.units) == (8, 2)]
    assert point.p99_us == pytest.approx(9_600)


def test_what_else_it_says_is_kept():
    found = rescale_profile(PROFILE, {(8, 2): [8_000]}, measured_again="today")
    assert (found.load_us, found.meta) == (7, {"machine": "m", "measured_again": "today"})
