"""Earliest deadline first, with admission."""

from __future__ import annotations

from collections import Counter

import pytest

from lamina.core.actions import FailCall, Reject, StartBatch
from lamina.core.events import BatchFailed, InstanceLost
from lamina.core.policy import View
from lamina.core.workflow.flow import Each, Flow, Task
from lamina.policies import edf
from lamina.sim.run import run
from lamina.types import DeviceSpec, QuotaSpec
from tests.policies.test_bandwidth import scenario
from tests.script import BIG_GPU, GPU, Script, a_function

MS = 1_000
TAKES = {"f": (2 * MS, 200)}
"""A fixed cost worth sharing: 2.2 ms for one job, 5.2 ms for sixteen."""


@pytest.fixture
def busy(script: Script) -> Script:
    """One slice, taken for the next 10 ms."""
    script.given(a_function(max_batch=4), policy=edf.Policy(margin=0.0), takes={"f": 10 * MS}, engine=True)
    script.at(0).arrives("first", within_us=900 * MS)
    return script


def test_the_most_urgent_goes_first(script: Script):
    script.given(a_function(), policy=edf.Policy(), takes={"f": 10 * MS}, engine=True)
    for name, within_us in {"running": 900, "booked": 800, "third": 700, "second": 500, "first": 300}.items():
        script.arrives(name, within_us=within_us * MS)
    script.at(100 * MS)
    assert script.served == [("running",), ("booked",), ("first",), ("second",), ("third",)]


def test_equal_deadlines_are_served_in_the_order_of_arrival(busy: Script):
    busy.arrives("x", "y", "z", within_us=500 * MS)
    busy.at(100 * MS)
    assert busy.served[-1] == ("x", "y", "z")


# ----------------------------------------------------------------------------------------------------- admission


def test_the_hopeless_is_refused_on_arrival_and_told_what_could_be_had(busy: Script):
    """The slice is free in 10 ms and a batch takes another 10."""
    assert busy.arrives("c", within_us=15 * MS) == [Reject("c", "deadline", retry_after_us=5 * MS, offer_us=20 * MS)]


def test_the_margin_of_admission_is_part_of_the_offer(busy: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(View, "admission_margin_us", lambda view, target: 6 * MS)
    assert busy.arrives("c", within_us=25 * MS) == [Reject("c", "deadline", retry_after_us=1 * MS, offer_us=26 * MS)]


def test_the_offer_keeps_its_word(busy: Script):
    [refusal] = busy.arrives("c", within_us=15 * MS)
    busy.arrives("d", within_us=refusal.offer_us)
    busy.at(100 * MS)
    assert busy.endings["d"].latency_us <= refusal.offer_us


def test_a_call_that_can_just_be_in_time_is_accepted(busy: Script):
    assert busy.arrives("c", within_us=20 * MS) == []
    busy.at(100 * MS)
    assert busy.ending("c") == "reply"


def test_a_margin_is_kept_for_predictions_that_err(script: Script):
    script.given(a_function(), policy=edf.Policy(margin=0.1), takes={"f": 10 * MS})
    assert script.at(0).arrives("c", within_us=10_999) == [Reject("c", "deadline", 1_000, 11 * MS)]


def test_a_call_that_asks_for_less_than_it_takes_alone_is_told_what_it_takes(busy: Script):
    """To try again would not help."""
    assert busy.arrives("c", within_us=9 * MS) == [Reject("c", "deadline", 11 * MS, 20 * MS, alone_us=10 * MS)]


def test_the_longer_the_queue_the_later_the_offer(script: Script):
    script.given(a_function(), policy=edf.Policy(margin=0.0), takes={"f": 10 * MS})
    script.at(0).arrives("running", within_us=900 * MS)
    offers = []
    for i in range(4):  # all that waits is due sooner, by a little
        [refusal] = script.arrives(f"hopeless-{i}", within_us=(16 + 10 * i) * MS)
        offers.append(refusal.offer_us)
        script.arrives(f"patient-{i}", within_us=(25 + 10 * i) * MS)
    assert offers == [20 * MS, 30 * MS, 40 * MS, 50 * MS]


def test_no_call_is_refused_while_nothing_is_known(script: Script):
    script.given(a_function(), policy=edf.Policy(), takes={})
    [start] = script.at(0).arrives("c", within_us=1)
    assert isinstance(start, StartBatch)


def test_a_call_no_device_can_ever_serve_is_refused(script: Script):
    cpu = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=4, memory_mib=1_000)
    script.given(a_function(gpu="must"), policy=edf.Policy(), devices=[cpu])
    assert script.at(0).arrives("c") == [Reject("c", "no-capacity")]


