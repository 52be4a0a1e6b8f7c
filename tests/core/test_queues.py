"""Queues of jobs, in the order their policy serves them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.policy import Decision, Defer, View
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.queues import Order, Queue
from lamina.core.workflow.flow import function_flow
from lamina.types import NEVER_US, Call, Slo
from tests.script import Script, a_function

RUN = ActiveCall(Call("c", "f", 0), function_flow("f", Slo()), None)


def job(id: int, due_us: int = 0) -> Job:
    return Job(id, RUN, 0, "f", "f", 0, due_us, due_us)


@pytest.mark.parametrize("order", ["arrival", "due"])
@given(st.data())
def test_whatever_comes_and_goes_the_queue_is_sorted(order: Order, data: st.DataObject):
    queue, model = Queue("f", order), []
    for id in range(data.draw(st.integers(1, 30))):
        if model and data.draw(st.booleans()):
            count = data.draw(st.integers(1, len(model)))
            going = model[:count] if data.draw(st.booleans()) else data.draw(st.permutations(model))[:count]
            queue.remove_all(going)
            model = [waiting for waiting in model if waiting not in going]
        model.append(job(id, data.draw(st.integers(0, 5))))
        queue.add(model[-1])
        model.sort(key=lambda waiting: (waiting.due_us if order == "due" else 0, waiting.id))
        assert queue.jobs() == model
        assert queue.head() is model[0]
        assert queue.first(3) == model[:3]
        assert len(queue) == len(model)


def test_a_job_that_comes_back_takes_its_old_place():
    queue, jobs = Queue("f"), [job(1), job(2), job(3)]
    for waiting in jobs:
        queue.add(waiting)
    queue.remove_all(jobs[:2])
    queue.add(jobs[0])
    assert queue.jobs() == [jobs[0], jobs[2]]


def test_a_job_that_does_not_wait_cannot_be_taken():
    queue = Queue("f")
    queue.add(job(1))
    with pytest.raises(AssertionError, match="job 2 is not waiting"):
        queue.remove(job(2))


# ------------------------------------------------------------------------ deferred functions


class Deferring:
    """Defers its function, and counts how often it is asked about it."""

    order: Order = "due"

    def __init__(self, count: int, until_us: int = NEVER_US) -> None:
        self.asked: list[int] = []
        self.count, self.until_us = count, until_us

    def dispatch(self, view: View) -> Iterator[Decision]:
        for function in list(view.waiting.values()):
            self.asked.append(len(function.queue))
            yield Defer(function.spec.name, self.until_us, self.count)


def test_a_deferred_function_is_asked_about_again_when_it_has_as_many_jobs_as_were_named(script: Script):
    policy = Deferring(count=3)
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1", "c2", "c3", "c4", within_us=1_000_000)
    assert policy.asked == [1, 3, 4]


def test_a_deferred_function_is_asked_about_again_when_a_more_urgent_job_comes(script: Script):
    policy = Deferring(count=100)
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1", within_us=1_000_000)
    script.arrives("patient", within_us=2_000_000)
    assert policy.asked == [1]
    script.arrives("urgent", within_us=500_000)
    assert policy.asked == [1, 3]


def test_a_deferred_function_is_asked_about_again_when_its_time_has_come(script: Script):
    policy = Deferring(count=100, until_us=5_000)
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1", within_us=1_000_000)
    script.at(4_999)
    assert policy.asked == [1]
    policy.until_us = NEVER_US
    script.at(5_000)
    assert policy.asked == [1, 1]
