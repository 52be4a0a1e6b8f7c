"""Comparisons: means with intervals, regret, bills per answer in time, and which cells count as behind."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lamina.lab.comparison import RIVALS, Comparison, Interval, draw_seeds, interval, mean_rows
from lamina.lab.experiment import Row
from lamina.plugins import names


def row(policy: str, seed: int, score: float, **more: Any) -> Row:
    bills = {"used": 1.0, "held": 1.0, "rent": 1.0, "in_time": 1_000, "worst": score}
    return {"cell": "c", "policy": policy, "seed": seed, "score": score} | bills | more


def compare(*rows: Row, **options: Any) -> Comparison:
    return Comparison.of(rows, lambda one: str(one["cell"]), **options)


def test_every_policy_that_decides_on_line_is_a_rival():
    assert {policy for policy, _ in RIVALS.values()} == set(names("policies")) - {"planned", "kaas_rr"}


def test_seeds_of_a_run_are_all_even_or_all_odd_and_at_least_ten():
    assert draw_seeds(2, quick=False) == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert all(seed % 2 for seed in draw_seeds(7, quick=False))


def test_an_interval_is_that_of_student():
    found = interval([1.0, 2.0, 3.0])
    assert found == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert not interval([5.0]).excludes_zero


def test_an_interval_is_written_with_the_digits_that_count():
    assert Interval(0.98765, 0.0012).text(100) == "98.77 ± 0.12"


def test_regret_is_the_distance_to_the_best_mean_in_the_cell():
    found = compare(row("edf", 2, 0.9), row("edf", 4, 0.8), row("frontier", 2, 0.7), row("frontier", 4, 0.8))
    assert found.regret("c", "frontier") == pytest.approx(0.1)
    assert found.regret("c", "edf") == 0


def test_frontier_is_behind_where_another_is_better_by_more_than_half_a_point():
    found = compare(
        *(row("edf", seed, 0.9 + seed / 1e4) for seed in (2, 4, 6)), *(row("frontier", seed, 0.89) for seed in (2, 4, 6))
    )
    assert [(one["measure"], one["policy"], one["clear"]) for one in found.behind()] == [("score", "edf", True)]
    assert compare(row("edf", 2, 0.894), row("frontier", 2, 0.89)).behind() == []


def test_a_target_is_starved_below_nine_tenths_of_what_another_policy_has_for_its_worst_one():
    found = compare(row("edf", 2, 0.7, worst=0.5), row("has", 2, 0.6, worst=0.46), row("frontier", 2, 0.9, worst=0.44))
    assert found.fair_share("c") == 0.5
    assert (found.starved("edf"), found.starved("has"), found.starved("frontier")) == ([], [], ["c"])
    assert found.figures()["frontier_starves_in"] == ["c"]
    assert "starved in 1: c" in found.behind_section("score").text


def test_regret_to_the_fair_leaves_out_policies_that_are_ahead_by_starving_a_target():
    rows = [row("fifo", 2, 0.9, worst=0.1), row("edf", 2, 0.72, worst=0.5), row("frontier", 2, 0.7, worst=0.48)]
    found = compare(*rows)
    assert found.regret("c", "frontier") == pytest.approx(0.2)
    assert found.fair_regret("c", "frontier") == pytest.approx(0.02)
    ours = found.figures()["policies"]["frontier"]
    assert ours["worst_fair_regret"] == pytest.approx(0.02) and ours["fair_best_in"] == 0
    assert found.figures()["policies"]["fifo"]["fair_regret"] == 0  # it is ahead of them, and counts as starving


def test_where_rows_have_no_worst_target_none_is_starved():
    found = compare(row("edf", 2, 0.7, worst=None), row("frontier", 2, 0.9, worst=None))
    assert found.starved("frontier") == [] and found.figures()["policies"]["frontier"]["starved_in"] is None
    assert found.figures()["policies"]["frontier"]["fair_regret"] is None


def test_a_difference_that_changes_its_sign_with_the_seed_is_not_clear():
    found = compare(row("edf", 2, 0.99), row("edf", 4, 0.5), row("frontier", 2, 0.5), row("frontier", 4, 0.9))
    assert [one["clear"] for one in found.behind()] == [False]


@pytest.mark.parametrize("kind", ["used", "held", "rent"])
def test_frontier_is_behind_where_an_equal_pays_less_of_any_bill(kind: str):
    rows = [row("edf", 2, 0.9, **{kind: 0.5}), row("frontier", 2, 0.9), row("fifo", 2, 0.2, **{kind: 0.1})]
    assert [(one["measure"], one["policy"]) for one in compare(*rows).behind()] == [(kind, "edf")]


def test_a_bill_is_per_answer_in_time():
    found = compare(row("edf", 2, 0.5, in_time=500), row("frontier", 2, 1.0))
    assert found.bill("c", "edf", "used") == 2.0
    assert found.bill_ratio("edf", "used") == pytest.approx(2.0)


def test_of_what_should_be_small_more_is_worse():
    rows = [row("edf", 2, 0, gpus=4), row("frontier", 2, 0, gpus=5)]
    found = compare(*rows, measure="gpus", less=True, bills=())
    assert found.best("c") == "edf"
    assert found.regret("c", "frontier") == pytest.approx(0.25)
    assert [one["measure"] for one in found.behind()] == ["gpus"]


def test_rows_without_a_figure_are_left_out():
    assert compare({"cell": "c", "policy": "knix", "seed": 2, "score": None}, row("edf", 2, 1.0)).policies == ["edf"]


def test_means_of_rows_keep_what_is_no_measurement():
    rows = [{"seed": 2, "load": 1.5, "x": 1.0, "name": "a"}, {"seed": 4, "load": 1.5, "x": 2.0, "name": "a"}]
    assert mean_rows(rows, keep=("load",)) == {"seed": 2, "load": 1.5, "x": 1.5, "name": "a"}


def test_sections_say_on_which_seeds_they_rest():
    summary, behind, _ = compare(row("edf", 2, 0.9), row("frontier", 2, 0.8)).sections()
    assert "even seeds" in summary.text and summary.headline
    assert behind.table is not None and behind.table.rows[0][:3] == ["c", "attainment", "edf"]
