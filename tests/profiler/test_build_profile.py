from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from lamina.errors import BadValue
from lamina.predict import profile as profiles
from lamina.predict.profile import Point, Profile, compare_profiles
from lamina.profiler import build_profile
from lamina.profiler.measurement import MeasurementOutcome
from lamina.profiler.measurement_log import LogHeader, MeasurementLog, SessionRecord, VisitRecord
from tests.profiler.fake_bench import FakeBench, straight


def test_a_point_is_the_median_of_its_runs() -> None:
    (point,) = build_profile.to_points({(1, 1): [10.0, 30.0, 20.0]})
    assert point.p50_us == 20.0


def test_few_runs_have_the_tail_of_all_points() -> None:
    runs = {(1, 1): [100.0] * 150 + [150.0] * 3, (2, 1): [1000.0] * 5}
    assert [point.p99_us for point in build_profile.to_points(runs)] == [150.0, 1500.0]


def test_many_runs_have_a_tail_of_their_own() -> None:
    runs = {(1, 1): [100.0] * 198 + [140.0] * 5, (2, 1): [1000.0, 3000.0] * 50}
    assert build_profile.to_points(runs)[0].p99_us == 140.0


def test_units_with_one_end_alone_are_left_out() -> None:
    runs = {(1, 1): [9.0], (8, 1): [9.0], (8, 2): [9.0]}
    assert [(point.batch, point.units) for point in build_profile.to_points(runs)] == [(1, 1), (8, 1)]


def test_a_function_without_batches_keeps_all_its_units() -> None:
    assert len(build_profile.to_points({(1, 1): [9.0], (1, 2): [9.0]})) == 2


@pytest.mark.live
def test_a_profile_says_where_it_comes_from(tmp_path: Path) -> None:
    outcome = MeasurementOutcome({(1, 1): [10.0] * 9 + [90.0]}, 0.04, 1.5, True, disturbed=2)
    head = LogHeader(function="f", device="fake", machine="made up", code="c", max_batch=1, inputs="i")
    record = MeasurementLog(tmp_path / "runs", head)
    for load_us, memory_mib in ((100, 77), (300, 60), (200, 50)):
        record.add_load(load_us)
        record.add_end(SessionRecord(spent_s=0.5, memory_mib=memory_mib, disturbed=1))
    record.close()
    profile = build_profile.build_profile("f", FakeBench(straight), outcome, record, 0.05, tmp_path / "app.py")
    assert (profile.device, profile.load_us, profile.memory_mib, profile.bandwidth) == ("fake", 200, 77, 0.0)
    told = {
        name: profile.meta[name] for name in ("machine", "driver", "runs", "stalls", "disturbed", "spent_s", "unsure", "target")
    }
    assert told == {
        "machine": "made up",
        "driver": "none",
        "runs": 10,
        "stalls": 1,
        "disturbed": 3,
        "spent_s": 1.5,
        "unsure": 0.04,
        "target": 0.05,
    }
    assert "not measured" in profile.meta["bandwidth"]


def test_a_written_profile_reads_the_same_and_leaves_nothing_beside(tmp_path: Path) -> None:
    profile = Profile(function="f", device="cpu", points=[Point(batch=1, units=1, p50_us=5.0)])
    build_profile.write_atomically(profile, tmp_path / "f.cpu.json")
    assert profiles.read(tmp_path / "f.cpu.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["f.cpu.json"]


def profile_of(*times: tuple[int, float]) -> Profile:
    return Profile(function="f", device="cpu", points=[Point(batch=batch, units=1, p50_us=us) for batch, us in times])


def test_a_comparison_names_the_biggest_change_whichever_way() -> None:
    found = compare_profiles(profile_of((1, 100.0), (2, 100.0), (4, 100.0)), profile_of((1, 110.0), (2, 40.0), (8, 1.0)))
    assert [change.ratio for change in found.changes] == pytest.approx([1.1, 0.4])
    assert (found.biggest.batch, found.only_before, found.only_after) == (2, 1, 1)


def test_profiles_without_a_common_place_cannot_be_compared() -> None:
    with pytest.raises(BadValue, match="no place is in both"):
        compare_profiles(profile_of((1, 100.0)), profile_of((2, 100.0)))


def visits(paces: list[float], noise: float, runs: int = 12) -> list[VisitRecord]:
    """One place, visited again and again by a machine whose pace is another one each time."""
    rng = random.Random(4)
    return [
        VisitRecord(batch=1, units=1, us=[1_000 * pace * math.exp(rng.gauss(0, noise)) for _ in range(runs)]) for pace in paces
    ]


def test_a_machine_whose_pace_changes_is_seen_to_wander() -> None:
    rng = random.Random(5)
    paces = [math.exp(rng.gauss(0, 0.1)) for _ in range(40)]
    assert build_profile.pace_drift(visits(paces, noise=0.05)) == pytest.approx(0.1, rel=0.3)


def test_noise_alone_is_no_wandering() -> None:
    found = build_profile.pace_drift(visits([1.0] * 40, noise=0.1))
    assert found is not None
    assert found < 0.02


def test_places_visited_once_say_nothing_about_the_pace() -> None:
    assert build_profile.pace_drift(visits([1.0], noise=0.1)) is None


def test_a_few_runs_already_say_how_times_spread() -> None:
    runs = {(batch, 1): [100.0 * batch] * 3 + [150.0 * batch] for batch in range(1, 5)}
    assert build_profile.to_spread(runs)[0] == 1.0 and build_profile.to_spread(runs)[-1] == 1.5
