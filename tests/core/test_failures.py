"""Failures of workers, devices and loads, and what is retried."""

from __future__ import annotations

import math

import pytest

from lamina.core.actions import DropJob, FailCall, Kill, Load, Unload
from lamina.core.events import (
    BatchFailed,
    BatchFinished,
    CallCancelled,
    DeviceJoined,
    DeviceLost,
    Heartbeat,
    InstanceLost,
    JobOutcome,
)
from lamina.core.scheduling.failures import BACKOFF_US, LOAD_TIMEOUT_US, MAX_CRASHES, MAX_STALE_READS
from lamina.policies import edf, fifo
from lamina.types import DeviceSpec, SliceLimits, Slo
from tests.script import BIG_GPU, GPU, Script, a_function

MS = 1_000
S = 1_000_000
TWO_UNITS = DeviceSpec(id="gpu0", kind="gpu", units=2, memory_mib=1_000)
CORES = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=9_000)


def deadly(script: Script, *names: str):
    """A worker dies at the end of every batch that holds one of these calls."""

    def fate(batch):
        kills = any(job.call_id in names for job in batch.jobs)
        return InstanceLost(batch.instance) if kills else script._finish(batch)

    return fate


# --------------------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize("policy", [fifo.Policy(), edf.Policy()], ids=["fifo", "edf"])
@pytest.mark.parametrize("poison", range(16))
def test_a_deadly_job_is_found_in_few_crashes_and_fails_alone(script: Script, policy, poison: int):
    script.given(a_function(max_batch=16), policy=policy, takes={"f": 1 * MS}, warm=False, engine=True)
    script.fate = deadly(script, f"c{poison}")
    names = [f"c{i}" for i in range(16)]
    script.at(0).arrives(*names, within_us=60 * S)
    script.at(60 * S)
    crashes = len(script.all(Load)) - 1
    assert crashes <= math.log2(16) + 2
    assert {name: script.ending(name) for name in names} == {
        name: "worker-lost" if name == f"c{poison}" else "reply" for name in names
    }


def test_what_was_booked_behind_a_deadly_batch_is_not_blamed_for_it(script: Script):
    """One job at a time: the innocent is booked behind the poison every time it kills."""
    script.given(a_function(), takes={"f": 1 * MS}, engine=True)
    script.fate = deadly(script, "poison")
    script.at(0).arrives("poison", "innocent", within_us=60 * S)
    script.at(60 * S)
    assert script.ending("poison") == "worker-lost"
    assert script.endings["innocent"].retries == 0


def test_what_was_only_booked_may_run_even_if_it_must_not_run_twice(script: Script):
    script.given(a_function(idempotent=False), takes={"f": 1 * MS}, engine=True)
    script.fate = deadly(script, "poison")
    script.at(0).arrives("poison", "innocent", within_us=60 * S)
    script.at(60 * S)
    assert script.ending("poison") == "worker-lost"
    assert script.ending("innocent") == "reply"


@pytest.mark.parametrize("policy", [fifo.Policy(), edf.Policy()], ids=["fifo", "edf"])
def test_jobs_that_ran_beside_a_deadly_one_are_not_blamed_for_it(script: Script, policy):
    """One worker, many slices: when it dies it is not known which job it was, so they are tried one at a time."""
    takes = {"f": lambda batch, units: 1 * MS}
    script.given(a_function(share=0.25), policy=policy, devices=[BIG_GPU], takes=takes, warm=False, engine=True)
    script.fate = deadly(script, "c2")
    names = [f"c{i}" for i in range(6)]
    script.at(0).arrives(*names, within_us=60 * S)
    script.at(60 * S)
    assert {name: script.ending(name) for name in names} == {name: "worker-lost" if name == "c2" else "reply" for name in names}
    assert len(script.all(Load)) - 1 <= 3


def test_after_all_suspects_have_been_tried_slices_are_used_side_by_side_again(script: Script):
    script.given(a_function(share=0.25), devices=[BIG_GPU], takes={"f": 1 * MS}, warm=False, engine=True)
    script.fate = deadly(script, "c2")
    script.at(0).arrives(*[f"c{i}" for i in range(6)], within_us=60 * S)
    script.at(60 * S).arrives(*[f"d{i}" for i in range(6)])
    assert len(script.running) == 4


def test_a_single_job_gets_a_second_chance(script: Script):
    script.given(a_function(), takes={"f": 1 * MS}, engine=True)
    script.at(0)
    script.fate = lambda batch: InstanceLost(batch.instance) if batch.batch_id == 1 else script._finish(batch)
    script.arrives("c1", within_us=60 * S)
    script.at(10 * S)
    assert script.endings["c1"].retries == 1


