"""Queues of jobs, in the order their policy serves them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.core.events import BatchFinished, CallCancelled, DeviceJoined, InstanceReady
from lamina.core.policy import Decision, Defer, LoadInstance, Start, View
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.queues import Order, Queue
from lamina.core.waiting_lines import Rank, WaitingLines
from lamina.core.workflow.flow import function_flow
from lamina.types import NEVER_US, Call, Slo
from tests.script import GPU, Script, a_function

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
        queue.remove_job(job(2))


def test_what_waits_is_counted_on_the_devices_its_function_is_on(script: Script):
    """Also where it is loaded only now, and until its last job has started."""
    script.given(a_function(), takes={"f": 1_000}, loads={"f": 5_000}, warm=False)
    script.at(0).arrives("c1", within_us=1_000_000)
    backlogged = script.controller.view.backlogged
    assert {host: list(functions) for host, functions in backlogged.items()} == {"gpu0": ["f"]}
    script.tell(InstanceReady(next(iter(script.controller.state.instances))))
    assert not backlogged["gpu0"]


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


class Queueing:
    """Starts the function that it is asked about if its device is idle, else defers it to its place in line."""

    order: Order = "due"

    def __init__(self, slot: tuple[int, int] | None = None) -> None:
        self.asked: list[str] = []
        self.slot = slot
        self.loads: list[LoadInstance] = []

    def dispatch(self, view: View) -> Iterator[Decision]:
        loads, self.loads = self.loads, []
        yield from loads
        for function in sorted(view.waiting.values(), key=lambda one: one.queue.head().due_us):
            name, head = function.spec.name, function.queue.head()
            self.asked.append(name)
            free = next((slot for slot in view.slots(function) if slot.behind is None), None)
            if free is not None:
                yield Start([head], free)
            else:
                yield Defer(name, NEVER_US, NEVER_US, rank=(head.due_us, 0, head.id), slot=self.slot)


def in_line(script: Script, policy: Queueing) -> None:
    """A batch runs on the only unit; twelve functions are in line behind it, the one with the highest number first."""
    script.given(*(a_function(f"f{number}") for number in range(13)), policy=policy, takes={f"f{n}": 1_000 for n in range(13)})
    for number in range(13):
        script.at(number).arrives(f"c{number}", target=f"f{number}", within_us=1_000_000 - 1_000 * number)
    policy.asked.clear()


def test_when_a_device_changes_the_first_in_line_are_asked_about_and_no_others(script: Script):
    policy = Queueing()
    in_line(script, policy)
    script.at(500).tell(BatchFinished(1, 500))
    assert policy.asked == ["f12", "f11", "f10", "f9"]
    assert "f12" not in script.controller.state.deferred
    script.at(900).tell(BatchFinished(2, 400))
    assert policy.asked[4:] == ["f11", "f10", "f9", "f8"]


def test_while_units_are_left_the_next_in_line_are_asked_about(script: Script):
    policy = Queueing()
    in_line(script, policy)
    for number in range(12, 8, -1):  # the first four leave the line: their calls are cancelled while the device is busy
        script.tell(CallCancelled(f"c{number}"))
    script.at(500).tell(BatchFinished(1, 500))
    assert policy.asked == ["f8", "f7", "f6", "f5"]


def test_the_first_in_line_are_asked_about_when_a_slot_may_be_committed(script: Script):
    policy = Queueing(slot=(700, 1))
    in_line(script, policy)
    script.at(699)
    assert policy.asked == []
    policy.slot = None
    script.at(700)
    assert policy.asked == ["f12", "f11", "f10", "f9"]


def test_no_function_is_asked_about_for_a_slot_behind_a_batch_that_is_over(script: Script):
    policy = Queueing(slot=(700, 1))
    in_line(script, policy)
    policy.slot = None
    script.at(500).tell(BatchFinished(1, 500))
    policy.asked.clear()
    script.at(701)
    assert policy.asked == []


def test_a_function_is_not_asked_about_for_what_changes_where_it_is_only_being_loaded(script: Script):
    policy = Queueing()
    in_line(script, policy)
    script.tell(DeviceJoined(replace(GPU, id="gpu1")))
    policy.loads = [LoadInstance("f12", "gpu1"), LoadInstance("f1", "gpu1")]
    script.arrives("urgent", target="f12", within_us=1_000)
    policy.asked.clear()
    script.tell(InstanceReady("f1-2"))
    assert policy.asked == ["f1"], "it has begun on the new device"
    script.tell(InstanceReady("f12-2"))
    assert policy.asked == ["f1", "f12"], "it is in line there now"
    script.tell(BatchFinished(2, 400))
    assert policy.asked == ["f1", "f12", "f12"]


@given(st.data())
def test_lines_are_those_that_are_in_them_by_rank(data: st.DataObject):
    lines, model = WaitingLines(), dict[str, tuple[Rank, tuple[str, ...]]]()
    for number in range(data.draw(st.integers(1, 25))):
        if model and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(model)))
            lines.remove(name)
            del model[name]
        places = tuple(data.draw(st.lists(st.sampled_from("xyz"), unique=True)))
        rank = (data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), number)
        model[f"n{number}"] = (rank, places)
        lines.add(f"n{number}", rank, places)
        without = set(data.draw(st.lists(st.sampled_from(sorted(model)))))
        for place in "xyz":
            there = sorted((rank, name) for name, (rank, places) in model.items() if place in places and name not in without)
            assert list(lines.names(place, without)) == [name for _, name in there]
