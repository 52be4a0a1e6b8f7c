from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from lamina.errors import BadValue
from lamina.sim import workload
from lamina.sim.workload import RateSegment, Workload
from lamina.types import Slo

from .conftest import DATA

CODE, CONV = DATA / "traces/azure_llm_2023_code.csv.gz", DATA / "traces/azure_llm_2023_conv.csv.gz"
HASGPU = {
    "standard": 2690,
    "stress": 4890,
    "bert_stress_3": 4705,
    "bert_stress_4": 4655,
    "stress_json": 2115,
    "random_burst": 10705,
    "stage_ramp": 10000,
}


def gaps(times: list[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def cv_of(times: list[int]) -> float:
    return statistics.pstdev(gaps(times)) / statistics.fmean(gaps(times))


def test_poisson_arrivals_have_the_rate_asked_for():
    times = list(itertools.islice(workload.poisson(200, random.Random(1)), 20_000))
    assert times[-1] / 1e6 == pytest.approx(20_000 / 200, rel=0.02)  # sigma is 0.7 %


def test_poisson_gaps_vary_as_much_as_their_mean():
    times = list(itertools.islice(workload.poisson(200, random.Random(2)), 20_000))
    assert cv_of(times) == pytest.approx(1.0, abs=0.03)


def test_poisson_counts_per_second_have_a_variance_equal_to_their_mean():
    times = itertools.takewhile(lambda at_us: at_us < 2_000_000_000, workload.poisson(20, random.Random(3)))
    counts = [0] * 2000
    for at_us in times:
        counts[at_us // 1_000_000] += 1
    assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("cv", [0.3, 2.0, 4.0])
def test_gamma_gaps_have_the_variation_asked_for(cv: float):
    times = list(itertools.islice(workload.gamma(100, cv, random.Random(4)), 60_000))
    assert cv_of(times) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.3, 2.0])
def test_gamma_arrivals_keep_the_mean_rate(cv: float):
    times = list(itertools.islice(workload.gamma(100, cv, random.Random(5)), 60_000))
    assert times[-1] / 1e6 == pytest.approx(600, rel=4 * cv / 60_000**0.5)


def test_constant_arrivals_are_evenly_spaced_and_start_at_once():
    assert list(itertools.islice(workload.constant(250), 4)) == [0, 4_000, 8_000, 12_000]


def test_an_even_pulse_through_steps_puts_the_exact_number_into_each_stage():
    times = list(
        workload.arrivals_along(workload.steps([(2_000_000, 5.0), (3_000_000, 0.0), (1_000_000, 7.0)]), 0.0, random.Random(0))
    )
    assert [sum(low <= at < high for at in times) for low, high in [(0, 2e6), (2e6, 5e6), (5e6, 6e6)]] == [10, 0, 7]


def test_an_even_pulse_through_a_ramp_follows_the_square_root():
    times = list(workload.arrivals_along(workload.ramp([(10_000_000, 100.0)]), 0.0, random.Random(0)))
    assert len(times) == 500
    assert times[125] == pytest.approx(5e6, abs=2)  # a quarter of the calls in half of the time


def test_random_arrivals_through_a_ramp_fall_where_the_rate_is_high():
    times = list(workload.arrivals_along(workload.ramp([(10_000_000, 2000.0), (10_000_000, 0.0)]), 1.0, random.Random(6)))
    assert len(times) == pytest.approx(20_000, abs=4 * 20_000**0.5)
    middle = sum(5_000_000 <= at < 15_000_000 for at in times)
    assert middle / len(times) == pytest.approx(0.75, abs=0.02)


def test_arrivals_never_go_back_in_time():
    pieces = (
        RateSegment(1_000_000, 0, 50),
        RateSegment(500_000, 0, 0),
        RateSegment(1_000_000, 80, 3),
        RateSegment(10, 9000, 9000),
    )
    times = list(workload.arrivals_along(pieces, 1.5, random.Random(7)))
    assert times == sorted(times)


@pytest.mark.parametrize(("name", "total"), HASGPU.items())
def test_a_hasgpu_workload_has_exactly_as_many_calls_as_published(name: str, total: int):
    assert (
        sum(1 for _ in workload.arrivals_along(workload.read_hasgpu(DATA / f"has-gpu/{name}.json"), 0.0, random.Random(0)))
        == total
    )


@pytest.mark.parametrize(("name", "total"), HASGPU.items())
def test_a_random_hasgpu_workload_has_that_many_calls_on_average(name: str, total: int):
    count = sum(1 for _ in workload.arrivals_along(workload.read_hasgpu(DATA / f"has-gpu/{name}.json"), 1.0, random.Random(8)))
    assert count == pytest.approx(total, abs=4 * total**0.5)


def test_the_steps_of_a_hasgpu_workload_are_spaced_one_over_the_rate():
    rates = json.loads((DATA / "has-gpu/standard.json").read_text())["rps_per_stage"]
    times = list(workload.arrivals_along(workload.read_hasgpu(DATA / "has-gpu/standard.json"), 0.0, random.Random(0)))
    assert rates[0] == 8
    assert times[:4] == [0, 125_000, 250_000, 375_000]
    assert times[40:42] == [5_000_000, 5_200_000]  # the second stage, at 5 a second


@pytest.mark.parametrize(("path", "rows", "last_us"), [(CODE, 8819, 3_435_948_056), (CONV, 19_366, 3_501_721_937)])
def test_a_trace_is_replayed_row_by_row(path: Path, rows: int, last_us: int):
    times = list(workload.replay_trace(path))
    assert (len(times), times[0], times[-1]) == (rows, 0, last_us)


def test_a_functions_trace_arrives_at_its_end_less_its_duration():
    times = list(workload.replay_trace(DATA / "traces/azure_functions_2021_excerpt.csv"))
    assert (len(times), times[0]) == (199, 1_491)


def test_a_trace_sped_up_is_the_same_trace_in_less_time():
    assert list(itertools.islice(workload.replay_trace(CODE, 10), 3)) == [0, 5_200, 9_818]


def test_a_looped_trace_starts_over_a_mean_gap_after_its_end(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("t_us\n0\n100\n200\n")
    assert list(itertools.islice(workload.replay_trace(path, loop=True), 7)) == [0, 100, 200, 266, 366, 466, 533]


@pytest.mark.parametrize(
    ("text", "says"),
    [("x\n1\n", "no column of times"), ("t_us\nsoon\n", "soon"), ("t_us\n5\n3\n", "row 2 is earlier")],
)
def test_a_trace_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(BadValue, match=says):
        list(workload.replay_trace(path))


def test_a_trace_that_is_cut_off_is_refused(tmp_path: Path):
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(b"t_us\n" + b"1\n" * 1000)[:-12])
    with pytest.raises(BadValue, match="is cut off"):
        list(workload.replay_trace(path))


@pytest.mark.parametrize("text", ["[]", "{}", '{"arrival": "spiral", "stage_seconds": 1, "rps_per_stage": [1]}', "not JSON"])
def test_a_file_that_is_no_hasgpu_workload_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadValue, match=r"HAS-GPU|neither step nor ramp"):
        workload.read_hasgpu(path)


