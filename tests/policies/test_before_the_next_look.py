"""Worlds that change within a second: several devices, loads, silences, short queues, goals that differ from call to call."""

from __future__ import annotations

from typing import Any

import pytest

from lamina import policies
from lamina.core.actions import Load, Reject, Unload
from lamina.core.events import CallArrived, Deployed, InstanceReady, Tick
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.sim.summary import Summary, TargetRow
from lamina.types import DeviceSpec, SliceLimits
from tests.script import Script, a_function

HEAD = '[scenario]\nseed = {seed}\nduration = "{seconds}s"\nnoise = {noise}\n'
DEVICE = '[[device]]\nkind = "{kind}"\nunits = {units}\nmemory = "{gib}GiB"\ncount = {count}\nbatches_per_instance = 0\n{more}\n'


def device(units: int = 1, count: int = 1, gib: int = 4, kind: str = "gpu", more: str = "owned = true") -> str:
    return DEVICE.format(kind=kind, units=units, gib=gib, count=count, more=more)


def function(name: str, ms: dict[str, dict[int, list[float]]], **more: Any) -> str:
    """`ms`: by kind of device and units, times of a batch of one and of the largest."""
    fields = {"share": "100%", "memory": "1GiB", "load": "100ms", "max_batch": 1} | more
    lines = [f"{key} = {value if isinstance(value, int) or '{' in str(value) else repr(value)}" for key, value in fields.items()]
    text = "\n".join([f'[[function]]\nname = "{name}"', *lines, ""])
    for kind, rows in ms.items():
        text += f"[function.profile.{kind}]\nbatch = {[1, fields['max_batch']][: len(next(iter(rows.values())))]}\n"
        text += "".join(f"p50_ms.{units} = {row}\n" for units, row in rows.items())
    return text


def load(target: str, **more: Any) -> str:
    return f'[[load]]\ntarget = "{target}"\n' + "".join(f"{key} = {value!r}\n" for key, value in more.items())


def simulated(*parts: str, seconds: float = 1.5, noise: float = 0.05, policy: str = "frontier", **more: Any) -> Summary:
    return run(scenario.parse(HEAD.format(seed=2, seconds=seconds, noise=noise) + "".join(parts)), policy, **more)


def row(summary: Summary, target: str) -> TargetRow:
    return next(row for row in summary.targets if row.target == target)


def test_a_function_that_loses_calls_is_loaded_on_idle_devices_before_the_next_period():
    """Three times what one device can do, and two more devices stand idle: the next look at all functions is a second away."""
    parts = device(count=3), function("f", {"gpu": {1: [10]}}, slo="40ms", scale="{ min = 1 }", load="20ms"), load("f", rate=200)
    found = row(simulated(*parts, seconds=0.9), "f")
    assert found.attainment > 0.8


def test_calls_that_are_rejected_count_as_demand_for_instances():
    """Of a function with an instance only admitted calls used to count, and those never ask for more than there is."""
    goal = {"slo": "{ latency = '40ms', target = 0.5 }"}  # half may be lost: relief is not what loads it
    parts = device(count=3), function("f", {"gpu": {1: [10]}}, scale="{ min = 1 }", load="20ms", **goal), load("f", rate=280)
    assert row(simulated(*parts, seconds=3), "f").attainment > 0.8


def test_a_goal_that_no_device_could_meet_brings_no_instances():
    loads: list[Load] = []

    def watch(_now_us: int, _event: object, actions: list[Any]) -> None:
        loads.extend(action for action in actions if isinstance(action, Load))

    parts = device(count=3), function("f", {"gpu": {1: [10]}}, slo="5ms", scale="{ min = 1 }"), load("f", rate=20)
    assert row(simulated(*parts, seconds=0.9, watch=watch), "f").in_time == 0
    assert len(loads) == 1


@pytest.mark.parametrize("policy", ["frontier", "edf"])
def test_what_waits_for_its_load_is_not_unloaded_for_having_been_silent(policy: str):
    """A load takes longer than `idle`, and its callers wait for their answers: no call comes meanwhile."""
    unloads: list[Unload] = []

    def watch(_now_us: int, _event: object, actions: list[Any]) -> None:
        unloads.extend(action for action in actions if isinstance(action, Unload))

    more = {"slo": "20s", "scale": "{ min = 0, idle = '300ms' }", "load": "2s"}
    parts = device(), function("f", {"gpu": {1: [10]}}, **more), load("f", shape="closed", clients=4)
    summary = simulated(*parts, seconds=3, noise=0.0, policy=policy, watch=watch)
    assert row(summary, "f").answered > 50 and not unloads


def test_room_is_made_for_what_is_loaded_nowhere_where_others_stand_twice():
    """A long queue without a goal has taken the memory of both devices; one instance of it must do."""
    parts = (
        device(count=2),
        function("many", {"gpu": {1: [20]}}, memory="3GiB", scale="{ min = 1 }", load="10ms"),
        function("late", {"gpu": {1: [20]}}, memory="3GiB", slo="900ms", scale="{ min = 0 }", load="50ms"),
        load("many", rate=400),
        load("late", rate=10, start="0.5s"),
    )
    summary = simulated(*parts, seconds=2)
    assert row(summary, "late").attainment > 0.6
    assert row(summary, "many").answered == row(summary, "many").offered


