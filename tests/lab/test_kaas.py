"""The thesis's scheduling chapter on our core: its traces to the digit, its counts, its orderings."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from lamina.lab.experiments import kaas


def load(policy: str, **more: Any) -> dict[str, Any]:
    cell = {"part": "poisson", "params": "text", "mix": "equal load", "gpus": 4, "load": 0.8, "cold": 1.0, "policy": policy}
    options = {"compat": True} if policy == "kaas_rr" else {}
    return kaas.run(cell | {"options": options, "seed": 1, "seeds": 4, "steps": 1_000} | more)


def trace(policy: str, params: str, draws: int = 1) -> dict[str, Any]:
    return kaas.run({"part": "trace", "policy": policy, "params": params, "draws": draws})


@pytest.mark.parametrize("params", ["trace-i", "trace-ii"])
@pytest.mark.parametrize("policy", ["kaas_rr", "kaas_balance", "kaas_srtf", "kaas_exclusive"])
def test_the_printed_trace_is_reproduced_to_the_digit(policy: str, params: str):
    assert trace(policy, params)["trace"] == kaas.PUBLISHED[policy]


@pytest.mark.parametrize("params", ["trace-i", "trace-ii"])
def test_the_printed_trace_of_the_policy_that_draws_is_one_of_its_outcomes(params: str):
    row = trace("kaas_mlfq", params, draws=160)
    assert row["trace"] == kaas.PUBLISHED["kaas_mlfq"]
    assert 0.02 < row["share"] < 0.12  # one of sixteen


@pytest.mark.parametrize("policy", kaas.PUBLISHED)
def test_the_parameters_of_the_text_do_not_give_the_printed_traces(policy: str):
    assert not trace(policy, "text", draws=16)["as_printed"]


def test_totals_and_waits_of_the_traces_are_those_printed():
    found = {policy: trace(policy, "trace-i", draws=64) for policy in kaas.PUBLISHED}
    shown = {p: (r["total"], r["cold_starts"], r["hits"], r["wait"]) for p, r in found.items()}
    assert shown == {
        "kaas_rr": (25, 3, 1, 5.0),
        "kaas_balance": (19, 2, 2, 2.25),
        "kaas_srtf": (26, 3, 1, 2.5),
        "kaas_mlfq": (26, 3, 1, 2.5),
        "kaas_exclusive": (19, 2, 2, 2.25),
    }


@pytest.mark.parametrize(("params", "mix"), [("text", "equal load"), ("trace-i", "equal load"), ("text", "equal rates")])
@pytest.mark.parametrize(("policy", "count"), list(zip(kaas.PUBLISHED, (8, 8, 8, 8, 4), strict=True)))
def test_cold_starts_are_8_8_8_8_4_with_every_seed(policy: str, count: int, params: str, mix: str):
    row = load(policy, params=params, mix=mix, seeds=20 if params == "trace-i" else 4, steps=300)
    assert set(row["cold_starts"]) == {count}


def test_the_published_orderings_hold():
    rows = {policy: load(policy) for policy in ("kaas_rr", "kaas_balance", "kaas_srtf", "kaas_mlfq")}
    wait = {policy: {model: fmean(row[f"wait_{model}"]) for model in "RB"} for policy, row in rows.items()}
    shared = ("kaas_balance", "kaas_srtf", "kaas_mlfq")
    assert all(fmean(rows["kaas_rr"]["wait"]) > 5 * fmean(rows[policy]["wait"]) for policy in shared)
    assert min(shared, key=lambda policy: wait[policy]["R"]) == "kaas_srtf"
    assert max(shared, key=lambda policy: wait[policy]["B"]) == "kaas_srtf"
    assert wait["kaas_mlfq"]["B"] < wait["kaas_mlfq"]["R"]  # it has fewer requests


def test_a_static_split_fails_where_a_model_outgrows_its_part_and_stealing_helps():
    alone = load("kaas_exclusive", mix="equal rates")
    stealing = load("kaas_exclusive", mix="equal rates", options={"steal": True, "period_us": 50 * kaas.STEP_US})
    assert fmean(alone["wait_B"]) > 3 * fmean(stealing["wait_B"])


def test_waits_grow_with_load_and_fall_with_gpus():
    assert fmean(load("kaas_balance", load=1.2)["wait"]) > 5 * fmean(load("kaas_balance", load=0.6)["wait"])
    three, six = (load("kaas_balance", gpus=gpus, load=3.2 / gpus) for gpus in (3, 6))
    assert fmean(three["wait"]) > 10 * fmean(six["wait"])


def test_the_length_of_a_cold_start_matters_only_when_memory_is_short():
    short, long = load("kaas_affinity", load=0.4, cold=1.0), load("kaas_affinity", load=0.4, cold=4.0)
    assert fmean(long["wait"]) - fmean(short["wait"]) < 2.0  # steps: a constant number of them is spread over the run
    cell = {"part": "memory", "policy": "kaas_balance", "options": {}, "models": 12, "gpus": 4, "load": 0.4}
    cell |= {"seed": 1, "seeds": 1, "steps": 800}
    tight, roomy = kaas.run(cell | {"holds": 2}), kaas.run(cell | {"holds": 12})
    assert tight["cold_starts"][0] > 1.5 * roomy["cold_starts"][0]
    assert tight["wait"][0] > roomy["wait"][0]


def test_quick_cells_give_figures_and_sections():
    rows = [kaas.run(cell) for cell in kaas.cells(1, quick=True)]
    figures = kaas.figures(rows)
    assert figures["traces"] == kaas.PUBLISHED
    assert [figures["cold_starts"][policy] for policy in kaas.PUBLISHED] == [8, 8, 8, 8, 4]
    assert "kaas_affinity" in figures["mean_waits"]["text, equal load"]
    assert figures["beside"].keys() <= {reported.name for reported in kaas.REPORTED}
    assert all(section.title for section in kaas.sections(rows))