def test_a_call_of_a_function_larger_than_any_memory_is_refused(script: Script):
    script.given(a_function(memory_mib=GPU.memory_mib + 1), policy=edf.Policy())
    assert script.at(0).arrives("c") == [Reject("c", "no-capacity")]


def test_loading_counts_against_the_deadline(script: Script):
    script.given(a_function(), policy=edf.Policy(margin=0.0), takes={"f": 10 * MS}, loads={"f": 50 * MS}, warm=False)
    [refusal] = script.at(0).arrives("c", within_us=55 * MS)
    assert refusal == Reject("c", "deadline", retry_after_us=10 * MS, offer_us=65 * MS)  # a tenth longer than usual


def test_a_workflow_is_refused_if_its_longest_way_takes_too_long(script: Script):
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    takes = {"f": 10 * MS, "g": 20 * MS}
    script.given(a_function("f"), a_function("g"), flows=[flow], policy=edf.Policy(margin=0.0), takes=takes)
    assert script.at(0).arrives("no", target="w", within_us=29 * MS) == [
        Reject("no", "deadline", 1 * MS, 30 * MS, alone_us=30 * MS)
    ]


def test_a_workflow_with_an_unknown_step_is_accepted(script: Script):
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    script.given(a_function("f"), a_function("g"), flows=[flow], policy=edf.Policy(), takes={"f": 10 * MS})
    script.at(0).arrives("c", target="w", within_us=11 * MS)
    assert script.ending("c") == "open"


def test_the_usual_number_of_items_counts_when_a_map_is_admitted(script: Script):
    """Four items, one at a time: 40 ms."""
    body = Flow("body", {"x": Task("x", "f")}, ("x",))
    flow = Flow("w", {"e": Each("e", body, expected_items=4.0)}, ("e",))
    script.given(a_function("f"), flows=[flow], policy=edf.Policy(margin=0.0), takes={"f": 10 * MS})
    [refusal] = script.at(0).arrives("c", target="w", within_us=39 * MS)
    assert refusal.offer_us == 40 * MS


# ------------------------------------------------------------------------------------------------------ batching


def test_at_low_load_a_lone_call_never_waits_for_company(script: Script):
    script.given(a_function(max_batch=16), policy=edf.Policy(), takes=TAKES, engine=True)
    for i in range(5):
        [start] = script.at(i * 100 * MS).arrives(f"c{i}", within_us=50 * MS)
        assert isinstance(start, StartBatch)


def test_inside_a_burst_a_call_waits_for_company(script: Script):
    script.given(a_function(max_batch=16), policy=edf.Policy(), takes=TAKES, engine=True)
    for i in range(40):
        script.at(i * 200).arrives(f"c{i}", within_us=50 * MS)
    script.at(200 * MS)
    assert script.sizes[0] == 1
    assert min(script.sizes[1:-1]) > 4


def test_inside_a_burst_even_an_idle_slice_is_kept_waiting_for_one_gap_more(script: Script):
    script.given(a_function(max_batch=16), policy=edf.Policy(), takes={"f": (5 * MS, 10)}, warm=False)
    script.at(0).arrives("c1", within_us=500 * MS)
    script.at(100).arrives("c2", within_us=500 * MS)
    script.at(150).ready("f-1")
    assert script.batches == []
    script.at(200).arrives("c3", within_us=500 * MS)
    script.at(501)
    assert script.served == [("c1", "c2", "c3")]


