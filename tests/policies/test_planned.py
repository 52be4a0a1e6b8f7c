"""A plan made ahead, kept to."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.errors import BadValue
from lamina.policies import build
from lamina.sim.run import run
from tests.published.gpulet.test_gpulet import Log, scenario

SLICES: list[dict[str, Any]] = [
    {
        "gpu": 0,
        "kind": "d",
        "units": 50,
        "duty_us": 50_000,
        "busy_us": 30_000,
        "turns": [{"function": "a", "batch": 4, "per_s": 80.0}],
    },
    {
        "gpu": 0,
        "kind": "d",
        "units": 50,
        "duty_us": 60_000,
        "busy_us": 30_000,
        "turns": [{"function": "b", "batch": 3, "per_s": 50.0}],
    },
]


def test_it_stands_as_planned_and_runs_no_larger_batch():
    log = Log()
    given = scenario({"a": 60.0, "b": 30.0})
    summary = run(given, "planned", {"slices": SLICES}, watch=log, check=True)
    assert summary.total.attainment > 0.97
    assert sorted((function, mask.bit_count()) for function, _, mask in log.homes.values()) == [("a", 50), ("b", 50)]
    assert max(len(action.jobs) for action, _ in log.runs if action.function == "a") <= 4


def test_what_the_plan_does_not_name_is_not_served():
    summary = run(scenario({"a": 60.0, "c": 30.0}), "planned", {"slices": SLICES[:1]}, check=True)
    assert {row.target: row.answered for row in summary.targets}["c"] == 0


def test_two_functions_may_take_turns():
    together = SLICES[0] | {"units": 100, "duty_us": 60_000, "turns": [SLICES[0]["turns"][0], SLICES[1]["turns"][0]]}
    log = Log()
    summary = run(scenario({"a": 50.0, "b": 30.0}), "planned", {"slices": [together]}, watch=log, check=True)
    assert summary.total.attainment > 0.97
    assert {mask.bit_count() for _, _, mask in log.homes.values()} == {100}


def test_a_broken_slice_is_told():
    with pytest.raises(BadValue, match="slices"):
        build("planned", {"slices": [{"gpu": 0}]})
