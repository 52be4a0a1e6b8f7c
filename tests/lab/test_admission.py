"""The thesis's admission chapter: both limits are kept, and its table adds up in one way only."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.lab.experiments import admission
from lamina.lab.experiments.admission import table_arithmetic


def cell(name: str, **more: Any) -> dict[str, Any]:
    policy, options = next((policy, options) for label, policy, options in admission.RIVALS if label == name)
    made = {"part": "grid", "flow": "ensemble", "name": name, "policy": policy, "options": options, "latency_ms": 40}
    return admission.run(made | {"cost_slo": "none", "load": 1.0, "seed": 1, "seeds": 1, "span_us": 300_000} | more)


def test_every_figure_of_the_table_is_a_whole_number_of_requests():
    rows = table_arithmetic()["rows"]
    assert {policy: row["requests_in_time"] for policy, row in rows.items()} == {
        "FIFO": [3, 7, 12, 16],
        "Clockwork": [1, 3, 5, 6],
        "custom": [4, 8, 12, 19],
    }
    for row in rows.values():
        assert max(row["off_by"]) <= 0.01  # the last digit printed, cut off or rounded


def test_the_clockwork_row_is_one_executor_of_12_ms_that_drops_nothing():
    row = admission.run({"part": "burst", "name": "clockwork (naive)", "requests": 1_200, "seed": 1})
    assert row["within"] == {"20": 1, "40": 3, "60": 5, "80": 6}
    assert row["drain_s"] == pytest.approx(14.4)


@pytest.mark.parametrize("flow", ["ensemble", "cascade"])
@pytest.mark.parametrize("load", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("cost", ["none", "tight"])
def test_what_is_admitted_is_in_time_and_within_its_cost(flow: str, load: float, cost: str):
    row = cell("admission", flow=flow, load=load, cost_slo=cost)
    assert row["kept"] == 1.0
    assert row["late"] == row["failed"] == 0
    assert row["good"] == row["in_time"]


def test_goodput_does_not_collapse_when_the_load_grows():
    light, heavy = cell("admission", load=1.0), cell("admission", load=4.0)
    assert heavy["goodput_per_s"] > 1.2 * light["goodput_per_s"]


def test_a_queue_that_gives_up_no_call_collapses_beyond_its_capacity():
    kept, all_served = cell("admission", load=6.0), cell("fifo (serves late)", load=6.0)
    assert all_served["attainment"] < 0.5 * kept["attainment"]


def test_all_placements_serve_more_than_one_drawn_at_random():
    one = cell("admission (4 draws)", options={"draws": 1}, load=2.0)
    every = cell("admission", load=2.0)
    assert every["good"] > one["good"]


def test_whole_workflows_on_one_device_serve_least():
    assert cell("clockwork (naive)")["good"] < 0.5 * cell("clockwork")["good"]


def test_quick_cells_give_figures_and_sections():
    rows = [admission.run(cell) for cell in admission.cells(1, quick=True)]
    figures = admission.figures(rows)
    place = figures["grid"]["cascade"]["40 ms"]["tight"]["admission"]
    assert {"goodput_per_s", "refused", "attainment", "cost"} <= place.keys()
    assert figures["beside"].keys() <= {reported.name for reported in admission.REPORTED}
    assert all(section.title for section in admission.sections(rows))
