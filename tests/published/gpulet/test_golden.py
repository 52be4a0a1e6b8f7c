"""Compat mode against results of the original program. Integers exactly, other numbers within a relative 2e-5."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from lamina.lab.experiments._glet_world import differing, gpulets, same
from lamina.planner.partitioning.catalogue import PlanTask
from lamina.planner.partitioning.plan import RateDemand, rate_with_headroom
from lamina.published.gpulet.elastic_partitioning import replan, schedule
from lamina.published.gpulet.planner import SLACK_RPS, GpuletPlanner
from lamina.published.gpulet.quirks import COMPAT, Quirks

from .sweeps import CATALOGUE, CONFIGS, GOLDEN, ORIGINAL, compat, scenarios

POLICIES = {config: policy for policy, config in CONFIGS.items()}
PLANNERS = {config: compat(policy) for config, policy in POLICIES.items()}
CAPACITY = PLANNERS["gpulet-int"].draft(["2080ti"]).capacity
NAMES = [case["id"] for case in GOLDEN["cases"]]


def gpus(counts: list[tuple[str, int]]) -> list[str]:
    return [kind for kind, count in counts for _ in range(count)]


def wanted(rows: list[list[int]]) -> list[RateDemand]:
    return [RateDemand(model, rate, slo_ms, SLACK_RPS) for model, rate, slo_ms in rows]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=NAMES)
def test_every_plan_equals_the_original(case: dict[str, Any]):
    assert list(differing(case, PLANNERS)) == []


RARE = {"stale_duty", "forgets_residue", "books_first_model_only", "saturates_regardless"}
"""Quirks that no result of the sample depends on; the whole sweep below needs `stale_duty`."""


@pytest.mark.parametrize("quirk", sorted({field.name for field in fields(Quirks)} - RARE))
def test_no_quirk_can_be_left_out(quirk: str):
    planners = {
        config: GpuletPlanner(CATALOGUE, each.rules, replace(COMPAT, **{quirk: False})) for config, each in PLANNERS.items()
    }
    assert any(key for case in GOLDEN["cases"] for key in differing(case, planners))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=NAMES)
def test_the_fewest_gpus_are_those_of_the_original(case: dict[str, Any]):
    tasks = [PlanTask(*row) for row in case["tasks"]]
    for key, least in case["min_gpus"].items():
        kind, config = key.split("/")
        enough = [count for count in range(1, 9) if PLANNERS[config].plan(tasks, [kind] * count).schedulable]
        assert (enough[0] if enough else None) == least, key


@pytest.mark.parametrize("sequence", GOLDEN["incremental"], ids=lambda sequence: sequence["id"])
def test_changing_a_plan_step_by_step_equals_the_original(sequence: dict[str, Any]):
    planner, kinds = PLANNERS[sequence["config"]], gpus(sequence["gpus"])
    draft = planner.draft(kinds)
    for step, result in zip(sequence["steps"], sequence["results"], strict=True):
        if step["op"] == "init":
            mode, done = "init", schedule(draft, wanted(step["tasks"]))
        else:
            mode, done, draft = replan(draft, wanted(step["tasks"]), wanted(step["all"]), lambda: planner.draft(kinds))
        assert (mode, "ok" if done else "fail") == (result["mode"], result["status"])
        assert same(gpulets(draft), result["gpulets"])


def test_planned_rates_equal_the_original():
    for rate, planned in GOLDEN["unit"]["poisson99"]:
        assert rate_with_headroom(rate, count_silence=False) == planned
    for case in GOLDEN["cases"]:
        assert [rate_with_headroom(rate, count_silence=False) for _, rate, _ in case["tasks"]] == case["p99_rates"]


@pytest.mark.parametrize("row", GOLDEN["unit"]["latency"], ids=str)
def test_latencies_equal_the_original(row: list[Any]):
    kind, model, batch, part, profiled_ms, solo_ms = row
    found = [CAPACITY.latency.profiled_ms(kind, model, part)[batch], CAPACITY.latency.solo_ms(kind, model, part)[batch]]
    assert [f"{ms:.9g}" for ms in found] == [f"{profiled_ms:.9g}", f"{solo_ms:.9g}"]  # to the last bit


@pytest.mark.parametrize("row", GOLDEN["unit"]["interference"], ids=str)
def test_slowdowns_equal_the_original(row: list[Any]):
    kind, model, batch, part, other, other_batch, other_part, _, slowdown = row
    own = CAPACITY.interference.traffic_terms(kind, model, part)[0][batch]
    theirs = CAPACITY.interference.traffic_terms(kind, other, other_part)[1][other_batch]
    assert f"{CAPACITY.interference.slowdown(own, theirs):.9g}" == f"{slowdown:.9g}"


@pytest.mark.parametrize("row", GOLDEN["unit"]["saturated"], ids=lambda row: f"{row[0]}-{row[1]}")
def test_saturation_tables_equal_the_original(row: list[Any]):
    kind, model, slo_ms, knee, table = row
    found = [[part, *CAPACITY.saturation(kind, model, slo_ms, part)] for part, _, _ in table]
    assert CAPACITY.knee(kind, model, slo_ms) == knee
    assert same(found, table)


@pytest.mark.parametrize("row", GOLDEN["unit"]["max_batch"], ids=str)
def test_largest_batches_equal_the_original(row: list[Any]):
    kind, model, slo_ms, part, rate, residue, batch, rate_after = row
    load = CAPACITY.solo_load(kind, model, slo_ms, part, rate)
    found = CAPACITY.residue_batch(load) if residue else (CAPACITY.saturated_batch(load), rate)
    assert found == (batch, rate_after)


@pytest.mark.parametrize("policy", CONFIGS)
def test_a_whole_sweep_finds_as_many_schedulable_as_the_original(policy: str):
    levels, kind = (200, 400, 600), "2080ti"
    planner = compat(policy)
    found = sum(planner.plan(tasks, [kind] * 4).schedulable for tasks in scenarios(levels))
    assert found == ORIGINAL[levels, kind][policy]
