"""Admission margin: what late calls teach, and what they do not."""

from __future__ import annotations

import pytest

from lamina.core.scheduling.admission import MAX_MARGIN, MAX_STEPS, STEP, WORKFLOW_STEP, AdmissionMargin
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Choice, Flow, Task
from lamina.core.workflow.runs import WorkflowRun
from lamina.types import Call

CASCADE = Flow(
    "cascade",
    {
        "small": Task("small", "small", ("sure",)),
        "sure": Choice("sure", (("large",), ()), odds=(0.3, 0.7)),
        "large": Task("large", "large"),
    },
    ("small",),
)


def falls_at(node: str) -> int:
    """The margin after a run failed there, of the 40 ms it had."""
    promises, run = AdmissionMargin(), WorkflowRun(Call("c", "cascade", 0, 40_000, 40_000), CASCADE, None)
    run.add_job(Job(1, run, 0, node, node, 0, 40_000, 40_000))
    promises.on_call_ended(0, run, in_time=False)
    return promises.margin_us("cascade")


@pytest.mark.parametrize(("node", "learnt"), [("small", True), ("large", False)])
def test_only_steps_that_all_runs_come_to_widen_the_reserve(node: str, learnt: bool):
    assert (falls_at(node) > 0) is learnt


ONE = Flow("one", {"step": Task("step", "step")}, ("step",))
ALLOWED_US = 40_000


def after(*ends: bool, flow: Flow = ONE) -> int:
    """The margin after calls that ended in time or not, one after another."""
    promises = AdmissionMargin()
    for number, in_time in enumerate(ends):
        run = WorkflowRun(Call("c", flow.name, 0, ALLOWED_US, ALLOWED_US), flow, None)
        promises.on_call_ended(number * 2 * ALLOWED_US, run, in_time)
    return promises.margin_us(flow.name)


@pytest.mark.parametrize(("flow", "step"), [(ONE, STEP), (CASCADE, WORKFLOW_STEP)], ids=["one step", "several"])
def test_each_that_is_late_widens_it_by_a_part_of_the_time_it_had(flow: Flow, step: float):
    assert after(False, False, flow=flow) == pytest.approx(2 * step * ALLOWED_US, rel=0.02)


def test_it_never_takes_more_than_half_of_the_time_there_is():
    assert after(*[False] * 500) == MAX_MARGIN * ALLOWED_US


def test_it_stays_where_as_many_are_late_as_the_goal_allows():
    assert after(False, *[False, *[True] * 99] * 30) == pytest.approx(STEP * ALLOWED_US, rel=0.02)


def test_where_all_are_in_time_it_goes_away():
    assert after(False, *[True] * 100) == 0


def test_a_crowd_that_is_late_at_once_counts_for_a_few_calls():
    """One stall makes a whole queue late; all of it was admitted before the first of them could tell."""
    margin = AdmissionMargin()
    for _ in range(300):
        margin.on_call_ended(1_000, WorkflowRun(Call("c", "one", 0, ALLOWED_US, ALLOWED_US), ONE, None), in_time=False)
    assert margin.margin_us("one") == pytest.approx(MAX_STEPS * STEP * ALLOWED_US, rel=0.02)


def test_a_margin_too_wide_is_given_up_faster_than_it_was_learnt_call_by_call():
    """Three hundred calls in time, where three of them might have been late: it shrinks by a third, not by three steps."""
    assert after(*[False] * 40, *[True] * 300) < 0.75 * (40 - 3) * STEP * ALLOWED_US
