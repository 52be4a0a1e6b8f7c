"""Small rules of `frontier` that no whole run shows: each is a line somewhere, and each has a reason."""

from __future__ import annotations

import pytest

from lamina.core.policy import View
from lamina.core.scheduling.queues import Queue
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.policies.frontier.admission import RejectionMemory
from lamina.policies.frontier.optimizer import MAX_WAIT_BATCHES, WaitBudget
from lamina.types import FunctionSpec
from tests.script import Known

MS = 1_000


@pytest.fixture
def rejected() -> tuple[RejectionMemory, View, FunctionState]:
    """A call with 5 ms was rejected, because 9 were needed."""
    view = View(ControllerState(), Known({}, {}))
    function = FunctionState(spec=FunctionSpec(name="f"), queue=Queue("f"))
    memory = RejectionMemory()
    memory.record(view, function, allowed_us=5 * MS, needed_us=9 * MS)
    return memory, view, function


def test_who_has_more_time_than_the_one_turned_away_is_looked_at_anew(rejected):
    memory, view, function = rejected
    assert memory.needed_us(view, function, allowed_us=6 * MS) == 0
    assert memory.needed_us(view, function, allowed_us=4 * MS) == 9 * MS


def test_what_a_call_would_need_shrinks_as_time_goes_by(rejected):
    memory, view, function = rejected
    view.now_us = 3 * MS
    assert memory.needed_us(view, function, allowed_us=5 * MS) == 6 * MS


def test_a_generous_goal_is_no_leave_to_wait_longer_than_a_few_batches_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=100, time_us=2 * MS) == MAX_WAIT_BATCHES * 2 * MS


def test_company_is_waited_for_three_times_as_long_as_it_should_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=2, time_us=50 * MS) == 6 * MS + 50