def test_an_idle_slice_is_not_kept_waiting_past_the_point_where_it_would_cost_a_deadline(script: Script):
    """Three would take 5.03 of the 5.3 ms the first one has: at 270 us those who are there must go."""
    script.given(a_function(max_batch=16), policy=edf.Policy(margin=0.0), takes={"f": (5 * MS, 10)}, warm=False)
    script.at(0).arrives("c1", within_us=5_300)
    script.at(100).arrives("c2", within_us=500 * MS)
    script.at(150).ready("f-1")
    script.at(269)
    assert script.batches == []
    script.at(270)
    assert script.served == [("c1", "c2")]


def test_waiting_ends_when_the_burst_does(script: Script):
    """Three silent gaps after the last of it, what is there goes."""
    script.given(a_function(max_batch=16), policy=edf.Policy(), takes=TAKES, engine=True)
    for i in range(20):
        script.at(i * 100).arrives(f"c{i}", within_us=500 * MS)
    script.at(200 * MS)
    slowest_us = max(ending.latency_us for ending in script.endings.values())
    assert slowest_us < 2 * 5_200 + 3 * 1_000


def test_a_batch_is_closed_when_waiting_longer_would_cost_a_deadline(script: Script):
    """The next call is always about to come, and the first one still has to be answered in time."""
    script.given(a_function(max_batch=64), policy=edf.Policy(margin=0.0), takes={"f": (5 * MS, 1)}, engine=True)
    for i in range(100):
        script.at(i * 300).arrives(f"c{i}", within_us=15 * MS)
    script.at(500 * MS)
    assert {script.ending(f"c{i}") for i in range(100)} == {"reply"}
    assert not [ending for ending in script.endings.values() if ending.late]


def test_without_wait_it_starts_what_is_there(script: Script):
    script.given(a_function(max_batch=16), policy=edf.Policy(wait=False), takes=TAKES, engine=True)
    script.at(0).arrives("c1", within_us=50 * MS)
    script.at(3 * MS).arrives("c2", within_us=50 * MS)
    [start] = script.at(6 * MS).arrives("c3", within_us=50 * MS)
    assert isinstance(start, StartBatch)


def test_a_batch_is_no_larger_than_the_most_urgent_job_allows(script: Script):
    script.given(a_function(max_batch=16), policy=edf.Policy(margin=0.0), takes={"f": (0, 1 * MS)}, warm=False)
    script.at(0).arrives("hasty", within_us=30 * MS)
    script.arrives(*[f"c{i}" for i in range(15)], within_us=900 * MS)
    script.at(20 * MS).ready("f-1")
    assert script.sizes == [10]


# ------------------------------------------------------------------------------------------------------ overload


def test_a_head_that_cannot_be_saved_is_dropped_and_the_next_is_served(script: Script):
    """Loading took longer than predicted."""
    script.given(a_function(), policy=edf.Policy(margin=0.0), takes={"f": 10 * MS}, loads={"f": 5 * MS}, warm=False)
    script.at(0).arrives("head", within_us=25 * MS)
    script.arrives("next", within_us=30 * MS)
    script.at(16 * MS).ready("f-1")
    assert script.ending("head") == "deadline"
    assert script.served == [("next",)]


def test_under_overload_one_job_does_not_cost_many_others_their_place(script: Script):
    """Alone it could still be saved; the queue behind it is longer than a batch, and would pay for it."""
    script.given(a_function(max_batch=8), policy=edf.Policy(margin=0.0), takes={"f": (1 * MS, 1 * MS)}, warm=False)
    script.at(0).arrives("tight", within_us=12 * MS)
    script.arrives(*[f"c{i}" for i in range(10)], within_us=900 * MS)
    script.at(9 * MS).ready("f-1")
    assert script.ending("tight") == "deadline"
    assert script.sizes == [8]


