"""The interference model fitted to measured co-locations."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks.train_predictor import records, tenants, times

from lamina.errors import BadValue
from lamina.planner.interference import ColocatedBatch
from lamina.predict import interference
from lamina.predict.interference import (
    ColocatedTenant,
    FittedInterference,
    fit_slowdown,
    regression_terms,
    shipped_regression,
    traits_from_record,
)
from lamina.predict.profile import Point, Profile, read, read_all
from lamina.predict.profile_table import ProfileTable


@cache
def model() -> FittedInterference:
    names = ("resnet50", "mobilenet_v3_small", "convnext_base")
    profiles = [
        Profile(function=n, device="h200", points=[Point(batch=b, units=u, p50_us=us) for (b, u), us in times()[n].items()])
        for n in names
    ]
    return FittedInterference(
        {"h200": shipped_regression("h200")},
        {(n, "h200"): traits_from_record(records()[n]) for n in names},
        ProfileTable(profiles),
        {"h200": 15},
    )


def test_a_line_that_is_there_is_found():
    rng = np.random.default_rng(0)
    cases: list[tuple[ColocatedTenant, list[ColocatedTenant], float]] = []
    for _ in range(300):
        own, *others = [
            ColocatedTenant(*map(float, (rng.uniform(1e6, 1e9), rng.uniform(0, 0.4), 0.25))) for _ in range(rng.integers(2, 5))
        ]
        cases.append((own, others, math.exp(0.1 + 0.05 * regression_terms(own, others)[1])))
    assert fit_slowdown(cases).slowdown(*cases[0][:2]) == pytest.approx(cases[0][2], rel=0.01)


def test_cases_left_out_are_predicted_within_the_goal():
    rows = tenants()
    out = {str(case) for case in range(0, 67, 4)}
    line = fit_slowdown(row[2:] for row in rows if row[0] not in out)  # type: ignore[misc]
    errors = [abs(line.slowdown(own, others) / slowdown - 1) for case, _, own, others, slowdown in rows if case in out]
    assert np.median(errors) <= 0.08
    assert np.quantile(errors, 0.9) <= 0.15


def test_alone_no_function_is_slowed_down():
    assert model().slowdown(ColocatedBatch("resnet50", 8, 0.5), [], "h200") == 1.0


def test_each_neighbour_costs_something():
    one, two = ColocatedBatch("convnext_base", 8, 0.2), ColocatedBatch("resnet50", 8, 0.2)
    own = ColocatedBatch("mobilenet_v3_small", 8, 0.2)
    assert 1.0 < model().slowdown(own, [one], "h200") < model().slowdown(own, [one, two], "h200")


def test_small_models_feel_it_more():
    other = ColocatedBatch("resnet50", 8, 0.4)
    slow = {
        name: model().slowdown(ColocatedBatch(name, 1, 0.4), [other], "h200") for name in ("mobilenet_v3_small", "convnext_base")
    }
    assert slow["mobilenet_v3_small"] > slow["convnext_base"]


@pytest.mark.parametrize(("name", "kind"), [("nobody", "h200"), ("resnet50", "cpu")])
def test_a_function_that_is_not_known_feels_nothing(name: str, kind: str):
    assert model().slowdown(ColocatedBatch(name, 8, 0.5), [ColocatedBatch("convnext_base", 8, 0.5)], kind) == 1.0


def test_far_outside_what_was_measured_it_does_not_run_away():
    neighbours: list[Any] = [ColocatedBatch("resnet50", 8, 0.1)] * 50
    assert model().slowdown(ColocatedBatch("mobilenet_v3_small", 1, 0.1), neighbours, "h200") < 2.0


def test_a_device_that_was_not_measured_is_named():
    with pytest.raises(BadValue, match="'v100'"):
        shipped_regression("v100")


def test_too_few_cases_are_refused():
    with pytest.raises(BadValue, match="too few"):
        interference.fit_slowdown([])


def test_profiles_with_traits_make_a_model():
    found = interference.fitted_interference(read_all("profiles/h200"))
    alone = ColocatedBatch("resnet50", 8, 0.2)
    assert found.slowdown(alone, [], "h200") == 1.0
    assert 1.05 < found.slowdown(alone, [ColocatedBatch("bert_base", 16, 0.4), ColocatedBatch("vgg16", 16, 0.4)], "h200") < 1.6


def test_profiles_without_traits_make_none():
    with pytest.raises(BadValue, match="traits"):
        interference.fitted_interference(read_all("profiles/v100"))


def test_demand_is_part_of_the_peak():
    profile = read("profiles/h200/vgg16.json")
    assert profile.traits is not None
    assert 0 < interference.bandwidth_demand(profile.traits, "h200", profile.points) < 1
    assert interference.bandwidth_demand(profile.traits, "v100", profile.points) == 0.0