def two_loads() -> list[tuple[Workload, Slo, random.Random]]:
    fast = Workload(target="fast", segments=workload.steps([(1_000_000, 100.0)]), cv=0.0)
    slow = Workload(target="slow", segments=workload.steps([(1_000_000, 10.0)]), cv=0.0, start_us=300_000, stop_us=600_000)
    return [(fast, Slo(latency_us=5_000), random.Random(0)), (slow, Slo(latency_us=9_000, on_miss="serve"), random.Random(0))]


def test_merged_calls_come_in_order_with_a_name_each():
    calls = list(workload.merge_calls(two_loads()))
    assert [call.arrived_us for call in calls] == sorted(call.arrived_us for call in calls)
    assert len({call.id for call in calls}) == len(calls) == 103


def test_a_load_begins_and_ends_when_it_says():
    assert [c.arrived_us for c in workload.merge_calls(two_loads()) if c.target == "slow"] == [300_000, 400_000, 500_000]


def test_merged_calls_carry_the_deadlines_of_their_slo():
    calls = {call.target: call for call in workload.merge_calls(two_loads())}
    fast, slow = calls["fast"], calls["slow"]
    assert (fast.deadline_us - fast.arrived_us, fast.expires_us - fast.arrived_us) == (5_000, 5_000)
    assert (slow.deadline_us - slow.arrived_us, slow.expires_us - slow.arrived_us) == (9_000, 60_000_000)


def test_no_call_is_merged_after_the_end():
    assert max(call.arrived_us for call in workload.merge_calls(two_loads(), until_us=500_000)) == 490_000
