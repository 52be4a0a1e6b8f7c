"""The gpu-let experiment: quick cells, and what the original says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lamina.lab.experiments import glet
from lamina.lab.experiments._glet_world import ORIGINAL_PEAKS


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [glet.run(json.loads(json.dumps(cell))) for cell in glet.cells(seed=1, quick=True)]


@pytest.fixture(scope="module")
def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return glet.figures(rows)


def test_every_golden_plan_agrees(figures: dict[str, Any]):
    assert figures["golden"] == {"agree": 336, "of": 336}


def test_repaired_never_schedules_fewer_than_compat(figures: dict[str, Any]):
    for by_rates in figures["schedulable"].values():
        for policies in by_rates.values():
            for entry in policies.values():
                if "compat" in entry and "repaired" in entry:
                    assert entry["repaired"]["schedulable"] >= entry["compat"]["schedulable"]


def test_frontier_schedules_at_least_what_gpulet_does(figures: dict[str, Any]):
    for by_rates in figures["schedulable"].values():
        policies = by_rates["0/200/400/600"]
        assert policies["frontier"]["repaired"]["schedulable"] >= policies["gpulet"]["repaired"]["schedulable"]


def test_compat_peaks_are_those_of_the_original(figures: dict[str, Any]):
    for mix, policies in figures["peaks"]["2080ti"].items():
        for policy, by_mode in policies.items():
            if "compat" in by_mode:
                assert by_mode["compat"] == ORIGINAL_PEAKS[policy][mix]


def test_parts_carry_more_than_time_sharing(figures: dict[str, Any]):
    gains = figures["gain_over_timesharing"]["2080ti"]
    assert gains["compat"]["gpulet"]["median"] > 1.5
    assert gains["repaired"]["frontier"]["median"] > 1.1


def test_every_policy_is_played_on_line(figures: dict[str, Any]):
    played = {row["policy"]: row["attainment"] for row in figures["online"]}
    assert {"gpulet", "gpulet-noint", "timesharing", "greedy_part", "edf"} <= played.keys()
    assert played["gpulet"] >= played["timesharing"]


def test_figures_and_sections_are_plain(rows: list[dict[str, Any]], figures: dict[str, Any]):
    assert json.loads(json.dumps(figures)) is not None
    assert any(section.title.startswith("Agreement") for section in glet.sections(rows))
