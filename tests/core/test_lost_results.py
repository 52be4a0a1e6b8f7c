"""Results of steps that are lost with the machine that had them: the steps run again, and those that need them wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamina.core.actions import StartBatch
from lamina.core.events import BatchFinished, CallCancelled, JobOutcome, TaskReported
from lamina.core.workflow.engine import MAX_REMADE
from lamina.core.workflow.error_policy import Catcher, ErrorPolicy
from lamina.core.workflow.flow import Each, Flow, Task
from tests.script import BIG_GPU, Script, a_function

MS, S = 1_000, 1_000_000
TAKES = {"f": 10 * MS, "g": 20 * MS, "h": 5 * MS}


def flow(*nodes: Task | Each, start: tuple[str, ...]) -> Flow:
    return Flow("w", {node.name: node for node in nodes}, start)


CHAIN = flow(Task("a", "f", ("b",)), Task("b", "g", ("c",)), Task("c", "h"), start=("a",))
JOIN = flow(Task("a", "f", ("j",)), Task("b", "g", ("j",)), Task("j", "h", tokens_needed=2), start=("a", "b"))
MAP = flow(Task("a", "f", ("e",)), Each("e", Flow("body", {"x": Task("x", "g")}, ("x",)), ("z",)), Task("z", "h"), start=("a",))


@pytest.fixture
def world(script: Script) -> Callable[..., Script]:
    def given(workflow: Flow, *lost: tuple[str, tuple[str, ...]], final: tuple[str, ...] = (), **more: object) -> Script:
        """`lost`: at its next start, the first of these steps finds the results of the others gone."""
        functions = [a_function(name, share=0.125, max_batch=4, **more) for name in "fgh"]
        script.given(*functions, flows=[workflow], devices=[BIG_GPU], takes=TAKES, engine=True)
        left = list(lost)

        def outcome(node: str) -> JobOutcome:
            entry = next((one for one in left if one[0] == node), None)
            if entry is None:
                return JobOutcome(is_final=node in final)
            left.remove(entry)
            return JobOutcome(False, "value-lost", "ValueLost", lost=entry[1])

        script.fate = lambda batch: BatchFinished(batch.batch_id, 1 * MS, tuple(outcome(job.node) for job in batch.jobs))
        return script

    return given


def served(script: Script) -> list[str]:
    return [job.node for _, action in script.said if isinstance(action, StartBatch) for job in action.jobs]


def test_the_step_runs_again_and_the_one_that_needs_its_result_after_it(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("b", ("a",)))
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script) == ["a", "b", "a", "b", "c"]
    assert script.ending("c1") == "reply" and script.endings["c1"].retries == 1


def test_what_it_needs_itself_is_made_again_first(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("c", ("b",)), ("b", ("a",)))
    script.at(0)
    script.fate = _after(script, served_before=3)
    script.arrives("c1", target="w")
    script.at(S)
    assert served(script) == ["a", "b", "c", "b", "a", "b", "c"] and script.ending("c1") == "reply"


def _after(script: Script, served_before: int) -> Callable[[StartBatch], BatchFinished]:
    """Nothing is lost until the whole chain has begun."""
    fate, begun = script.fate, [0]

    def wait(batch: StartBatch) -> BatchFinished:
        begun[0] += 1
        return fate(batch) if begun[0] >= served_before else BatchFinished(batch.batch_id, 1 * MS, ())  # type: ignore[return-value]

    return wait


def test_several_lost_results_are_made_at_once(world: Callable[..., Script]) -> None:
    script = world(JOIN, ("j", ("a", "b")))
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert sorted(served(script)) == ["a", "a", "b", "b", "j", "j"] and script.ending("c1") == "reply"


def test_items_that_need_the_same_lost_result_wait_for_one_job(world: Callable[..., Script]) -> None:
    script = world(MAP, *[("x", ("a",))] * 3)
    script.answers["e"] = [3]
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script).count("a") == 2 and served(script).count("x") == 6 and script.ending("c1") == "reply"


def test_a_step_that_must_not_run_twice_ends_the_call(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("b", ("a",)), idempotent=False)
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script) == ["a", "b"] and script.ending("c1") == "value-lost"


def test_a_step_that_has_changed_state_is_not_run_again(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("b", ("a",)), final=("a",))
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script) == ["a", "b"] and script.ending("c1") == "value-lost"


def test_a_result_that_is_lost_all_the_time_ends_the_call(world: Callable[..., Script]) -> None:
    script = world(CHAIN, *[("b", ("a",))] * 100)
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script).count("a") == 1 + MAX_REMADE and script.ending("c1") == "value-lost"


def test_a_step_that_fails_the_second_time_fails_those_that_need_it(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("b", ("a",)))
    fate, seen = script.fate, []

    def fails_again(batch: StartBatch) -> BatchFinished:
        seen.extend(job.node for job in batch.jobs)
        if seen.count("a") == 2 and seen[-1] == "a":
            return BatchFinished(batch.batch_id, 1 * MS, (JobOutcome(False, "function-failed", "Boom"),))
        return fate(batch)  # type: ignore[return-value]

    script.fate = fails_again
    script.at(0).arrives("c1", target="w")
    script.at(S)
    ending = script.endings["c1"]
    assert (ending.error, ending.step) == ("function-failed", "a")


def test_its_failure_is_caught_where_that_of_the_waiting_step_would_be(world: Callable[..., Script]) -> None:
    caught = Task("b", "g", ("c",), error_policy=ErrorPolicy(catch=(Catcher(("Boom",), ("c",)),)))
    script = world(flow(Task("a", "f", ("b",)), caught, Task("c", "h"), start=("a",)), ("b", ("a",)))
    fate, seen = script.fate, []

    def fails_again(batch: StartBatch) -> BatchFinished:
        seen.extend(job.node for job in batch.jobs)
        if seen.count("a") == 2 and seen[-1] == "a":
            return BatchFinished(batch.batch_id, 1 * MS, (JobOutcome(False, "function-failed", "Boom"),))
        return fate(batch)  # type: ignore[return-value]

    script.fate = fails_again
    script.at(0).arrives("c1", target="w")
    script.at(S)
    assert served(script) == ["a", "b", "a", "c"] and script.ending("c1") == "reply"


def test_a_call_that_is_cancelled_meanwhile_leaves_nothing(world: Callable[..., Script]) -> None:
    script = world(CHAIN, ("b", ("a",)))
    script.at(0).arrives("c1", target="w")
    while served(script).count("a") < 2:
        script.at(script.now_us + MS)
    script.tell(CallCancelled("c1"))
    script.at(S)
    assert script.ending("c1") == "cancelled" and served(script) == ["a", "b", "a"]
    assert not script.controller.state.runs and not any(len(f.queue) for f in script.controller.state.functions.values())


def test_a_step_that_is_reported_while_its_inputs_are_made_again_ends(world: Callable[..., Script]) -> None:
    """Its first run gave the token away, and its worker died after that."""
    reported = Task("b", "g", ("c",), waits_for_report=True)
    script = world(flow(Task("a", "f", ("b",)), reported, Task("c", "h"), start=("a",)), ("b", ("a",)))
    script.at(0).arrives("c1", target="w")
    while served(script).count("a") < 2:
        script.at(script.now_us + MS)
    (execution,) = [one for one in script.controller.state.runs["c1"].executions.values() if one.node.name == "b"]  # type: ignore[attr-defined]
    script.tell(TaskReported("c1", execution.id))
    script.at(S)
    assert served(script) == ["a", "b", "a", "c"] and script.ending("c1") == "reply"


def test_a_result_of_a_call_of_a_function_is_its_clients(script: Script) -> None:
    script.given(a_function(), takes={"f": 1 * MS}, engine=True)
    script.fate = lambda batch: BatchFinished(batch.batch_id, 1 * MS, (JobOutcome(False, "value-lost", lost=("f",)),))
    script.at(0).arrives("c1")
    script.at(S)
    assert script.ending("c1") == "value-lost"
