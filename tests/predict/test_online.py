"""Latency learnt from what is served."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.predict.online import STALE_MARGIN, OnlinePredictor
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable


def learnt(samples: list[tuple[int, int]], base: ProfileTable | None = None) -> OnlinePredictor:
    predictor = OnlinePredictor(base or ProfileTable([]))
    for batch, us in samples:
        predictor.observe("f", "gpu", batch, 1, us)
    return predictor


def noisy_line(seed: int, count: int = 300) -> list[tuple[int, int]]:
    """2 ms and 500 us per job, give or take 3 %."""
    rng = random.Random(seed)
    return [(b, round((2_000 + 500 * b) * rng.uniform(0.97, 1.03))) for b in (rng.randint(1, 16) for _ in range(count))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_it_finds_the_line_behind_noisy_samples(seed: int, batch: int):
    truly_us = 2_000 + 500 * batch
    assert truly_us * 0.97 <= learnt(noisy_line(seed)).latency_us("f", "gpu", batch, 1) <= truly_us * 1.25


@pytest.mark.parametrize("seed", range(5))
def test_plans_made_with_it_are_seldom_late(seed: int):
    predictor = learnt(noisy_line(seed))
    late = [us for batch, us in noisy_line(seed + 100) if us > predictor.latency_us("f", "gpu", batch, 1)]
    assert len(late) <= 0.05 * 300


@pytest.mark.parametrize("seed", range(3))
def test_one_stall_does_not_close_the_door(seed: int):
    samples = noisy_line(seed)
    predictor = learnt([*samples, (4, 3_000_000)])
    assert predictor.latency_us("f", "gpu", 4, 1) <= 4_000 * 2.2


@pytest.mark.parametrize("seed", range(3))
def test_after_outliers_it_comes_back(seed: int):
    predictor = learnt([*noisy_line(seed), *[(4, 200_000)] * 3, *noisy_line(seed + 1, 600)])
    assert 4_000 * 0.95 <= predictor.latency_us("f", "gpu", 4, 1) <= 4_000 * 1.3


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_when_the_machine_changes_so_does_the_prediction(factor: float):
    changed = [(batch, round(us * factor)) for batch, us in noisy_line(1, 1_000)]
    predictor = learnt([*noisy_line(0), *changed])
    truly_us = (2_000 + 500 * 8) * factor
    assert truly_us * 0.9 <= predictor.latency_us("f", "gpu", 8, 1) <= truly_us * 1.5


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(0, 10**7)), min_size=1, max_size=40),
    st.integers(1, 64),
    st.integers(1, 32),
)
def test_a_bigger_batch_is_never_predicted_faster(samples: list[tuple[int, int]], batch: int, more: int):
    predictor = learnt(samples)
    assert 0 < predictor.latency_us("f", "gpu", batch, 1) <= predictor.latency_us("f", "gpu", batch + more, 1)


def relaxed(predictor: OnlinePredictor) -> int:
    """What it predicts after a while in which every call was refused."""
    for _ in range(10):
        predictor.relax("f")
    return predictor.latency_us("f", "gpu", 1, 1)


def test_one_slow_run_at_the_beginning_does_not_close_the_door_for_good():
    """What a function sets up in its first call was taken for its time: with an SLO it was refused for ever after."""
    predictor = OnlinePredictor()
    predictor.observe("f", "gpu", 1, 1, 5_000_000)
    assert relaxed(predictor) < 100_000
    predictor.observe("f", "gpu", 1, 1, 5_000)
    assert predictor.latency_us("f", "gpu", 1, 1) < 10_000


def test_what_is_slow_again_is_slow():
    """So a function that cannot meet its SLO is tried twice more, and not every few seconds."""
    predictor = OnlinePredictor()
    for _ in range(3):
        predictor.observe("f", "gpu", 1, 1, 5_000_000)
        assert predictor.latency_us("f", "gpu", 1, 1) >= 5_000_000
        tried_us = relaxed(predictor)
    assert tried_us >= 5_000_000


def test_what_was_never_seen_is_unknown():
    predictor = learnt([(1, 1_000)])
    assert predictor.latency_us("g", "gpu", 1, 1) == 0
    assert predictor.latency_us("f", "cpu", 1, 1) == 0
    assert predictor.latency_us("f", "gpu", 1, 2) == 0
    assert predictor.load_us("f", "gpu") == 0


def test_a_measured_zero_does_not_stick():
    predictor = learnt([(1, 0)] * 10 + [(1, 5_000)] * 300)
    assert predictor.latency_us("f", "gpu", 1, 1) > 4_000


def test_loads_are_averaged():
    predictor = OnlinePredictor()
    for us in [1_000] * 5 + [2_000] * 20:
        predictor.observe_load("f", "gpu", us)
    assert predictor.load_us("f", "gpu") == pytest.approx(2_000, rel=0.01)


# ----------------------------------------------------------------------------------------------------- with a profile

PROFILE = Profile(
    function="f",
    device="gpu",
    points=[Point(batch=b, units=1, p50_us=1_000 * b, p99_us=1_200 * b) for b in (1, 16)],
    load_us=500,
)


def test_before_anything_was_seen_the_profile_speaks():
    predictor = learnt([], ProfileTable([PROFILE]))
    assert predictor.latency_us("f", "gpu", 4, 1) == 4_800
    assert predictor.load_us("f", "gpu") == 500


def test_the_first_sample_does_not_make_it_careless():
    """One measurement equal to the median says nothing about the slow end, which the profile knows."""
    assert learnt([(4, 4_000)], ProfileTable([PROFILE])).latency_us("f", "gpu", 4, 1) >= 4_600


def test_a_slower_machine_scales_the_whole_profile():
    predictor = learnt([(2, 4_000)] * 60, ProfileTable([PROFILE]))
    assert 32_000 <= predictor.latency_us("f", "gpu", 16, 1) <= 1.12 * 32_000  # a tenth is the margin of a stale profile


def test_a_measured_zero_does_not_stick_to_a_profile_either():
    predictor = learnt([(1, 0)] + [(1, 1_000)] * 400, ProfileTable([PROFILE]))
    assert predictor.latency_us("f", "gpu", 1, 1) > 900


# ------------------------------------------------------------------------------------------------ a level that changes


def steady(seed: int, level_us: float, count: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(4, round(level_us * rng.uniform(0.97, 1.03))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.4, 0.7, 1.3, 2.0, 3.5])
@pytest.mark.parametrize("base", [None, ProfileTable([PROFILE])], ids=["learnt", "profiled"])
def test_a_change_of_level_is_followed_within_six_observations(seed: int, factor: float, base: ProfileTable | None):
    predictor = learnt([*steady(seed, 4_000, 60), *steady(seed + 50, 4_000 * factor, 6)], base)
    assert 4_000 * factor * 0.98 <= predictor.latency_us("f", "gpu", 4, 1) <= 4_000 * factor * 1.35
    assert predictor.level_changes >= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("outlier_us", [1, 12_000, 4_000_000])
def test_one_outlier_is_no_change_of_level(seed: int, outlier_us: int):
    predictor = learnt([*steady(seed, 4_000, 60), (4, outlier_us), *steady(seed + 50, 4_000, 10)])
    assert predictor.level_changes == 0
    assert predictor.latency_us("f", "gpu", 4, 1) <= 4_000 * 1.8


def test_noise_alone_seldom_looks_like_a_change():
    assert sum(learnt(steady(seed, 4_000, 500)).level_changes for seed in range(10)) <= 5


def test_two_outliers_far_apart_do_not_add_up():
    predictor = learnt([*steady(0, 4_000, 60), (4, 12_000), *steady(1, 4_000, 20), (4, 12_000), *steady(2, 4_000, 5)])
    assert predictor.level_changes == 0


# ------------------------------------------------------------------------------------------------------ a stale profile


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_profile_that_most_of_what_is_seen_leaves_is_named(factor: float):
    predictor = learnt(steady(0, 4_000 * factor, 12), ProfileTable([PROFILE]))
    [stale] = predictor.stale_profiles()
    assert (stale.function, stale.kind, stale.units) == ("f", "gpu", 1)
    assert stale.ratio == pytest.approx(factor, rel=0.05)


def test_a_profile_that_holds_is_not_stale():
    assert learnt(steady(0, 4_000, 200), ProfileTable([PROFILE])).stale_profiles() == []


def test_an_outlier_now_and_then_does_not_make_a_profile_stale():
    samples = [one for seed in range(20) for one in (*steady(seed, 4_000, 8), (4, 9_000))]
    assert learnt(samples, ProfileTable([PROFILE])).stale_profiles() == []


def test_a_stale_profile_is_planned_with_a_wider_margin():
    truly_us = 6_000
    predictor = learnt(steady(0, truly_us, 200), ProfileTable([PROFILE]))
    assert predictor.stale_profiles()
    assert 1.1 * truly_us <= predictor.latency_us("f", "gpu", 4, 1) <= 1.4 * truly_us


def test_a_profile_recovers_with_its_machine():
    predictor = learnt([*steady(0, 6_000, 40), *steady(1, 4_000, 60)], ProfileTable([PROFILE]))
    assert predictor.stale_profiles() == []


# ------------------------------------------------------------------------------------------------------- several slices

SLICES = Profile(
    function="f", device="gpu", points=[Point(batch=b, units=u, p50_us=1_000 * b / u) for u in (1, 2, 4) for b in (1, 16)]
)


def seen_on(units: int, ratio: float, count: int, seed: int, predictor: OnlinePredictor) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        predictor.observe("f", "gpu", 4, units, round(4_000 / units * ratio * rng.uniform(0.95, 1.05)))


def test_what_was_seen_on_one_slice_is_believed_of_the_others():
    predictor = OnlinePredictor(ProfileTable([SLICES], margin=0.1))
    seen_on(1, 1.2, 40, 0, predictor)
    assert 1.2 * 1_000 <= predictor.latency_us("f", "gpu", 4, 4) <= 1.5 * 1_000


@pytest.mark.parametrize("seed", range(5))
def test_slices_that_differ_by_noise_alone_are_planned_alike(seed: int):
    """Else the choice between slices that cost the same would follow the dice, and never look at the others again."""
    predictor = OnlinePredictor(ProfileTable([SLICES]))
    for turn in range(10):
        seen_on(1, 1.0, 3, 10 * seed + turn, predictor)
        seen_on(4, 1.0, 3, 10 * seed + turn + 500, predictor)
    assert predictor.latency_us("f", "gpu", 4, 1) == pytest.approx(4 * predictor.latency_us("f", "gpu", 4, 4), rel=0.002)


def test_a_slice_that_differs_for_real_is_planned_by_itself():
    predictor = OnlinePredictor(ProfileTable([SLICES]))
    for turn in range(20):
        seen_on(1, 1.0, 3, turn, predictor)
        seen_on(4, 1.6, 3, turn + 500, predictor)
    assert predictor.latency_us("f", "gpu", 4, 1) <= 1.15 * 4_000
    assert predictor.latency_us("f", "gpu", 4, 4) >= 1.55 * 1_000


def test_a_profile_that_was_measured_again_speaks_for_itself():
    predictor = learnt(steady(0, 6_000, 40), ProfileTable([PROFILE]))
    points = [Point(batch=b, units=1, p50_us=1_500 * b, p99_us=1_600 * b) for b in (1, 16)]
    predictor.replace_profile(Profile(function="f", device="gpu", points=points))
    assert predictor.latency_us("f", "gpu", 4, 1) == 6_400
    assert predictor.stale_profiles() == []


def test_other_functions_keep_what_was_learnt_when_one_is_measured_again():
    predictor = learnt([(4, 9_000)] * 20)
    predictor.replace_profile(Profile(function="g", device="gpu", points=[Point(batch=1, units=1, p50_us=5.0)]))
    assert predictor.latency_us("f", "gpu", 4, 1) >= 9_000


def test_on_soft_slices_a_plan_adds_less_and_no_profile_is_stale():
    """Alone it has the whole device and takes half of what the profile says; beside others as long."""
    profile = Profile(function="f", device="gpu", points=[Point(batch=1, units=1, p50_us=1_000.0)])
    hard, soft = OnlinePredictor(ProfileTable([profile])), OnlinePredictor(ProfileTable([profile]), frozenset({"gpu"}))
    for number in range(60):
        for predictor in (hard, soft):
            predictor.observe("f", "gpu", 1, 1, 500 if number % 2 else 1_000)
    assert soft.latency_us("f", "gpu", 1, 1) < hard.latency_us("f", "gpu", 1, 1)
    assert hard.stale_profiles() and not soft.stale_profiles()


# ------------------------------------------------------------------------ as profiles


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1_000, 4_000)), min_size=1, max_size=40),
    st.booleans(),
)
def test_profiles_made_of_what_was_learnt_plan_as_the_predictor_does(samples: list[tuple[int, int]], has_profile: bool):
    points = [Point(batch=batch, units=1, p50_us=1_000 + 200 * batch, p99_us=1_300 + 200 * batch) for batch in (1, 2, 4, 8)]
    base = ProfileTable([Profile(function="f", device="gpu", points=points)] if has_profile else [])
    predictor = learnt(samples, base)
    table = ProfileTable(predictor.learnt_profiles())
    for batch in {batch for batch, _ in samples}:
        assert table.latency_us("f", "gpu", batch, 1) >= 0.5 * predictor.latency_us("f", "gpu", batch, 1)
        if has_profile:
            planned = predictor.latency_us("f", "gpu", batch, 1)  # with a margin, while it calls its profile stale
            assert planned / (1 + STALE_MARGIN) - 2 <= table.latency_us("f", "gpu", batch, 1) <= planned + 2


def test_a_profile_that_nothing_was_learnt_about_stays_as_it_is():
    given_profile = Profile(function="f", device="gpu", points=[Point(batch=1, units=1, p50_us=5)], load_us=9, meta={"date": "x"})
    assert OnlinePredictor(ProfileTable([given_profile])).learnt_profiles() == [given_profile]


def test_learnt_profiles_say_so_and_carry_the_load_time():
    predictor = learnt([(1, 2_000)] * 5)
    predictor.observe_load("f", "gpu", 70_000)
    [found] = predictor.learnt_profiles()
    assert (found.meta, found.load_us) == ({"source": "learnt", "runs": 5}, 70_000)
    assert [(point.batch, point.units, point.p50_us) for point in found.points] == [(1, 1, 2_000.0)]


def test_learnt_profiles_of_many_functions_look_at_what_was_learnt_once():
    class Counting(dict):
        looks = 0

        def items(self):
            self.looks += 1
            return super().items()

    names = [f"f{number}" for number in range(20)]
    points = [Point(batch=1, units=1, p50_us=1_000)]
    predictor = OnlinePredictor(ProfileTable([Profile(function=name, device="gpu", points=points) for name in names]))
    for name in names:
        predictor.observe(name, "gpu", 1, 1, 1_100)
    predictor._ratios = ratios = Counting(predictor._ratios)
    assert [found.meta["runs"] for found in predictor.learnt_profiles()] == [1] * 20
    assert ratios.looks == 1


@pytest.mark.parametrize("is_profiled", [True, False])
@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(100, 9_000)), max_size=20))
def test_several_slices_at_once_are_the_same_as_one_by_one(is_profiled: bool, seen: list[tuple[int, int, int]]):
    points = [Point(batch=1, units=1, p50_us=2_000), Point(batch=8, units=4, p50_us=5_000, p99_us=6_000)]
    base = ProfileTable([Profile(function="f", device="gpu", points=points)] if is_profiled else [])
    predictor = OnlinePredictor(base)
    for batch, units, us in seen:
        predictor.observe("f", "gpu", batch, units, us)
    for batch in (1, 3, 8):
        one_by_one = [predictor.latency_us("f", "gpu", batch, units) for units in (1, 2, 3, 4)]
        assert predictor.latencies_us("f", "gpu", batch, (1, 2, 3, 4)) == one_by_one
