"""Registry of calls: a call is in one place until it ends, and it ends once."""

from __future__ import annotations

import pytest

from lamina.core.actions import DropJob, FailCall, Load, Reject, Reply, StartBatch, WakeAt
from lamina.core.events import BatchFinished, CallCancelled, Deployed, DeviceJoined, InstanceLost, JobOutcome
from lamina.core.scheduling.jobs import DEADLINE_GRACE_US
from lamina.core.workflow.flow import Flow, Task
from lamina.errors import BadFlow
from lamina.types import NEVER_US, DeviceSpec
from tests.script import GPU, Script, a_function

MS = 1_000


def test_an_unknown_target_is_refused(script: Script):
    script.given(a_function())
    assert script.arrives("c1", target="nobody") == [Reject("c1", "unknown")]


def test_a_name_that_is_in_use_is_refused_and_the_first_call_goes_on(script: Script):
    script.given(a_function())
    script.arrives("c1")
    assert script.arrives("c1") == [Reject("c1", "duplicate")]
    assert isinstance(script.finishes()[0], Reply)


def test_a_name_may_be_used_again_once_its_call_has_ended(script: Script):
    script.given(a_function())
    script.arrives("c1")
    script.finishes()
    assert isinstance(script.arrives("c1")[0], StartBatch)


def test_a_full_queue_refuses_and_says_when_to_come_back(script: Script):
    script.given(a_function(max_queue=2), devices=[])
    script.arrives("c1", "c2")
    why = "f has 2 jobs waiting, which is its limit (max_queue)"
    assert script.arrives("c3") == [Reject("c3", "queue-full", retry_after_us=1_000_000, why=why)]


def test_a_workflow_is_refused_if_any_of_its_queues_is_full(script: Script):
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    script.given(a_function("f"), a_function("g", max_queue=1), flows=[flow], devices=[])
    script.arrives("c1", target="g")
    assert script.arrives("c2", target="w")[0].reason == "queue-full"


def test_an_answer_says_what_it_cost_and_where_it_ran(script: Script):
    device = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=10, price_per_s=8.0)
    script.given(a_function(max_batch=2, share=0.5), devices=[device], takes={"f": 5 * MS}, warm=False)
    script.at(1 * MS).arrives("c1", "c2", within_us=30 * MS)
    script.at(11 * MS).ready("f-1")
    [first, _] = script.at(21 * MS).finishes(took_us=8 * MS)
    assert first == Reply(
        "c1",
        latency_us=20 * MS,
        late=False,
        queue_us=10 * MS,
        batch=2,
        slice="gpu0/0-1",
        cost=pytest.approx(8.0 * 0.5 * 0.008 / 2),
        cold_us=10 * MS,
        retries=0,
    )


def test_an_answer_after_the_goal_is_late(script: Script):
    script.given(a_function())
    script.at(0).arrives("c1", within_us=5 * MS, expires_us=100 * MS)
    [reply] = script.at(6 * MS).finishes()
    assert reply.late


def test_a_job_that_raised_fails_its_own_call_only(script: Script):
    script.given(a_function(max_batch=2), warm=False)
    script.arrives("good", "bad")
    script.ready("f-1")
    script.finishes(outcomes=(JobOutcome(), JobOutcome(False, "function-failed")))
    assert script.ending("good") == "reply"
    assert script.endings["bad"] == FailCall("bad", "function-failed", "f", 2)


def test_measured_time_reaches_the_predictor(script: Script):
    script.given(a_function(max_batch=2), warm=False)
    script.arrives("c1", "c2")
    script.ready("f-1", load_us=700)
    script.finishes(took_us=4_321)
    assert script.predictor.seen == [("f", 0, 700), ("f", 2, 4_321)]


# ------------------------------------------------------------------------------------------------- expiry, cancel


def test_a_call_that_no_device_can_serve_ends_a_grace_after_its_time(script: Script):
    script.given(a_function(), devices=[])
    script.at(0).arrives("c1", within_us=50 * MS)
    script.at(50 * MS + DEADLINE_GRACE_US - 1)
    assert script.ending("c1") == "open"
    script.at(50 * MS + DEADLINE_GRACE_US)
    assert script.ending("c1") == "deadline"


def test_an_answer_inside_the_grace_is_still_delivered(script: Script):
    script.given(a_function())
    script.at(0).arrives("c1", within_us=50 * MS)
    [reply] = script.at(50 * MS + DEADLINE_GRACE_US - 1).finishes()
    assert isinstance(reply, Reply)
    assert reply.late


def test_a_running_job_past_its_grace_is_not_waited_for_and_its_slice_stays_leased(script: Script):
    script.given(a_function())
    script.at(0).arrives("c1", within_us=50 * MS)
    script.at(500 * MS)
    assert script.ending("c1") == "deadline"
    assert script.controller.state.devices["gpu0"].busy == 1
    assert script.finishes() == []
    assert script.controller.state.devices["gpu0"].busy == 0


