"""Completion estimate: when a job that arrives now would be done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.core.events import InstanceReady, Tick
from lamina.core.policy import Decision, LoadInstance, Start, View
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow, Task
from lamina.policies import edf, frontier
from lamina.types import DeviceSpec, SliceLimits, Slo
from tests.script import GPU, Script, a_function

MS = 1_000
MANY = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))


def estimate_us(view: View, function: FunctionState, allowed_us: int = 10**7) -> int:
    """In batches as large as may be, on the slice that it asks for."""
    return edf.fixed_slice_estimator().estimate_us(view, function, allowed_us, 0)


@dataclass
class Start1:
    """Starts as many batches of one as it is told; the rest waits."""

    starts: int = 0
    order: Order = "arrival"

    def dispatch(self, view: View) -> Iterable[Decision]:
        for function in list(view.waiting.values()):
            for opening in view.slots(function):
                if not self.starts or opening.behind is not None or not len(function.queue):
                    return
                self.starts -= 1
                yield Start(function.queue.first(1), opening)


def waiting(jobs: int, running: int = 0, device: DeviceSpec = GPU, **function: object) -> tuple[View, FunctionState]:
    """A function with so many jobs in its queue and batches on its device."""
    script = Script()
    takes = {"f": (2 * MS, 500)}
    script.given(a_function(**function), devices=[device], policy=Start1(running), takes=takes, loads={"f": 30 * MS})
    script.arrives(*[f"c{i}" for i in range(jobs + running)])
    assert len(script.running) == running
    return script.controller.view, script.controller.state.functions["f"]


def simulated_us(lanes_free_us: list[int], jobs: int, max_batch: int) -> int:
    """The end of the last batch when lanes take full batches as soon as they are free."""
    lanes = list(lanes_free_us)
    heapq.heapify(lanes)
    end_us = 0
    while jobs:
        batch = min(jobs, max_batch)
        jobs -= batch
        end_us = heapq.heappop(lanes) + 2 * MS + 500 * batch
        heapq.heappush(lanes, end_us)
    return end_us


@given(jobs=st.integers(0, 40), max_batch=st.integers(1, 8), running=st.integers(0, 1))
def test_on_one_slice_it_is_what_serving_the_queue_takes_within_one_batch(jobs: int, max_batch: int, running: int):
    view, function = waiting(jobs, running, max_batch=max_batch)
    truly_us = simulated_us([2_500 * running], jobs + 1, max_batch)
    assert truly_us <= estimate_us(view, function) <= truly_us + 500 * (max_batch - 1)


@given(jobs=st.integers(0, 60), max_batch=st.integers(1, 8))
def test_where_slices_are_chosen_no_less_is_promised_than_the_best_batches_take(jobs: int, max_batch: int):
    """Eight slices of a unit, and the queue in batches of any one size."""
    view, function = waiting(jobs, device=MANY, share=0.25, max_batch=max_batch)
    best_us = min(simulated_us([0] * 8, jobs + 1, size) for size in range(1, max_batch + 1))
    assert best_us <= frontier.Policy()._estimator.estimate_us(view, function, 10**7, 0)


@given(jobs=st.integers(0, 60), max_batch=st.integers(1, 8))
def test_on_many_idle_slices_it_is_what_serving_the_queue_takes_within_one_batch(jobs: int, max_batch: int):
    view, function = waiting(jobs, device=MANY, share=0.25, max_batch=max_batch)
    truly_us = simulated_us([0, 0, 0, 0], jobs + 1, max_batch)
    said_us = estimate_us(view, function)
    assert truly_us <= said_us <= truly_us + 500 * (max_batch - 1)


@given(jobs=st.integers(0, 40), max_batch=st.integers(1, 8), running=st.integers(0, 1))
def test_a_longer_queue_never_ends_sooner(jobs: int, max_batch: int, running: int):
    shorter, longer = (estimate_us(*waiting(n, running, max_batch=max_batch)) for n in (jobs, jobs + 1))
    assert shorter <= longer


@pytest.mark.parametrize("jobs", [0, 7, 150, 333])
def test_a_few_of_many_places_speak_for_all(jobs: int):
    places = [replace(GPU, id=f"g{number}") for number in range(50)]
    script = Script().given(a_function(max_batch=2), devices=places, policy=Start1(), takes={"f": (2 * MS, 500)})
    for number in range(1, 50):
        script.controller._cluster.load_instance(LoadInstance("f", f"g{number}"))
        script.tell(InstanceReady(f"f-{number + 1}"))
    script.arrives(*[f"c{i}" for i in range(jobs)])
    truly_us = simulated_us([0] * 50, jobs + 1, max_batch=2)
    said_us = estimate_us(script.controller.view, script.controller.state.functions["f"])
    assert truly_us <= said_us <= truly_us + 500


def test_a_device_with_no_free_units_is_waited_for():
    view, function = waiting(0, running=4, device=MANY, share=0.25)
    assert estimate_us(view, function) == 2_500 + 2_500


@pytest.mark.parametrize("policy", [edf.Policy, frontier.Policy])
def test_units_that_another_function_has_are_waited_for(script: Script, policy: type[edf.Policy | frontier.Policy]):
    """One batch of each at a time, and one unit for both."""
    script.given(a_function("f"), a_function("g"), policy=Start1(1), takes={"f": 5 * MS, "g": 2 * MS})
    script.at(0).arrives("c", target="f")
    estimator = policy()._estimator
    assert estimator.estimate_us(script.controller.view, script.controller.state.functions["g"], 10**7, 0) == 7 * MS


@pytest.mark.parametrize(("within_ms", "takes_ms"), [(50, 2 + 3 * 5), (900, 2)])
def test_only_what_is_due_sooner_of_another_function_is_before_it_on_a_fixed_slice(script: Script, within_ms: int, takes_ms: int):
    script.given(a_function("f"), a_function("g"), policy=Start1(order="due"), takes={"f": 5 * MS, "g": 2 * MS})
    script.at(0).arrives("c1", "c2", "c3", target="f", within_us=within_ms * MS)
    function = script.controller.state.functions["g"]
    assert estimate_us(script.controller.view, function, 100 * MS) == takes_ms * MS


def test_an_instance_that_loads_is_waited_for_as_long_as_loads_seldom_exceed(script: Script):
    script.given(a_function(), policy=Start1(), takes={"f": 5 * MS}, loads={"f": 30 * MS}, warm=False)
    script.at(0).arrives("c1")
    script.at(10 * MS).tell(Tick())
    function = script.controller.state.functions["f"]
    assert estimate_us(script.controller.view, function) == 33 * MS - 10 * MS + 2 * 5 * MS


def test_without_an_instance_the_load_is_on_top(script: Script):
    script.given(a_function(), policy=Start1(), takes={"f": 5 * MS}, loads={"f": 30 * MS}, warm=False)
    assert estimate_us(script.controller.view, script.controller.state.functions["f"]) == 33 * MS + 5 * MS


def test_there_is_no_estimate_before_anything_was_measured(script: Script):
    script.given(a_function(), policy=Start1())
    assert estimate_us(script.controller.view, script.controller.state.functions["f"]) == 0


def test_there_is_no_estimate_without_a_device(script: Script):
    script.given(a_function(), policy=Start1(), takes={"f": 5 * MS}, devices=[])
    assert estimate_us(script.controller.view, script.controller.state.functions["f"]) == 0


@pytest.mark.parametrize("way_us", [0, 500, 10 * MS])
def test_batches_ahead_take_what_they_usually_do_and_the_last_what_is_planned_with(way_us: int):
    """Forty jobs ahead of one, in batches of one of 10 ms on one unit, which usually take eight; a slice that is free early waits
    for the next to get there."""
    script = Script()
    script.given(a_function(max_batch=1, slo=Slo(latency_us=10**7)), policy=frontier.Policy(), takes={"f": 10 * MS})
    policy, state = script.controller.policy, script.controller.state
    script.arrives(*[f"c{number}" for number in range(21)], within_us=10**7)
    function, device = state.functions["f"], state.devices["gpu0"]
    assert len(function.queue) + len(state.batches) == 21
    function.usual_part = 0.8
    device.observe_way(way_us)
    way_us = device.way_us
    ahead = len(function.queue)
    found = policy._estimator.estimate_us(script.controller.view, function, 10**7, 1)
    each_us = min(10 * MS, 8 * MS + way_us)
    first_us = max(batch.slice_free_us for batch in state.batches.values()) - script.now_us
    assert found == pytest.approx(first_us + ahead * each_us + 10 * MS, abs=way_us + 100)


def test_an_instance_that_is_being_loaded_serves_nothing_of_a_long_queue_before_it_is_there():
    """A hundred batches, and a second place in a second: until then there is one lane."""
    script = Script()
    places = [replace(GPU, id=f"g{number}") for number in range(2)]
    script.given(a_function(), devices=places, policy=Start1(), takes={"f": 10 * MS}, loads={"f": 1_000 * MS})
    script.controller._cluster.load_instance(LoadInstance("f", "g1"))
    script.arrives(*[f"c{number}" for number in range(90)])
    view, function = script.controller.view, script.controller.state.functions["f"]
    assert estimate_us(view, function) == pytest.approx(910 * MS, rel=0.02)
    script.arrives(*[f"d{number}" for number in range(100)])
    assert estimate_us(view, function) == pytest.approx((1_000 + 910 // 2) * MS, rel=0.05)


def test_a_workflow_does_not_wait_for_work_that_runs_on_other_units(script: Script):
    """Half of the device is busy for a second, the other half is free."""
    page = Flow("page", {"a": Task("a", "f", ("b",)), "b": Task("b", "f")}, ("a",), Slo(latency_us=100 * MS))
    functions = a_function("f", share=0.25), a_function("long", share=0.5)
    script.given(*functions, flows=[page], devices=[MANY], policy=Start1(1), takes={"f": 5 * MS, "long": 1_000 * MS})
    script.arrives("l", target="long")
    assert len(script.running) == 1
    estimator, view = frontier.Policy()._estimator, script.controller.view
    assert estimator.workflow_estimate_us(view, page, 100 * MS, is_overloaded=False) == 10 * MS
    script.controller.policy.starts = 1  # and now on the other half
    script.arrives("m", target="long")
    assert estimator.workflow_estimate_us(view, page, 100 * MS, is_overloaded=False) >= 1_000 * MS


def test_a_function_in_quarantine_is_served_one_batch_at_a_time():
    """Four slices of a device, and one of its jobs has killed a worker: until it is known which, one batch runs at a time."""
    view, function = waiting(3, device=MANY, share=0.25)
    assert estimate_us(view, function) == 2_500
    function.quarantine(3)
    assert estimate_us(view, function) == 4 * 2_500
