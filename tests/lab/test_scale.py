"""The scale experiment: the fit, the stopwatches, and cells small enough for every day."""

from __future__ import annotations

import pytest

from lamina.lab.experiments import scale
from lamina.lab.experiments.scale import exponent


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_fit_finds_the_exponent_of_a_power_law(power: float) -> None:
    assert exponent([(n, 7 * n**power) for n in (10.0, 100.0, 1000.0)]) == pytest.approx(power, abs=1e-3)


def test_one_point_has_no_slope() -> None:
    assert exponent([(10, 1.0)]) is None


def small(sweep: str, size: int, policy: str = "edf") -> dict[str, object]:
    return scale.run({"sweep": sweep, "size": size, "policy": policy, "seed": 1, "calls": 100, "limit_s": 0.5})


@pytest.mark.parametrize("policy", ["fifo", "edf"])
def test_a_cell_measures_events_and_dispatches_of_warm_functions(policy: str) -> None:
    row = small("functions", 20, policy)
    assert row["served"] == 90  # the first tenth only fills the devices
    assert row["cold_starts"] == 8 * 10  # all before the first call
    assert 0 < row["dispatch_us"] < row["event_us"] * row["served"]  # type: ignore[operator]


def test_cold_cells_load_what_they_call() -> None:
    row = small("cold functions", 12)
    assert 10 <= row["cold_starts"] <= 12  # type: ignore[operator]
    assert row["scale_us"] > 0  # type: ignore[operator]


def test_every_device_gets_instances_and_every_function_a_place() -> None:
    scenario = scale.make(100, 30, 1)
    places = scale._places(scenario)
    assert {name for name, _ in places} == {spec.name for spec in scenario.functions}
    by_device = [sum(device == spec.id for _, device in places) for spec in scenario.devices]
    assert min(by_device) == max(by_device) == 10


def test_figures_name_the_machine_and_fit_every_sweep() -> None:
    rows = [small(sweep, size) for sweep, size in [("functions", 10), ("functions", 40), ("devices", 1), ("devices", 4)]]
    figures = scale.figures(rows)
    assert figures["machines"] == [rows[0]["cpu"]]
    assert set(figures["exponents"]) == {"functions", "devices"}
    assert isinstance(figures["exponents"]["functions"]["edf"]["event_us"], float)
    assert scale.sections(rows)[0].table is not None
