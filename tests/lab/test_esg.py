"""The ESG comparison: what is cheap to check of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lamina.lab.experiments import esg
from lamina.lab.experiments._esg_world import APPLICATIONS, BATCHES, CORES, MODELS, UNITS, smallest_us, table
from lamina.lab.experiments.esg import ratios


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(json.dumps([esg.run(cell) for cell in esg.cells(seed=1, quick=True)]))  # type: ignore[no-any-return]


def served(rows: list[dict[str, Any]], policy: str) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("policy") == policy]


def test_a_function_has_256_configurations_and_takes_its_base_time_at_the_smallest():
    assert len(BATCHES) * len(CORES) * len(UNITS) == len(table("depth")) == 256
    assert MODELS["depth"].time_us(1, 1, 1) == pytest.approx(828_000)
    assert smallest_us("image-classification") == 526_000


def test_four_applications_are_chains_of_three_to_five():
    assert [len(steps) for steps in APPLICATIONS.values()] == [3, 3, 3, 5]


def test_esg_is_nearly_always_in_time_where_the_load_is_light(rows: list[dict[str, Any]]):
    assert served(rows, "esg")[0]["hit"] >= 99


def test_esg_costs_less_than_those_that_plan_ahead(rows: list[dict[str, Any]]):
    for other in ("orion", "aquatope"):
        for mine, theirs in zip(served(rows, "esg"), served(rows, other), strict=True):
            assert mine["cost_per_1k"] < theirs["cost_per_1k"]


def test_only_those_that_plan_ahead_miss_their_plans(rows: list[dict[str, Any]]):
    assert {row["policy"] for row in rows if row.get("missed") is not None} == {"orion", "orion(each call)", "aquatope"}


def test_frontier_is_in_time_as_often_as_esg(rows: list[dict[str, Any]]):
    for mine, theirs in zip(served(rows, "frontier"), served(rows, "esg"), strict=True):
        assert mine["hit"] >= theirs["hit"] - 0.5


def test_the_look_up_agrees_with_the_searches_and_is_a_hundred_times_faster_than_the_published_one(rows: list[dict[str, Any]]):
    [row] = [row for row in rows if row["part"] == "decide"]
    assert row["agree"]
    assert ratios(row)["ESG_1Q, plain"] > 100
    assert ratios(row)["query, 10 steps"] < 3  # two where nobody else is at work


@pytest.mark.live
def test_a_row_is_the_same_in_processes_that_hash_differently():
    """More is asked than there is by workflows that share functions, so all of them are looked at again and again."""
    cell = {"part": "serve", "setting": "relaxed-peak", "application": "mixed", "warm": True, "policy": "frontier"}
    cell |= {"recorded": False, "charged": False}
    script = f"from lamina.lab.experiments import esg; print(esg.run({cell | {'seed': 1, 'calls': 200}}))"
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert said[0] == said[1]


def test_figures_hold_a_number_for_every_policy_and_setting(rows: list[dict[str, Any]]):
    figures = esg.figures(rows)
    assert not figures["failed"]
    assert len(figures["settings"]) == 3
    assert figures["settings"]["strict-light, image-classification"]["esg"]["cost_by_esg"] == 1.0
    json.dumps(figures, allow_nan=False)


def test_rows_with_charged_decisions_say_how_long_decisions_took(rows: list[dict[str, Any]]):
    charged = [row for row in rows if row.get("charged")]
    assert {row["policy"] for row in charged} == {*esg.POLICIES, "orion(each call)"}
    assert all(0 < row["decision_p50_us"] <= row["decision_p99_us"] and row["deciding"] > 0 for row in charged)


def test_a_full_run_has_ten_seeds_recorded_arrivals_branches_and_charged_decisions():
    cells = [cell for cell in esg.cells(2, quick=False) if cell["part"] == "serve"]
    assert len({cell["seed"] for cell in cells}) == 10
    assert {cell["application"] for cell in cells} == {*APPLICATIONS, "mixed", "branching"}
    assert any(cell["recorded"] for cell in cells) and any(cell["charged"] for cell in cells)
    assert {"esg", "esg(published)"} <= {cell["policy"] for cell in cells}


def test_a_workflow_that_branches_is_served_by_every_policy():
    for policy in esg.POLICIES:
        cell = {"part": "serve", "setting": "strict-light", "application": "branching", "warm": True, "recorded": True}
        row = esg.run(cell | {"charged": False, "policy": policy, "seed": 2, "calls": 15})
        assert row["offered"] >= 5 and (row["hit"] > 20 or policy == "fastgshare")


def test_there_is_a_page_for_people(rows: list[dict[str, Any]]):
    titles = [section.title for section in esg.sections(rows)]
    assert {"Hit rate", "Cost", "Decision time"} <= set(titles)
