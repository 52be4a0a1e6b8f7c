from __future__ import annotations

import pytest

from lamina.core.workflow.flow import Each, Flow, Task, function_flow
from lamina.planner.function_goals import NO_GOAL_US, function_goals_us, function_rates
from lamina.types import Slo

ALONE_US = {"detect": 30_000.0, "read": 10_000.0}
PAGE = Flow(
    "page",
    {
        "detect": Task("detect", "detect", ("lines",)),
        "lines": Each("lines", Flow("lines", {"read": Task("read", "read")}, ("read",)), (), 1, 8.0),
    },
    ("detect",),
    Slo(latency_us=200_000),
)


def test_a_goal_is_shared_out_by_how_long_steps_take():
    assert function_goals_us([PAGE], ALONE_US.__getitem__) == {"detect": 150_000, "read": 50_000}


def test_the_most_demanding_caller_sets_the_goal():
    goals = function_goals_us([PAGE, function_flow("read", Slo(latency_us=20_000))], ALONE_US.__getitem__)
    assert goals["read"] == 20_000


def test_without_a_goal_there_is_a_friendly_one():
    assert function_goals_us([function_flow("a", Slo())], lambda name: 1.0) == {"a": NO_GOAL_US}


def test_every_item_of_a_workflow_is_a_job():
    rates = function_rates({"page": PAGE, "read": function_flow("read", Slo())}, {"page": 10.0, "read": 5.0})
    assert rates == {"detect": pytest.approx(10.0), "read": pytest.approx(85.0)}