def test_a_job_that_must_not_run_twice_fails_with_its_worker(script: Script):
    script.given(a_function(idempotent=False))
    script.arrives("c1")
    assert FailCall("c1", "worker-lost", "f", 1) in script.loses("f-1")


def test_a_retry_that_could_not_be_in_time_is_not_tried(script: Script):
    script.given(a_function(), takes={"f": 10 * MS})
    script.at(0).arrives("c1", within_us=15 * MS)
    assert FailCall("c1", "deadline", "f", 1) in script.at(6 * MS).loses("f-1")


def test_a_retry_that_can_be_in_time_is_tried(script: Script):
    script.given(a_function(), takes={"f": 10 * MS})
    script.at(0).arrives("c1", within_us=15 * MS)
    script.at(5 * MS).loses("f-1")
    assert script.ending("c1") == "open"


def test_a_failed_batch_leaves_its_instance_alive(script: Script):
    script.given(a_function(max_batch=4), warm=False)
    script.arrives(*"abcd")
    script.ready("f-1")
    script.tell(BatchFailed(1, "out-of-memory"))
    assert script.sizes == [4, 2, 2]
    assert {batch.instance for batch in script.batches} == {"f-1"}


def test_outcomes_of_which_it_is_not_known_whose_they_are_are_no_answer_to_any_call(script: Script):
    script.given(a_function(max_batch=4), warm=False)
    script.arrives("a", "b")
    script.ready("f-1")
    script.finishes(1, outcomes=(JobOutcome(),))
    assert [script.ending(name) for name in "ab"] == ["bad-result", "bad-result"]


def test_a_job_that_fails_alone_twice_fails_with_the_reason(script: Script):
    script.given(a_function())
    script.arrives("c1")
    script.tell(BatchFailed(1, "out-of-memory"))
    assert FailCall("c1", "out-of-memory", "f", 1) in script.tell(BatchFailed(2, "out-of-memory"))


# --------------------------------------------------------------------------------------- who is behind whom, and dies


def crowded(script: Script) -> Script:
    """Two functions share one unit: `g` is booked behind `f`."""
    script.given(a_function("f"), a_function("g"), takes={"f": 5 * MS, "g": 5 * MS})
    script.at(0).arrives("cf", target="f")
    script.arrives("cg", target="g")
    assert [batch.behind for batch in script.batches] == [0, 1]
    return script


def test_a_booked_batch_of_another_instance_begins_when_the_one_before_it_is_lost(script: Script):
    crowded(script).loses("f-1")
    assert [batch.instance for batch in script.running] == ["g-1"]
    assert script.controller.state.devices["gpu0"].running == {2: 1}


def test_a_booked_batch_whose_instance_is_lost_goes_back_to_its_queue(script: Script):
    crowded(script).loses("g-1")
    assert len(script.controller.state.functions["g"].queue) == 1
    script.finishes()
    assert script.controller.state.devices["gpu0"].busy == 0


def test_nothing_is_begun_on_an_instance_that_is_being_lost(script: Script):
    script.given(a_function(), takes={"f": 5 * MS})
    script.arrives("c1", "c2")
    script.loses("f-1")
    assert script.controller.state.devices["gpu0"].busy == 0
    assert not script.controller.state.batches


def test_an_instance_does_not_run_more_at_once_because_it_booked_behind_others(script: Script):
    """`g` is booked behind `f`; when the other unit falls free, its one batch is promised already."""
    functions = [a_function(name, share=0.5) for name in "fgh"]
    script.given(*functions, devices=[TWO_UNITS], takes={"f": 5 * MS, "g": 5 * MS, "h": 9 * MS})
    script.at(0).arrives("f1", target="f")
    script.arrives("h1", target="h")
    script.arrives("g1", "g2", target="g")
    assert [batch.behind for batch in script.batches] == [0, 0, 1]
    script.finishes(2)
    assert [batch.function for batch in script.running] == ["f"]
    script.finishes(1)
    assert [batch.function for batch in script.running] == ["g"]