def test_cancelling_a_waiting_call_takes_its_job_out_of_the_queue(script: Script):
    script.given(a_function())
    script.arrives("c1", "c2", "c3")
    assert script.tell(CallCancelled("c3")) == [DropJob(3), FailCall("c3", "cancelled")]
    script.finishes()
    script.finishes()
    assert script.served == [("c1",), ("c2",)]


def test_cancelling_a_running_call_drops_its_result(script: Script):
    script.given(a_function())
    script.arrives("c1")
    assert script.tell(CallCancelled("c1")) == [DropJob(1), FailCall("c1", "cancelled")]
    assert script.finishes() == []


def test_cancelling_twice_or_after_the_end_does_nothing(script: Script):
    script.given(a_function())
    script.arrives("c1")
    script.tell(CallCancelled("c1"))
    assert script.tell(CallCancelled("c1")) == []
    assert script.tell(CallCancelled("never")) == []


# ------------------------------------------------------------------------------------------ what comes back twice


def test_a_result_delivered_twice_is_one_answer(script: Script):
    script.given(a_function())
    script.arrives("c1")
    batch_id = script.batches[0].batch_id
    script.finishes()
    assert script.tell(BatchFinished(batch_id, 1_000)) == []


def test_a_result_after_the_crash_was_reported_does_nothing(script: Script):
    script.given(a_function())
    script.arrives("c1")
    script.loses("f-1")
    assert script.tell(BatchFinished(script.batches[0].batch_id, 1_000)) == []
    assert script.ending("c1") == "open"


def test_a_result_for_a_batch_that_was_never_started_does_nothing(script: Script):
    script.given(a_function())
    assert script.tell(BatchFinished(77, 1_000)) == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_that_returns_a_wrong_number_of_results_answers_no_call(script: Script, count: int):
    """Better no result than that of another call."""
    script.given(a_function(max_batch=2), warm=False)
    script.arrives("c1", "c2")
    script.ready("f-1")
    script.finishes(outcomes=(JobOutcome(),) * count)
    assert {script.ending("c1"), script.ending("c2")} == {"bad-result"}


def test_the_same_loss_reported_twice_counts_once(script: Script):
    script.given(a_function())
    script.loses("f-1")
    assert script.tell(InstanceLost("f-1")) == []
    assert script.controller.state.functions["f"].consecutive_crashes == 1


# ----------------------------------------------------------------------------------------------------- deployment


def test_a_function_may_be_redeployed_with_work_in_its_queue(script: Script):
    script.given(a_function(), devices=[])
    script.arrives("c1", "c2", "c3")
    script.tell(Deployed((a_function(max_batch=4),)))
    script.tell(DeviceJoined(GPU))
    script.ready("f-1")
    assert script.sizes == [3]


def test_a_redeployed_function_that_was_put_off_is_asked_about_again(script: Script):
    """Booked late because a batch of eight could still grow; a batch of two is full now."""
    script.given(a_function(max_batch=8), takes={"f": 50 * MS})
    script.at(0).arrives("c1", "c2", "c3")
    assert script.sizes == [1]
    script.tell(Deployed((a_function(max_batch=2),)))
    assert script.sizes == [1, 2]


def test_a_workflow_of_unknown_functions_is_refused_and_nothing_of_it_is_kept(script: Script):
    script.given(a_function())
    flow = Flow("w", {"a": Task("a", "nobody")}, ("a",))
    with pytest.raises(BadFlow, match="nobody"):
        script.tell(Deployed((a_function("g"),), (flow,)))
    assert set(script.controller.state.functions) == {"f"}


def test_a_function_and_a_workflow_cannot_share_a_name(script: Script):
    script.given(a_function())
    with pytest.raises(BadFlow, match="'f' is a function and a workflow"):
        script.tell(Deployed((), (Flow("f", {"a": Task("a", "f")}, ("a",)),)))


def test_a_function_cannot_take_the_name_of_a_workflow(script: Script):
    script.given(a_function(), flows=[Flow("w", {"a": Task("a", "f")}, ("a",))])
    with pytest.raises(BadFlow, match="'w' is a workflow already"):
        script.tell(Deployed((a_function("w"),)))


def test_a_job_waits_for_the_load_and_not_for_the_next_period(script: Script):
    script.given(a_function(), warm=False)
    script.at(5)
    assert [type(action) for action in script.arrives("c1")] == [Load]


def test_a_call_without_a_goal_is_never_late(script: Script):
    script.given(a_function())
    script.arrives("c1")
    assert script.ledger.open["c1"].deadline_us == NEVER_US
    [reply] = script.at(30_000 * MS).finishes()
    assert not reply.late


def test_there_is_always_a_tick_on_its_way(script: Script):
    script.given(a_function(), devices=[])
    assert script.all(WakeAt)
