"""Journal of durable runs: what moves them on is written first, and can be replayed."""

from __future__ import annotations

from lamina.core.actions import AppendJournal, Reject, Reply, StartBatch
from lamina.core.events import CallArrived, CallCancelled, CallRecovered, DataResolved, JobOutcome, Journaled, ReplayDone
from lamina.core.workflow.error_policy import ErrorPolicy, Retrier
from lamina.core.workflow.flow import Choice, Flow, Parallel, Task, Wait
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.types import Call
from tests.script import BIG_GPU, Script, a_function

S = 1_000_000
CHAIN = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
CALL = Call("c", "w", 0, durable=True)


def given(script: Script, flow: Flow = CHAIN) -> Script:
    return script.given(a_function("f", share=0.125), a_function("g", share=0.125), flows=[flow], devices=[BIG_GPU])


def kinds(actions: list[object]) -> list[type]:
    return [type(action) for action in actions]


def kept(script: Script) -> list[JournalEntry]:
    return [action.entry for _, action in script.all(AppendJournal)]  # type: ignore[attr-defined]


def test_a_step_waits_until_the_one_before_it_is_kept(script: Script):
    given(script).tell(CallArrived(CALL))
    [asked] = script.at(5).finishes()
    assert isinstance(asked, AppendJournal) and asked.entry.kind == "done" and asked.entry.execution_key == (0, "a", 0)
    assert kinds(script.at(9).tell(Journaled("c", asked.entry))) == [StartBatch]


def test_a_function_alone_has_nothing_to_keep_but_its_end(script: Script):
    given(script).tell(CallArrived(Call("c", "f", 0, durable=True)))
    assert kinds(script.finishes()) == [Reply]


def test_a_run_cancelled_while_its_outcome_is_being_journaled_stays_cancelled(script: Script):
    given(script).tell(CallArrived(CALL))
    script.finishes()
    script.tell(CallCancelled("c"))
    assert script.ending("c") == "cancelled"
    assert script.tell(Journaled("c", kept(script)[0])) == []


def test_a_run_told_again_begins_only_what_is_not_done(script: Script):
    note = JournalEntry("done", -7 * S, 0, "a", function="f")
    given(script)
    began = Call("c", "w", -8 * S, durable=True)
    assert script.tell(CallRecovered(began)) == []
    assert script.tell(Journaled("c", note)) == []
    [start] = script.tell(ReplayDone("c"))
    assert isinstance(start, StartBatch) and [job.node for job in start.jobs] == ["b"]


def test_what_was_told_once_has_no_effect_a_second_time(script: Script):
    note = JournalEntry("done", -7 * S, 0, "a", function="f")
    given(script).tell(CallRecovered(CALL))
    script.tell(Journaled("c", note))
    script.tell(Journaled("c", note))
    assert [job.node for job in script.tell(ReplayDone("c"))[0].jobs] == ["b"]  # type: ignore[attr-defined]


def test_a_wait_goes_on_while_the_server_is_down(script: Script):
    flow = Flow("w", {"nap": Wait("nap", ("b",), duration_us=10 * S), "b": Task("b", "g")}, ("nap",))
    given(script, flow).tell(CallRecovered(Call("c", "w", -4 * S, durable=True)))
    script.tell(ReplayDone("c"))
    script.at(6 * S)
    assert [(note.kind, note.purpose, note.at_us) for note in kept(script)] == [("due", "resume", 6 * S)]


def test_time_that_passed_before_a_retry_does_not_count(script: Script):
    flow = Flow("w", {"a": Task("a", "f", error_policy=ErrorPolicy(timeout_us=2 * S))}, ("a",))
    given(script, flow).tell(CallRecovered(Call("c", "w", -100 * S, durable=True), None, -S))
    script.tell(ReplayDone("c", -S))
    script.at(S - 1)
    assert kept(script) == []
    script.at(S)
    assert [note.purpose for note in kept(script)] == ["timeout"]


def test_a_run_keeps_the_flow_it_began_with(script: Script):
    old = Flow("w", {"old": Task("old", "g", ("b",)), "b": Task("b", "g")}, ("old",))
    given(script).tell(CallRecovered(CALL, old))
    assert [job.node for job in script.tell(ReplayDone("c"))[0].jobs] == ["old"]  # type: ignore[attr-defined]