def test_a_short_queue_is_no_place_to_wait_for_a_larger_batch():
    """What may wait is less than a batch: calls beyond it are rejected beside an idle device."""
    more = {"max_batch": 32, "max_queue": 4, "slo": "1s", "scale": "{ min = 1 }", "load": "5ms"}
    parts = (
        device(2, more="owned = false"),
        function("f", {"gpu": {1: [2, 13], 2: [1.4, 9]}}, **more),
        load("f", rate=500, start="0.2s"),
    )
    assert row(simulated(*parts), "f").attainment > 0.97


def test_what_may_wait_is_not_given_up_beside_a_device_that_does_not_pay():
    """The dear device is idle and in time; the cheap one is busy until it would be too late."""
    times = {"cheap": {1: [2, 2.9]}, "dear": {1: [2.4, 3.0]}}
    parts = (
        device(1, kind="cheap", more='price = "1/h"'),
        device(1, kind="dear", more='price = "9/h"'),
        function("f", times, slo="3.2ms", scale="{ min = 2 }", load="1ms", max_batch=2),
        load("f", rate=300, start="0.3s"),
    )
    assert row(simulated(*parts, noise=0.0), "f").attainment > 0.9


def test_a_device_that_does_not_pay_is_taken_while_its_own_time_is_left():
    """The dear one takes three times as long: what waits until two batches of the cheap one are left is late on it."""
    times = {"cheap": {1: [2]}, "dear": {1: [6]}}
    parts = (
        device(1, kind="cheap", more='price = "1/h"'),
        device(4, kind="dear", more='price = "90/h"'),
        function("f", times, slo="8ms", scale="{ min = 2 }", load="1ms", share="1/4"),
        load("f", rate=400, start="0.3s"),
    )
    summary = simulated(*parts, noise=0.0)
    assert row(summary, "f").attainment > 0.95 and not row(summary, "f").failed


@pytest.mark.parametrize("ways", ["0.2ms", "3ms"])
def test_no_device_stands_idle_for_one_that_will_not_be_free_in_time(ways: str):
    """The cheap device, which is better in every way, is busy for half a second with a call of another function."""
    parts = (
        device(1, gib=8, kind="cheap", more=f'price = "1/h"\nway = "{ways}"'),
        device(1, kind="dear", more='price = "9/h"'),
        function("f", {"cheap": {1: [2]}, "dear": {1: [5]}}, slo="16ms", scale="{ min = 2 }", load="1ms"),
        function("long", {"cheap": {1: [500]}, "dear": {1: [500]}}, memory="5GiB", scale="{ min = 1 }", load="1ms"),
        load("long", shape="closed", clients=1, start="0.3s"),
        load("f", rate=60, start="0.4s"),
    )
    found = row(simulated(*parts, noise=0.0), "f")
    assert found.attainment > 0.7 and not found.failed
    assert found.queue_mean_ms < 3


def test_in_overload_a_dear_device_does_not_wait_for_a_cheap_one():
    """A crowd waits, and the cheap device has a slot for one of them in time, again and again."""
    parts = (
        device(2, kind="cheap", more='price = "1/h"'),
        device(2, kind="dear", more='price = "20/h"'),
        function("f", {"cheap": {1: [10], 2: [8]}, "dear": {1: [15], 2: [12]}}, slo="200ms", scale="{ min = 2 }", load="1ms"),
        load("f", rate=900, start="0.2s"),
    )
    summary = simulated(*parts, seconds=2)
    [dear] = [one for one in summary.devices if one.device.startswith("dear")]
    assert dear.utilisation > 0.8


def test_late_batches_leave_room_for_calls_that_can_still_be_in_time():
    """Late answers are wanted too, but thirty-two of them at once keep the device for longer than a call has."""
    more = {"slo": "{ latency = '20ms', on_miss = 'serve' }", "max_batch": 32, "scale": "{ min = 1, max = 1 }", "load": "400ms"}
    parts = device(), function("f", {"gpu": {1: [4, 100]}}, **more), load("f", rate=230)
    assert row(simulated(*parts, seconds=2), "f").attainment > 0.65


def test_a_batch_for_the_least_latency_is_no_larger_than_is_in_time():
    """All that waits in one batch would be late as a whole: tried again and again, a microsecond later each time."""
    ticks = 0

    def watch(_now_us: int, event: object, _actions: list[Any]) -> None:
        nonlocal ticks
        ticks += isinstance(event, Tick)

    more = {"max_batch": 32, "objective": "latency", "slo": "250ms", "scale": "{ min = 3, max = 3 }", "load": "50ms"}
    burst = load("f", shape="steps", stages=[["20ms", 1500], ["2s", 0]])
    summary = simulated(device(count=3), function("f", {"gpu": {1: [10, 600]}}, **more), burst, seconds=0.5, watch=watch)
    assert row(summary, "f").in_time >= 20 and ticks < 1_000


