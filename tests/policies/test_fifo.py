"""First come, first served."""

from __future__ import annotations

import pytest

from lamina.core.actions import FailCall, StartBatch
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.types import DeviceSpec, SliceLimits
from tests.script import BIG_GPU, Script, a_function

MS = 1_000


def test_a_lone_call_starts_at_once(script: Script):
    script.given(a_function(max_batch=8), takes={"f": 5 * MS})
    [start] = script.at(10).arrives("c1")
    assert isinstance(start, StartBatch)
    assert start.behind == 0


def test_calls_are_served_in_the_order_they_came(script: Script):
    script.given(a_function(), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives("c1", "c2", "c3", "c4")
    script.at(100 * MS)
    assert script.served == [("c1",), ("c2",), ("c3",), ("c4",)]


def test_order_is_by_arrival_even_if_a_later_call_is_more_urgent(script: Script):
    script.given(a_function(), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives("first")
    script.arrives("patient", within_us=900 * MS)
    script.arrives("urgent", within_us=50 * MS)
    script.at(100 * MS)
    assert script.served == [("first",), ("patient",), ("urgent",)]


def test_a_batch_takes_all_that_wait_up_to_its_size(script: Script):
    script.given(a_function(max_batch=4), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives(*"abcdefg")
    script.at(100 * MS)
    assert script.sizes == [1, 4, 2]


def test_a_full_batch_is_booked_at_once(script: Script):
    script.given(a_function(max_batch=2), takes={"f": 5 * MS})
    script.at(0).arrives("c1")
    assert script.arrives("c2") == []
    [booked] = script.arrives("c3")
    assert isinstance(booked, StartBatch)
    assert booked.behind == script.batches[0].batch_id


def test_a_batch_that_could_still_grow_is_booked_only_just_before_the_slice_is_free(script: Script):
    script.given(a_function(max_batch=4), takes={"f": 5 * MS})
    script.at(0).arrives("c1", "c2")
    script.at(4_899)
    assert script.sizes == [1]
    script.at(4_900)
    assert script.served == [("c1",), ("c2",)]


def test_one_batch_is_booked_and_no_second_behind_it(script: Script):
    script.given(a_function(), takes={"f": 5 * MS})
    script.at(0).arrives("c1", "c2", "c3")
    assert script.sizes == [1, 1]


def test_a_call_that_cannot_be_in_time_any_more_is_let_go(script: Script):
    script.given(a_function(), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives("c1")
    script.arrives("late", within_us=7 * MS)
    script.at(100 * MS)
    assert script.ending("late") == "deadline"
    assert script.sizes == [1]


def test_what_is_let_go_gives_its_place_to_the_next(script: Script):
    script.given(a_function(), takes={"f": 5 * MS})
    script.at(0).arrives("c1")
    script.arrives("late", within_us=7 * MS)
    script.arrives("next")
    assert script.served == [("c1",), ("next",)]


def test_calls_that_cannot_all_be_in_time_together_go_in_smaller_batches(script: Script):
    """Sixteen together take longer than any of them has; eight do not."""
    script.given(a_function(max_batch=16), takes={"f": (0, 1 * MS)}, warm=False)
    script.at(0).arrives(*[f"c{i}" for i in range(16)], within_us=10 * MS)
    script.ready("f-1")
    assert script.sizes == [10]
    assert script.all(FailCall) == []


def test_a_call_with_less_time_than_the_first_is_not_taken_along_too_late(script: Script):
    script.given(a_function(max_batch=4), takes={"f": (0, 2 * MS)}, warm=False)
    script.at(0).arrives("calm")
    script.arrives("hasty", within_us=3 * MS)
    script.ready("f-1")
    assert script.served[0] == ("calm",)


def test_every_free_slice_is_used_at_once_where_an_instance_may_run_many_batches(script: Script):
    script.given(a_function(share=0.25), takes={"f": 5 * MS}, devices=[BIG_GPU])
    script.at(0).arrives(*"abcdef")
    assert [batch.mask for batch in script.running] == [0b11, 0b1100, 0b110000, 0b11000000]


def test_an_instance_runs_as_many_batches_at_once_as_its_device_says(script: Script):
    two = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=9, limits=SliceLimits(batches_per_instance=2))
    script.given(a_function(share=0.125), takes={"f": 5 * MS}, devices=[two])
    script.at(0).arrives(*"abcdef")
    assert len(script.running) == 2


# ------------------------------------------------------------------------ over all functions

TWO_EQUAL = """
[scenario]
seed = 1
duration = "4s"
noise = 0.0
[[device]]
kind = "h200"
units = 1
{functions}
{loads}
"""
EQUAL = """
[[function]]
name = "{name}"
share = "100%"
memory = "1GiB"
load = "10ms"
scale = {{ min = 1, max = 1 }}
profile.h200 = {{ batch = [1], p50_ms = {{ 1 = [10] }} }}
"""


def mean_ms(first: str, second: str) -> dict[str, float]:
    """Mean latency of two equal functions at twice what the device can do, declared in this order."""
    functions = "".join(EQUAL.format(name=name) for name in (first, second))
    loads = "".join(f'[[load]]\ntarget = "{name}"\nrate = 100\nstart = "1s"\n' for name in "ab")
    summary = run(scenario.parse(TWO_EQUAL.format(functions=functions, loads=loads)), "fifo")
    return {row.target: row.mean_ms for row in summary.targets}


def test_functions_are_served_by_arrival_in_whichever_order_they_were_declared():
    means = mean_ms("a", "b")
    assert means == mean_ms("b", "a")
    assert means["a"] == pytest.approx(means["b"], rel=0.2)


def test_after_a_batch_the_function_that_has_waited_longest_is_next(script: Script):
    """Both wait with several batches; on a free device they take turns, job by job, not queue by queue."""
    script.given(a_function("f"), a_function("g"), takes={"f": 5 * MS, "g": 5 * MS}, engine=True)
    script.at(0).arrives("f0")
    for number in range(1, 4):
        script.arrives(f"g{number}", target="g")
        script.arrives(f"f{number}")
    script.at(100 * MS)
    assert [name for (name,) in script.served] == ["f0", "g1", "f1", "g2", "f2", "g3", "f3"]


def test_a_full_batch_is_not_booked_past_an_older_job(script: Script):
    script.given(a_function("f", max_batch=2), a_function("g", max_batch=2), takes={"f": 5 * MS, "g": 5 * MS}, engine=True)
    script.at(0).arrives("f0")
    script.at(1 * MS).arrives("older", target="g")
    script.at(2 * MS).arrives("f1", "f2")
    script.at(100 * MS)
    assert script.served == [("f0",), ("older",), ("f1", "f2")]