def test_a_flow_whose_functions_are_gone_is_not_begun(script: Script):
    old = Flow("w", {"x": Task("x", "gone", ("b",)), "b": Task("b", "g")}, ("x",))
    assert given(script).tell(CallRecovered(CALL, old)) == [Reject("c", "unknown")]


def test_the_branches_that_came_first_come_first_again(script: Script):
    branches = tuple(Flow(name, {name: Task(name, "f")}, (name,)) for name in "xyz")
    flow = Flow("w", {"p": Parallel("p", branches, wait_for=2)}, ("p",))
    given(script, flow).engine = True
    script.tell(CallRecovered(CALL))
    script.at(0)
    for scope, node in ((3, "z"), (1, "x")):
        script.tell(Journaled("c", JournalEntry("done", 0, scope, node)))
    assert script.ending("c") == "reply"


def test_an_outcome_that_no_step_waits_for_any_more_is_let_pass(script: Script):
    given(script).tell(CallArrived(CALL))
    script.finishes(outcomes=(JobOutcome(False, "function-failed", "Boom"),))
    script.tell(Journaled("c", kept(script)[0]))
    assert script.ending("c") == "function-failed"
    assert script.tell(Journaled("c", kept(script)[0])) == []


def test_an_entry_takes_effect_at_the_time_written_on_it(script: Script):
    """The wait after it began seven seconds ago, before the restart."""
    nodes = {"a": Task("a", "f", ("nap",)), "nap": Wait("nap", ("b",), duration_us=10 * S), "b": Task("b", "g")}
    given(script, Flow("w", nodes, ("a",))).tell(CallRecovered(Call("c", "w", -8 * S, durable=True)))
    script.tell(Journaled("c", JournalEntry("done", -7 * S, 0, "a", function="f")))
    script.tell(ReplayDone("c"))
    script.at(4 * S)
    assert [(entry.kind, entry.node, entry.at_us) for entry in kept(script)] == [("due", "nap", 3 * S)]


def test_a_wait_after_a_question_about_data_began_when_what_led_to_it_happened(script: Script):
    """As after `try`: which way it went is asked before the wait begins."""
    nodes = {
        "a": Task("a", "f", ("which",)),
        "which": Choice("which", (("nap",), ("b",))),
        "nap": Wait("nap", ("b",), duration_us=10 * S),
        "b": Task("b", "g"),
    }
    given(script, Flow("w", nodes, ("a",))).tell(CallRecovered(Call("c", "w", -8 * S, durable=True)))
    script.tell(Journaled("c", JournalEntry("done", -7 * S, 0, "a", function="f")))
    script.tell(DataResolved("c", 0, "which", 0))
    script.tell(ReplayDone("c"))
    script.at(4 * S)
    assert [(entry.kind, entry.node, entry.at_us) for entry in kept(script)] == [("due", "nap", 3 * S)]


def test_a_timer_of_an_earlier_attempt_does_not_end_a_later_one(script: Script):
    """The first attempt fails an instant before its timeout; both are journaled, one after the other."""
    policy = ErrorPolicy(retry=(Retrier(("States.ALL",), interval_us=0),), timeout_us=2 * S)
    given(script, Flow("w", {"a": Task("a", "f", error_policy=policy)}, ("a",))).tell(CallArrived(CALL))
    script.at(2 * S - 1).finishes(outcomes=(JobOutcome(False, "function-failed", "Boom"),))
    script.at(2 * S)
    failed, due = kept(script)
    assert (failed.kind, due.kind, due.purpose, due.attempt) == ("failed", "due", "timeout", 0)
    script.tell(Journaled("c", failed))
    [pause] = kept(script.at(2 * S + 10))[2:]
    script.tell(Journaled("c", pause))
    assert len(script.running) == 1, "the second attempt has begun"
    script.tell(Journaled("c", due))
    script.at(3 * S)
    assert script.ending("c") == "open" and len(kept(script)) == 3
    script.finishes()
    script.tell(Journaled("c", kept(script)[-1]))
    assert script.ending("c") == "reply" and kept(script)[-1].kind == "done"
