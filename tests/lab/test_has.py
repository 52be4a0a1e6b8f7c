"""HAS-GPU's workloads, in the small: what the experiment claims, on a few seconds of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lamina.lab import experiment
from lamina.lab.experiments import has
from lamina.lab.experiments.has import base_us, profile_of

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return [has.run(cell) for cell in has.cells(seed=3, quick=True)]


def test_it_has_all_that_an_experiment_has():
    assert experiment.load("has").TITLE


def test_rows_are_json_and_carry_their_cell(rows: Rows):
    cell = has.cells(seed=3, quick=True)[0]
    assert cell.items() <= msgspec.json.decode(msgspec.json.encode(rows[0])).items()


def test_the_same_cell_gives_the_same_row(rows: Rows):
    assert has.run(has.cells(seed=3, quick=True)[0]) == rows[0]


def test_has_passes_the_reported_factor_of_violations_against_fastgshare_on_its_stress_workload():
    wanted = {"model": "resnet50", "workload": "stress", "slo": 1.5}
    some = [cell for cell in has.cells(seed=3, quick=False) if (wanted | {"seed": 3}).items() <= cell.items()]
    violations = {cell["policy"]: has.run(cell)["violations"] for cell in some if cell["policy"] in ("has", "fastgshare")}
    assert violations["fastgshare"] > 4.8 * violations["has"]


def test_whole_gpus_cost_several_times_what_has_holds(rows: Rows):
    assert has.figures(rows)["ratios"]["kserve / has"]["gpu_s_per_1k"] > 2


def test_frontier_is_behind_no_other_policy(rows: Rows):
    assert has.figures(rows)["frontier_behind"] == []


def test_frontier_passes_the_reported_gains_against_fastgshare_and_kserve(rows: Rows):
    ratios = has.figures(rows)["ratios"]
    violations = ratios["fastgshare / frontier"]["violations"]
    assert violations is None or violations > 4.8
    assert ratios["fastgshare / frontier"]["gpu_s_per_1k_in_time"] > 1.72
    assert ratios["kserve / frontier"]["gpu_s_per_1k"] > 10.8


def test_pods_that_may_use_idle_time_violate_no_more_than_those_that_may_not(rows: Rows):
    by = {row["policy"]: row for row in rows if row["model"] == "four models"}
    assert by["fastgshare"]["violations"] <= by["fastgshare(quota)"]["violations"]


def test_every_policy_has_the_three_bills(rows: Rows):
    assert all(0 < row["used"] <= row["held"] * 1.0001 and row["rent"] > 0 for row in rows)


def test_a_row_that_failed_is_named_and_left_out(rows: Rows):
    failed = {**has.cells(seed=3, quick=True)[0], "error": "Boom: no"}
    assert has.figures([*rows[1:], failed])["failed"] == ["resnet50 random_burst 2x, has: Boom: no"]


def test_reported_figures_are_labelled_as_such():
    assert all("reported" in figure.source for figure in has.REPORTED)
    assert [figure.value for figure in has.REPORTED] == ["4.8x", "1.72x", "10.8x"]


def test_sections_can_be_drawn(rows: Rows):
    assert all(section.table or section.plot or section.text for section in has.sections(rows))


def test_the_base_latency_is_batch_one_on_the_whole_gpu():
    assert base_us(profile_of("resnet50")) == pytest.approx(20_600, rel=0.01)


def test_bert_below_the_published_shares_slows_down_in_proportion():
    points = {point.units: point.p50_us for point in profile_of("bert_qa").points}
    assert points[3] == pytest.approx(2 * points[6])


def test_a_full_run_covers_every_model_alone_and_together():
    models = {cell["model"] for cell in has.cells(seed=1, quick=False)}
    assert {"resnet50", "convnext_base", "mobilenet_v3_large", "bert_qa", "four models", "eight models"} <= models
