"""Repaired mode: plans that hold, and never fewer of them than the original finds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from lamina.errors import BadValue
from lamina.planner.partitioning.catalogue import Catalogue, PlannerRules, PlanTask
from lamina.planner.partitioning.plan import RateDemand, heavy_first, rate_with_headroom
from lamina.published.gpulet.draft import violations
from lamina.published.gpulet.elastic_partitioning import schedule
from lamina.published.gpulet.planner import RULES_BY_POLICY, GpuletPlanner
from lamina.published.gpulet.quirks import REPAIRED

from .sweeps import CATALOGUE, CONFIGS, SLO_MS, compat, repaired, scenarios

ALL_SLO_MS = SLO_MS | {10: 62, 11: 64, 12: 202, 13: 22}


def some_tasks(rng: random.Random) -> list[PlanTask]:
    models = rng.sample(sorted(ALL_SLO_MS), rng.randint(1, 6))
    return [
        PlanTask(model, rng.choice([3, 12.5, 40, 120, 260, 470, 850]), ALL_SLO_MS[model] * rng.choice([0.8, 1, 1.5]))
        for model in models
    ]


@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("kind", ["2080ti", "3080"])
def test_whatever_the_original_can_schedule_is_schedulable(policy: str, kind: str):
    theirs, ours = compat(policy), repaired(policy)
    for tasks in scenarios((200, 400, 600), start=3, step=23):
        if theirs.plan(tasks, [kind] * 4).schedulable:
            assert ours.plan(tasks, [kind] * 4).schedulable, tasks


@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("order", [None, heavy_first])
def test_no_draft_is_late_or_overfull_even_if_it_leaves_something_out(policy: str, order: object):
    rng, planner = random.Random(11), repaired(policy)
    for _ in range(40):
        draft = planner.draft(rng.choice([["2080ti"] * 2, ["3080"] * 3, ["2080ti", "3080"]]))
        session = [RateDemand(task.model, task.rate, task.slo_ms, 0.0) for task in some_tasks(rng)]
        schedule(draft, session, *([heavy_first] if order else []))
        assert [promise for promise in violations(draft, session) if "not served" not in promise] == []


def test_the_original_breaks_promises_that_the_check_names():
    tasks = [PlanTask(6, 600, 66), PlanTask(7, 400, 108), PlanTask(8, 200, 202), PlanTask(9, 600, 142)]
    draft = compat("gpulet").draft(["2080ti"] * 4)
    session = [RateDemand(task.model, rate_with_headroom(task.rate), task.slo_ms, 0.0) for task in tasks]
    assert schedule(draft, session)
    broken = list(violations(draft, session))
    assert "resnet50: 38.8 requests/s are not served" in broken
    assert any(promise.startswith("GPU 3, 40 %: googlenet takes 67.4 ms") for promise in broken)


def test_all_of_the_planned_rate_is_served():
    plan = repaired("gpulet").plan([PlanTask(7, 50, 108), PlanTask(9, 50, 142)], ["2080ti"])
    assert plan.headroom == 1
    assert sum(share.rate for cut in plan.slices for share in cut.shares) == pytest.approx(68 + 68)


def test_headroom_is_lowered_only_where_nothing_else_helps():
    plan = repaired("gpulet").plan(
        [PlanTask(6, 600, 66), PlanTask(7, 600, 108), PlanTask(8, 400, 202), PlanTask(9, 400, 142)], ["2080ti"] * 4
    )
    assert (plan.schedulable, plan.headroom) == (True, 0.5)


def test_what_does_not_fit_is_named_with_its_rate():
    plan = repaired("gpulet").plan([PlanTask(7, 600, 108), PlanTask(9, 600, 142)], ["2080ti"])
    assert not plan.schedulable
    assert set(plan.unserved) <= {"resnet50", "vgg16"}
    assert 0 < sum(plan.unserved.values()) < 1230


def test_a_model_too_slow_for_its_slo_is_told_at_once():
    plan = repaired("gpulet").plan([PlanTask(12, 10, 20)], ["2080ti"] * 3)
    assert plan.reason == "densenet161 takes 36.4 ms to gather and run one request alone, allowed are 20"


def test_the_largest_scale_fits_and_a_little_more_does_not():
    planner, tasks, kinds = repaired("gpulet"), [PlanTask(7, 600, 108), PlanTask(9, 600, 142)], ["2080ti"] * 2
    scale = planner.largest_scale(tasks, kinds)
    assert 0 < scale < 1
    verdicts = [
        planner.plan([replace(task, rate=task.rate * by) for task in tasks], kinds).schedulable for by in (scale, scale + 0.05)
    ]
    assert verdicts == [True, False]


def test_the_fewest_gpus_serve_everything_and_one_less_does_not():
    planner, tasks = repaired("gpulet"), [PlanTask(7, 400, 108), PlanTask(9, 400, 142), PlanTask(8, 200, 202)]
    kinds, plan = planner.plan_fewest_gpus(tasks, ["2080ti"], 8)
    assert plan.schedulable
    assert not planner.plan(tasks, kinds[1:], [1.0]).schedulable


def test_a_mix_of_kinds_is_tried_before_another_gpu():
    kinds, plan = repaired("gpulet").plan_fewest_gpus(
        [PlanTask(7, 400, 108), PlanTask(9, 400, 142), PlanTask(8, 200, 202)], ["2080ti", "3080"], 8
    )
    assert plan.schedulable
    assert list(kinds) == sorted(kinds)


def test_timesharing_on_mixed_kinds_stops_the_original_and_not_us():
    tasks, kinds = [PlanTask(7, 50, 108)], ["2080ti", "3080"]
    assert compat("timesharing").plan(tasks, kinds).aborted
    assert repaired("timesharing").plan(tasks, kinds).schedulable


@pytest.mark.parametrize("rate", [1, 4, 6])
def test_small_rates_stop_the_original_and_not_us(rate: int):
    assert compat("gpulet").plan([PlanTask(7, rate, 108)], ["2080ti"]).aborted
    assert repaired("gpulet").plan([PlanTask(7, rate, 108)], ["2080ti"]).schedulable


def test_planned_rates_never_fall_as_the_rate_grows():
    rates = [rate_with_headroom(rate) for rate in (0.5, 1, 2, 5, 10, 50.5, 100, 400, 550, 551, 1000)]
    assert all(low <= high for low, high in pairwise(rates))


def test_a_network_limit_holds_on_every_gpu():
    tasks, kinds = [PlanTask(6, 400, 66), PlanTask(8, 200, 202), PlanTask(9, 200, 142)], ["3080"] * 3
    planner = GpuletPlanner(CATALOGUE, replace(RULES_BY_POLICY["gpulet"], network_gbits=2.5), REPAIRED)
    plan = planner.plan(tasks, kinds)
    assert plan.schedulable
    bits = {model.name: model.gbits_per_request for model in CATALOGUE.models.values()}
    for gpu in range(3):
        assert sum(share.rate * bits[share.model] for cut in plan.slices if cut.gpu == gpu for share in cut.shares) <= 2.5001


def test_a_network_limit_can_make_a_plan_impossible():
    planner = GpuletPlanner(CATALOGUE, replace(RULES_BY_POLICY["gpulet"], network_gbits=0.5), REPAIRED)
    assert not planner.plan([PlanTask(6, 400, 66)], ["3080"] * 2).schedulable


def test_memory_counts_every_model_on_a_gpulet():
    small = {name: replace(kind, memory_mb=5000) for name, kind in CATALOGUE.kinds.items()}
    planner = GpuletPlanner(Catalogue(CATALOGUE.models, small), PlannerRules(partitioning=False, interference=False), REPAIRED)
    tasks = [PlanTask(7, 20, 216), PlanTask(9, 20, 284)]  # 1230 + 1820 + 2920 MB together
    assert not planner.plan(tasks, ["2080ti"]).schedulable
    assert planner.plan(tasks, ["2080ti"] * 2).schedulable


def test_the_knee_may_be_the_whole_gpu_and_a_batch_may_be_full():
    saturation = repaired("gpulet").draft(["3080"]).capacity.saturation("3080", 0, 5, 100)
    assert saturation[0] == 32


def test_a_model_without_a_profile_is_an_error():
    kinds = {"2080ti": replace(CATALOGUE.kinds["2080ti"], profiles={})}
    planner = GpuletPlanner(Catalogue(CATALOGUE.models, kinds), RULES_BY_POLICY["gpulet"], REPAIRED)
    with pytest.raises(BadValue, match="model 'resnet50': no latency profile on 2080ti"):
        planner.plan([PlanTask(7, 50, 108)], ["2080ti"])


def test_the_same_tasks_give_the_same_plan():
    tasks = next(iter(scenarios((200, 400, 600), start=300)))
    assert repaired("gpulet").plan(tasks, ["2080ti"] * 4) == repaired("gpulet").plan(tasks, ["2080ti"] * 4)