def test_a_call_is_not_rejected_for_jobs_that_can_wait_for_longer_than_it():
    """Its queue is full of jobs with a minute to spare, which give way to it."""
    function_f = function("f", {"gpu": {1: [10]}}, slo="30ms", scale="{ min = 1, max = 1 }", load="5ms")
    patient = load("f", rate=120, slo="60s", duration="1s", start="0.1s")
    urgent = load("f", rate=20, slo="40ms", start="0.6s")
    by_deadline = {"urgent": [0, 0], "patient": [0, 0]}

    def watch(_now_us: int, event: object, actions: list[Any]) -> None:
        if isinstance(event, CallArrived):
            call = event.call
            kind = "urgent" if call.deadline_us - call.arrived_us < 1_000_000 else "patient"
            by_deadline[kind][0] += 1
            by_deadline[kind][1] += any(isinstance(action, Reject) for action in actions)

    simulated(device(), function_f, patient, urgent, watch=watch)
    offered, rejected = by_deadline["urgent"]
    assert offered >= 10 and rejected <= offered // 4
    assert by_deadline["patient"][1] == 0


def test_a_call_that_would_make_one_with_more_time_late_is_rejected():
    """What waits has a second, and needs all of it: an urgent call ahead of it would break that promise."""
    function_f = function("f", {"gpu": {1: [10]}}, slo="30ms", scale="{ min = 1, max = 1 }", load="5ms")
    patient = load("f", rate=2_000, slo="1s", duration="0.2s", start="0.1s")
    urgent = load("f", rate=50, slo="40ms", start="0.4s")
    found = row(simulated(device(), function_f, patient, urgent, noise=0.0), "f")
    admitted = found.offered - sum(found.refused.values())
    assert admitted > 80 and found.in_time >= 0.98 * admitted


@pytest.mark.parametrize("goal", ["", "30s"])
def test_calls_that_can_wait_are_not_rejected_for_another_tenant(goal: str):
    """Calls of one tenant are rejected, as nothing could be done in 22 ms; the other's have all the time there is."""
    tenants = "".join(f'[[tenant]]\nname = "{name}"\nweight = 1\n' for name in ("desk", "farm"))
    alone, times = {"scale": "{ min = 1, max = 1 }", "load": "1ms"}, {"gpu": {1: [20]}}
    summary = simulated(
        device(),
        function("tight", times, slo="22ms", **alone),
        function("other", times, **alone),
        function("long", times, **alone, **({"slo": goal} if goal else {})),
        load("tight", rate=20, tenant="desk"),
        load("other", shape="closed", clients=1, tenant="desk"),
        load("long", rate=60, tenant="farm"),
        tenants,
    )
    assert row(summary, "tight").refused["deadline"] > 10
    assert "share" not in row(summary, "long").refused


def test_what_is_admitted_on_a_device_of_one_slice_is_kept():
    """Two functions ask for twice what there is: what waits of the other counts, what just came, and a call's own time."""
    parts = [device()]
    for name in ("left", "right"):
        parts += [function(name, {"gpu": {1: [10]}}, slo="20ms", scale="{ min = 1, max = 1 }", load="1ms")]
        parts += [load(name, rate=100, start="0.1s")]
    summary = simulated(*parts, seconds=3)
    admitted = sum(target.offered - sum(target.refused.values()) for target in summary.targets)
    assert admitted > 200 and sum(target.in_time for target in summary.targets) >= 0.99 * admitted


def test_a_call_with_a_goal_is_not_admitted_to_a_function_that_standing_ones_leave_no_room_for():
    """It used to be admitted as if it were loaded at once, and dropped when its time was over."""
    parts = (
        device(gib=4),
        function("stands", {"gpu": {1: [5]}}, memory="3GiB", slo="1s", scale="{ min = 1 }"),
        function("homeless", {"gpu": {1: [5]}}, memory="2GiB", slo="1s", scale="{ min = 0 }"),
        load("stands", rate=10),
        load("homeless", rate=10),
    )
    found = row(simulated(*parts), "homeless")
    assert found.refused == {"no-capacity": found.offered}


def test_an_instance_whose_fixed_slice_is_of_another_size_than_is_asked_for_now_is_replaced(script: Script):
    """Deployed anew with other terms while it has calls: on its slice no batch of it could run, and its calls waited for ever."""
    fixed = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(per_batch=False))
    script.given(a_function(share=0.25), devices=[fixed], policy=policies.build("frontier"), takes={"f": 10_000})
    [before] = script.controller.state.instances
    script.tell(Deployed((a_function(share=0.5),)))
    script.at(100_000).arrives("c", within_us=600_000_000)
    script.at(3_000_000)
    assert [action.instance for _, action in script.said if isinstance(action, Unload)] == [before]
    [after] = [action for _, action in script.said if isinstance(action, Load)][-1:]
    script.tell(InstanceReady(after.instance))
    assert [batch.jobs for batch in script.controller.state.batches.values()]
