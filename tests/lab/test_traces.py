"""The traces experiment: what it offers is what was recorded, and its quick cells run."""

from __future__ import annotations

import gc
import random
from itertools import pairwise
from statistics import mean, pstdev

import pytest

from lamina.lab.experiments import traces
from lamina.sim.run import run as simulate


def arrivals(load: str, seed: int = 1, seconds: int = 400) -> list[int]:
    return sorted(at_us for each in traces.make(load, seed, seconds).loads for at_us in each.at_us)


def gap_cv(times: list[int]) -> float:
    gaps = [after - before for before, after in pairwise(times)]
    return pstdev(gaps) / mean(gaps)


@pytest.mark.parametrize(("load", "calls", "least", "most"), [("code", 8_819, 12, 14), ("conversation", 19_366, 1.0, 1.2)])
def test_all_calls_come_as_recorded(load: str, calls: int, least: float, most: float) -> None:
    times = arrivals(load)
    assert len(times) == calls
    assert least < gap_cv(times) < most


def test_functions_share_the_calls_by_zipf() -> None:
    counts = [0] * traces.FUNCTIONS
    for _, rank in traces.drawn("conv", random.Random(1), 400_000_000):
        counts[rank] += 1
    assert 0.15 < counts[0] / sum(counts) < 0.25  # one over the hundredth harmonic number is 0.193
    assert sum(counts[:10]) > sum(counts[10:50])


def test_a_burst_goes_to_one_function() -> None:
    drawn = list(traces.drawn("code", random.Random(1), 400_000_000))
    assert all(a[1] == b[1] for a, b in pairwise(drawn) if (b[0] - a[0]) * traces.SPEEDUP < traces.BURST_US)


def test_tenants_ask_for_what_pods_asked_for() -> None:
    shares = [spec.share for spec in traces.make("tenants", 1, 20).functions]
    assert len(shares) == 100
    assert 0.3 < sorted(shares)[50] < 0.6 and min(shares) > 0 and max(shares) < 1


def test_weights_do_not_fit_all_at_once() -> None:
    ratios = []
    for seed in range(5):
        scenario = traces.make("code", seed, 20)
        memory = sum(device.memory_mib for device in scenario.devices)
        ratios.append(sum(spec.memory_mib for spec in scenario.functions) / memory)
    assert 1.1 < mean(ratios) < 1.4


def test_another_seed_is_another_hundred() -> None:
    assert traces.make("code", 1, 20).functions != traces.make("code", 2, 20).functions


def test_a_quick_cell_gives_the_same_row_twice() -> None:
    cell = traces.cells(3, quick=True)[0]
    assert traces.run(cell) == traces.run(cell)


def test_figures_and_sections_come_from_the_rows_of_all_quick_cells() -> None:
    rows = [traces.run(cell) for cell in traces.cells(1, quick=True)]
    figures = traces.figures(rows)
    assert set(figures["loads"]) == {"code", "tenants"}
    for by_policy in figures["loads"].values():
        assert {"fifo", "edf"} <= set(by_policy)
        assert all(0 <= row["attainment"] <= 1 for row in by_policy.values())
    assert len(traces.sections(rows)) == 7


def test_a_policy_that_checks_capacity_turns_tenants_away_and_their_calls_count() -> None:
    row = traces.run({"load": "tenants", "policy": "knix", "seed": 1, "seconds": 5})
    assert 50 < row["turned_away"] < 100
    everything = traces.run({"load": "tenants", "policy": "fifo", "seed": 1, "seconds": 5})
    assert row["offered"] == everything["offered"] and everything["turned_away"] == 0


def test_a_policy_that_takes_too_long_has_no_figures_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LIMIT_S", 0.02)
    gc.disable()  # a bound that is reached in its callbacks comes a second later, and with a warning
    try:
        row = traces.run({"load": "code", "policy": "edf", "seed": 1, "seconds": 60})
    finally:
        gc.enable()
    figures = traces.figures([row])
    assert figures["loads"] == {} and "edf, code, seed 1: more than 0.02 s" in figures["gave_up"][0]
    assert traces.sections([row])[0].title == "Not measured"


def test_where_memory_is_short_no_instance_leaves_for_one_that_is_not_asked_for() -> None:
    scenario = traces.make("code", seed=1, seconds=20)
    loads = {policy: simulate(scenario, policy).total.cold_starts for policy in ("edf", "frontier")}
    assert loads["frontier"] < 1.5 * loads["edf"]