def test_a_lost_device_takes_its_work_along_and_another_one_serves_it(script: Script):
    script.given(a_function(max_batch=2), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives("c1", "c2", "c3", within_us=60 * S)
    script.at(1 * MS).tell(DeviceLost("gpu0"))
    script.tell(DeviceJoined(DeviceSpec(id="gpu1", kind="gpu", units=1, memory_mib=1_000)))
    script.at(10 * S)
    assert {script.ending(name) for name in ("c1", "c2", "c3")} == {"reply"}
    assert {batch.device for batch in script.batches[-2:]} == {"gpu1"}


def test_losing_a_device_with_batches_booked_across_instances_blames_only_what_ran(script: Script):
    crowded(script).tell(DeviceLost("gpu0"))
    runs = script.controller.state.runs
    assert (runs["cf"].retries, runs["cg"].retries) == (1, 0)


def test_an_instance_lost_while_it_drains_is_not_unloaded_as_well(script: Script):
    script.given(a_function(), takes={"f": 5 * MS})
    script.at(0).arrives("c1")
    script.at(20 * S)  # hung: it is being killed, and gets no more work
    said = script.loses("f-1", "hung")
    assert not [action for action in said if isinstance(action, Unload)]


def test_an_instance_lost_while_loading_leaves_its_calls_waiting(script: Script):
    script.given(a_function(), warm=False)
    script.arrives("c1")
    script.loses("f-1")
    assert script.ending("c1") == "open"
    assert [load.instance for _, load in script.all(Load)] == ["f-1", "f-2"]


# ----------------------------------------------------------------------------------------------------- crash loops


def test_loads_that_die_are_tried_again_with_growing_pauses(script: Script):
    script.given(a_function(), warm=False, devices=[GPU])
    script.at(0).arrives("c1")
    for number in range(1, MAX_CRASHES):
        script.loses(f"f-{number}")
        script.at(script.now_us + 2 * S)
    at_us = [at for at, _ in script.all(Load)]
    pauses = [later - lost for lost, later in zip([0, 2 * S, 4 * S, 6 * S], at_us[1:], strict=False)]
    assert pauses == list(BACKOFF_US[: MAX_CRASHES - 1])


def test_after_five_loads_that_died_the_calls_that_wait_are_failed(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1", "c2")
    for number in range(1, MAX_CRASHES + 1):
        assert script.ending("c1") == "open"
        script.loses(f"f-{number}")
        script.at(script.now_us + 2 * S)
    assert {script.ending("c1"), script.ending("c2")} == {"load-failed"}


def test_a_load_that_fails_by_itself_is_tried_once_more_and_then_its_callers_are_told(script: Script):
    """A download may fail and a memory peak pass; a constructor that raises twice will do so again."""
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1", "c2")
    script.at(2 * S).loses("f-1", "load-failed")
    assert script.ending("c1") == "open" and [at_us for at_us, _ in script.all(Load)] == [0, 2 * S]
    script.at(4 * S).loses("f-2", "load-failed")
    assert {script.ending("c1"), script.ending("c2")} == {"load-failed"}


def test_one_whose_time_is_over_before_another_load_could_end_is_told_at_once(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("short", within_us=3 * S)
    script.arrives("long", within_us=60 * S)
    script.at(2 * S).loses("f-1", "load-failed")
    assert (script.ending("short"), script.ending("long")) == ("load-failed", "open")


def test_while_no_load_is_due_of_one_that_keeps_failing_callers_are_told_on_arrival(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1")
    script.loses("f-1", "load-failed")
    script.at(1 * S).loses("f-2", "load-failed")
    script.arrives("c2")
    assert script.ending("c2") == "load-failed"
    script.at(2 * S).arrives("c3")  # the next one is due
    assert script.ending("c3") == "open" and len(script.all(Load)) == 3
    script.ready("f-3")
    script.finishes()
    assert script.ending("c3") == "reply"


def test_a_worker_that_is_killed_while_it_loads_is_no_failure_of_the_function(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1")
    for number in (1, 2, 3):
        script.at(number * S).loses(f"f-{number}", "worker-lost")
    assert script.ending("c1") == "open"


def test_a_function_that_could_not_be_loaded_gets_another_chance_later(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1")
    for number in range(1, MAX_CRASHES + 1):
        script.loses(f"f-{number}")
        script.at(script.now_us + 2 * S)
    script.arrives("c2")
    script.at(script.now_us + 1)
    script.ready(f"f-{MAX_CRASHES + 1}")
    script.finishes()
    assert script.ending("c2") == "reply"
    assert script.controller.state.functions["f"].consecutive_crashes == 0


def test_a_crash_loop_does_not_stop_its_neighbour(script: Script):
    script.given(a_function("f", share=0.5), a_function("g", share=0.5), devices=[TWO_UNITS], warm=False)
    script.at(0).arrives("bad", target="f")
    script.arrives("good", target="g")
    for number in range(1, MAX_CRASHES + 1):
        script.loses(f"f-{number}")
        script.at(script.now_us + 2 * S)
    script.ready("g-1")
    script.finishes()
    assert script.ending("good") == "reply"


def test_a_finished_batch_ends_the_row_of_crashes(script: Script):
    script.given(a_function())
    script.loses("f-1")
    script.ready("f-2")
    script.arrives("c1")
    script.finishes()
    assert script.controller.state.functions["f"].consecutive_crashes == 0


# ----------------------------------------------------------------------------------------------------------- hangs


def test_a_batch_that_hangs_has_its_instance_killed_once(script: Script):
    script.given(a_function(), takes={"f": 10 * MS})
    script.at(0).arrives("c1")
    script.at(4_900 * MS)
    assert script.all(Kill) == []
    script.at(60 * S)
    [(at_us, kill)] = script.all(Kill)
    assert kill == Kill("f-1", "hung")
    assert 5 * S <= at_us <= 6 * S


@pytest.mark.parametrize("alive_only", [False, True])
def test_a_batch_that_is_heard_of_does_not_hang(script: Script, alive_only: bool):
    script.given(a_function(), takes={"f": 10 * MS})
    script.at(0).arrives("c1")
    [batch] = script.running
    for second in range(1, 20):
        script.at(second * S).tell(Heartbeat("c1", batch.jobs[0].id, alive_only))
    assert script.all(Kill) == []
    script.at(60 * S)
    [(at_us, _)] = script.all(Kill)
    assert 24 * S <= at_us <= 25 * S  # five seconds of silence


def test_a_slow_function_is_given_five_times_its_time(script: Script):
    script.given(a_function(), takes={"f": 2 * S})
    script.at(0).arrives("c1")
    script.at(9_900 * MS)
    assert script.all(Kill) == []
    script.at(11 * S)
    assert len(script.all(Kill)) == 1


def test_a_function_without_a_prediction_is_given_a_minute(script: Script):
    script.given(a_function())
    script.at(0).arrives("c1")
    script.at(59 * S)
    assert script.all(Kill) == []
    script.at(61 * S)
    assert len(script.all(Kill)) == 1


def test_the_first_batch_of_an_instance_on_cores_is_given_a_minute(script: Script):
    """A function that sets itself up in its first call for longer than a batch may be silent was killed in it, and in the next
    instance again: it was served until its first instance ended, and never after."""
    script.given(a_function(gpu="no", slo=Slo(latency_us=100 * MS)), takes={"f": 10 * MS}, devices=[CORES])
    script.at(0).arrives("c1")
    script.at(7 * S).finishes(took_us=7 * S)
    script.at(8 * S).arrives("c2")
    script.at(12 * S)
    assert script.ending("c1") == "reply" and script.all(Kill) == []
    script.at(14 * S)  # the second is known, and has five seconds
    assert [kill for _, kill in script.all(Kill)] == [Kill("f-1", "hung")]


@pytest.mark.parametrize(
    ("slo", "allowed_us"),
    [
        (Slo(latency_us=100 * MS), 5 * S),
        (Slo(latency_us=20 * S), 20 * S),
        (Slo(latency_us=100 * MS, on_miss="serve"), 60 * S),
        (Slo(), 60 * S),
        (Slo(timeout_us=600 * S), 600 * S),
    ],
)
def test_a_batch_on_cores_does_not_hang_while_its_calls_may_take_longer(script: Script, slo: Slo, allowed_us: int):
    """A page takes milliseconds and a book ten seconds: calls with long inputs were killed after five, and again, and failed."""
    script.given(a_function(gpu="no", slo=slo), takes={"f": 10 * MS}, devices=[CORES])
    script.at(0).arrives("c1")
    script.at(10 * MS).finishes(took_us=10 * MS)
    script.arrives("c2")
    script.at(allowed_us - 100 * MS)
    assert script.all(Kill) == []
    script.at(allowed_us + 2 * S)
    assert len(script.all(Kill)) == 1


def test_a_silent_batch_on_cores_whose_client_has_left_hangs_after_five_seconds(script: Script):
    script.given(a_function(gpu="no"), takes={"f": 10 * MS}, devices=[CORES])
    script.at(0).arrives("c1")
    script.at(10 * MS).finishes(took_us=10 * MS)
    script.arrives("c2")
    script.at(1 * S).tell(CallCancelled("c2"))
    script.at(7 * S)
    assert len(script.all(Kill)) == 1


def test_an_instance_that_is_to_be_killed_gets_no_more_work(script: Script):
    many = DeviceSpec(id="gpu0", kind="gpu", units=2, memory_mib=9, limits=SliceLimits(batches_per_instance=0))
    script.given(a_function(share=0.5), takes={"f": 10 * MS}, devices=[many])
    script.at(0).arrives("hangs")
    script.at(10 * S).arrives("c2")
    assert script.sizes == [1]


def test_after_the_kill_its_job_runs_elsewhere(script: Script):
    script.given(a_function(), takes={"f": 10 * MS}, engine=True)
    script.fate = lambda batch: None if batch.batch_id == 1 else script._finish(batch)
    script.at(0).arrives("c1")
    script.at(20 * S)
    assert script.ending("c1") == "reply"


def test_a_load_that_never_ends_is_killed(script: Script):
    script.given(a_function(), warm=False)
    script.at(0).arrives("c1")
    script.at(LOAD_TIMEOUT_US - 1)
    assert script.all(Kill) == []
    script.at(LOAD_TIMEOUT_US + 1 * S)
    assert [kill for _, kill in script.all(Kill)] == [Kill("f-1", "load-hung")]


def test_a_hung_job_whose_call_has_ended_is_dropped_and_not_run_again(script: Script):
    script.given(a_function(), takes={"f": 10 * MS}, engine=True)
    script.fate = lambda batch: None
    script.at(0).arrives("c1", within_us=100 * MS)
    script.at(20 * S)
    assert script.ending("c1") == "deadline"
    assert [drop for _, drop in script.all(DropJob)] == [DropJob(1)]
    assert script.sizes == [1]


def test_time_measured_by_a_broken_clock_is_not_credited(script: Script):
    script.given(a_function())
    script.arrives("c1")
    [reply] = script.tell(BatchFinished(1, -5))
    assert reply.cost == 0.0


# ----------------------------------------------------------------------------------------------------- stale reads

STALE = JobOutcome(False, "function-failed", "Conflict", is_stale=True)


def stale(*names: str, times: int):
    """Calls that find state which they have read changed, so many times; those in their batches find nothing wrong."""
    left = dict.fromkeys(names, times)

    def fate(batch):
        outcomes = []
        for job in batch.jobs:
            is_stale = left.get(job.call_id, 0) > 0
            left[job.call_id] = left.get(job.call_id, 0) - 1
            outcomes.append(STALE if is_stale else JobOutcome())
        return BatchFinished(batch.batch_id, 1 * MS, tuple(outcomes))

    return fate


@pytest.mark.parametrize("policy", [fifo.Policy(), edf.Policy()], ids=["fifo", "edf"])
def test_a_job_that_has_read_what_was_changed_runs_again_and_those_in_its_batch_are_answered(script: Script, policy):
    script.given(a_function(max_batch=8), policy=policy, takes={"f": 1 * MS}, engine=True)
    script.fate = stale("c1", "c2", times=2)
    names = [f"c{i}" for i in range(8)]
    script.at(0).arrives(*names, within_us=60 * S)
    script.at(60 * S)
    assert {script.ending(name) for name in names} == {"reply"}
    assert [script.endings[name].retries for name in names] == [0, 2, 2, 0, 0, 0, 0, 0]
    runs = [name for batch in script.served for name in batch]
    assert [runs.count(name) for name in names] == [1, 3, 3, 1, 1, 1, 1, 1]


def test_a_job_that_never_finds_what_it_reads_unchanged_fails_after_a_few_tries(script: Script):
    script.given(a_function(), takes={"f": 1 * MS}, engine=True)
    script.fate = stale("unlucky", times=1_000)
    script.at(0).arrives("unlucky", within_us=60 * S)
    script.at(60 * S)
    assert script.ending("unlucky") == "function-failed" and len(script.served) == MAX_STALE_READS + 1


def test_what_must_not_run_twice_is_not_run_again_for_a_stale_read(script: Script):
    script.given(a_function(idempotent=False), takes={"f": 1 * MS}, engine=True)
    script.fate = stale("once", times=1)
    script.at(0).arrives("once", within_us=60 * S)
    script.at(60 * S)
    assert script.ending("once") == "function-failed" and len(script.served) == 1


def test_a_stale_read_that_leaves_no_time_for_another_run_is_told_at_once(script: Script):
    script.given(a_function(), takes={"f": 40 * MS}, engine=True)
    script.fate = stale("late", times=1)
    script.at(0).arrives("late", within_us=60 * MS)
    script.at(60 * S)
    assert script.ending("late") == "function-failed" and len(script.served) == 1