def test_without_overload_the_same_job_is_saved(script: Script):
    script.given(a_function(max_batch=8), policy=edf.Policy(margin=0.0), takes={"f": (1 * MS, 1 * MS)}, warm=False)
    script.at(0).arrives("tight", within_us=12 * MS)
    script.arrives(*[f"c{i}" for i in range(4)], within_us=900 * MS)
    script.at(9 * MS).ready("f-1")
    assert script.served[0] == ("tight", "c0")


@pytest.mark.slow
def test_at_ten_times_the_capacity_what_is_accepted_is_served_in_time(script: Script):
    script.given(a_function(max_batch=8), policy=edf.Policy(), takes={"f": (2 * MS, 500)}, engine=True)
    for i in range(4_000):
        script.at(i * 75).arrives(f"c{i}", within_us=30 * MS)
    script.at(10**6)
    words = [script.ending(f"c{i}") for i in range(4_000)]
    capacity = 4_000 * 75 / 6_000 * 8
    assert words.count("reply") > 0.9 * capacity
    assert not script.all(FailCall)


# ------------------------------------------------------------------------------------------------- other promises


def test_jobs_of_a_deadly_batch_come_back_in_smaller_company(script: Script):
    script.given(a_function(max_batch=8), policy=edf.Policy(), takes={"f": 1 * MS}, warm=False, engine=True)
    script.fate = lambda batch: InstanceLost(batch.instance) if len(batch.jobs) > 2 else script._finish(batch)
    script.arrives(*"abcdefgh", within_us=9_000 * MS)
    script.at(9_000 * MS)
    # what was booked behind a deadly batch comes back as it was: it has harmed nobody yet
    assert script.sizes == [8, 4, 4, 2, 2, 4, 2, 2]
    assert {script.ending(name) for name in "abcdefgh"} == {"reply"}


def test_a_batch_too_big_for_the_memory_is_halved_without_losing_a_call(script: Script):
    script.given(a_function(max_batch=8), policy=edf.Policy(), takes={"f": 1 * MS}, warm=False, engine=True)
    script.fate = lambda b: BatchFailed(b.batch_id, "out-of-memory") if len(b.jobs) > 4 else script._finish(b)
    script.arrives(*"abcdefgh", within_us=9_000 * MS)
    script.at(9_000 * MS)
    assert script.sizes == [8, 4, 4]
    assert {script.ending(name) for name in "abcdefgh"} == {"reply"}


def test_a_quota_in_debt_holds_the_function_until_it_is_earned_back(script: Script):
    quota = QuotaSpec(limit=0.5, window_us=10 * MS)
    script.given(a_function(quota=quota), policy=edf.Policy(), takes={}, devices=[GPU])
    script.at(0).arrives("c1", "c2")
    script.finishes(took_us=20 * MS)
    script.finishes(took_us=20 * MS)
    assert script.arrives("c3") == []
    # 5 ms saved, 40 ms used: 35 ms of debt at half a millisecond per millisecond
    script.at(70 * MS)
    assert script.sizes == [1, 1]
    script.at(70 * MS + 2)
    assert script.sizes == [1, 1, 1]


def test_the_most_urgent_function_gets_the_free_slice(script: Script):
    script.given(a_function("f"), a_function("g"), policy=edf.Policy(), takes={"f": 10 * MS, "g": 10 * MS})
    script.at(0).arrives("running", target="f", within_us=900 * MS)
    script.arrives("calm", target="f", within_us=800 * MS)
    script.arrives("hasty", target="g", within_us=100 * MS)
    script.at(10 * MS).finishes()
    assert script.running[0].function == "f"


def test_many_slices_are_filled_at_once(script: Script):
    script.given(a_function(share=0.25), policy=edf.Policy(), takes={"f": 5 * MS}, devices=[BIG_GPU], warm=False)
    script.at(0).arrives(*"abcdef", within_us=900 * MS)
    script.ready("f-1")
    assert len(script.running) == 4


def test_a_function_that_is_late_behind_a_batch_is_not_asked_about_again_and_again():
    events: Counter[str] = Counter()
    run(scenario("edf"), watch=lambda now_us, event, actions: events.update([type(event).__name__]))
    assert events["Tick"] < events["CallArrived"]
