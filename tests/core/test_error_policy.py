"""Error policy: steps that wait, are retried, are caught, time out or are cancelled."""

from __future__ import annotations

import pytest

from lamina.core.actions import DropJob, FailCall, Reply, ResolveData, StartBatch
from lamina.core.events import BatchFinished, DataResolved, Event, Heartbeat, JobOutcome
from lamina.core.workflow.engine import MAX_DATA_REQUESTS
from lamina.core.workflow.error_policy import Catcher, ErrorPolicy, Retrier, matches
from lamina.core.workflow.flow import Choice, Each, Flow, Node, Parallel, Pass, Succeed, Task, Wait
from lamina.core.workflow.flow import Fail as FailNode
from lamina.errors import BadFlow
from tests.script import BIG_GPU, Script, a_function

MS = 1_000
S = 1_000_000
FUNCTIONS = [a_function(name, share=0.125) for name in "fgh"]
TAKES = {"f": 10 * MS, "g": 20 * MS, "h": 5 * MS}
ALL = ("States.ALL",)


def flow(*nodes: Node, start: tuple[str, ...] = (), name: str = "w", timeout_us: int = 0) -> Flow:
    return Flow(name, {node.name: node for node in nodes}, start or (nodes[0].name,), timeout_us=timeout_us)


def branch(function: str, *more: Node) -> Flow:
    return flow(Task("x", function, tuple(node.name for node in more[:1])), *more, name=function)


@pytest.fixture
def world(script: Script):
    def given(workflow: Flow, failing: dict[str, list[str]] | None = None) -> Script:
        """`failing`: per node, the names its tries fail with, one after the other; "" is a success."""
        left = {node: list(names) for node, names in (failing or {}).items()}

        def fate(batch: StartBatch) -> Event:
            outcomes = []
            for job in batch.jobs:
                name = left[job.node].pop(0) if left.get(job.node) else ""
                outcomes.append(JobOutcome(not name, "function-failed" if name else "", name))
            return BatchFinished(batch.batch_id, TAKES[batch.function], tuple(outcomes))

        script.fate = fate
        return script.given(*FUNCTIONS, flows=[workflow], devices=[BIG_GPU], takes=TAKES, engine=True)

    return given


def starts_ms(script: Script, node: str) -> list[float]:
    return [at / MS for at, action in script.all(StartBatch) for job in action.jobs if job.node == node]  # type: ignore[attr-defined]


def run(script: Script, until_us: int = 100 * S) -> None:
    script.at(0).arrives("c", target="w")
    script.at(until_us)


# ------------------------------------------------------------------------------------------------------------------- retry


def test_a_retry_waits_and_each_pause_is_longer(world):
    script = world(flow(Task("a", "f", error_policy=ErrorPolicy((Retrier(("Boom",), 100 * MS),)))), {"a": ["Boom"] * 3})
    run(script)
    assert starts_ms(script, "a") == [0, 110, 320, 730]
    assert script.endings["c"].retries == 3


def test_exhausted_tries_fail_the_run_with_the_last_error(world):
    script = world(flow(Task("a", "f", error_policy=ErrorPolicy((Retrier(("Boom",), 1, 1),)))), {"a": ["Boom"] * 5})
    run(script)
    assert script.ending("c") == "function-failed"
    assert len(starts_ms(script, "a")) == 2


def test_an_error_that_no_retry_names_is_not_retried(world):
    script = world(flow(Task("a", "f", error_policy=ErrorPolicy((Retrier(("Boom",)),)))), {"a": ["Other"]})
    run(script)
    assert len(starts_ms(script, "a")) == 1


def test_tries_are_counted_per_retrier(world):
    guard = ErrorPolicy((Retrier(("A",), 1, 1), Retrier(("B",), 1, 1)))
    script = world(flow(Task("a", "f", error_policy=guard)), {"a": ["A", "B", "A"]})
    run(script)
    assert len(starts_ms(script, "a")) == 3


def test_a_pause_is_not_longer_than_the_longest_allowed():
    assert Retrier(ALL, 10, backoff=10, max_delay_us=500).delay_us(5, "") == 500
    assert Retrier(ALL, 10, backoff=1e9).delay_us(10_000, "") == 31_622_400 * S


def test_jitter_is_the_same_for_the_same_try_and_spreads_over_the_pause():
    retrier = Retrier(ALL, 1_000, backoff=1, jitter=True)
    drawn = [retrier.delay_us(0, f"call-{i}") for i in range(400)]
    assert drawn == [retrier.delay_us(0, f"call-{i}") for i in range(400)]
    assert min(drawn) < 50 and max(drawn) > 950 and 400 < sum(drawn) / 400 < 600


@pytest.mark.parametrize(
    ("errors", "name", "alias", "known"),
    [
        (("Boom",), "Boom", "", True),
        (("Boom",), "boom", "", False),
        (ALL, "anything", "", True),
        (ALL, "States.Runtime", "", False),
        (("States.TaskFailed",), "Boom", "", True),
        (("States.TaskFailed",), "States.Timeout", "", False),
        (("States.Timeout",), "States.HeartbeatTimeout", "", True),
        (("States.BranchFailed",), "Boom", "States.BranchFailed", True),
        (("States.BranchFailed",), "Boom", "", False),
        ((), "Boom", "", False),
    ],
)
def test_names_stand_for_errors(errors: tuple[str, ...], name: str, alias: str, known: bool):
    assert matches(errors, name, alias) is known


# ------------------------------------------------------------------------------------------------------------------- catch


def test_a_caught_error_leads_to_another_step(world):
    guard = ErrorPolicy(catch=(Catcher(("Other",), ("z",)), Catcher(("Boom",), ("b",))))
    script = world(flow(Task("a", "f", ("z",), error_policy=guard), Task("b", "g"), Task("z", "h")), {"a": ["Boom"]})
    run(script)
    assert starts_ms(script, "b") == [10]
    assert starts_ms(script, "z") == []
    assert isinstance(script.endings["c"], Reply)


def test_retry_comes_before_catch(world):
    guard = ErrorPolicy((Retrier(ALL, 5 * MS, 1),), (Catcher(ALL, ("b",)),))
    script = world(flow(Task("a", "f", error_policy=guard), Task("b", "g")), {"a": ["Boom", "Boom"]})
    run(script)
    assert starts_ms(script, "a") == [0, 15]
    assert starts_ms(script, "b") == [25]


def test_a_failure_climbs_to_the_scope_that_catches_it_and_stops_the_rest(world):
    body = flow(Task("x", "f"), Task("y", "g"), start=("x", "y"))
    inner = flow(Each("i", body), name="inner")
    script = world(
        flow(
            Parallel("p", (inner, flow(Task("q", "g"))), error_policy=ErrorPolicy(catch=(Catcher(("Boom",), ("z",)),))),
            Task("z", "h"),
        ),
        {"x": ["Boom"]},
    )
    run(script)
    assert starts_ms(script, "z") == [10]
    assert len(script.all(DropJob)) == 2
    assert isinstance(script.endings["c"], Reply)


def test_a_run_whose_failure_is_not_caught_says_where_it_failed(world):
    script = world(flow(Parallel("p", (branch("f"), branch("g")))), {"x": ["Boom"]})
    run(script)
    end = script.endings["c"]
    assert isinstance(end, FailCall) and (end.error, end.step, end.scope) == ("function-failed", "x", 1)


# -------------------------------------------------------------------------------------------------------------------- time


def test_a_wait_holds_nothing_but_time(world):
    script = world(flow(Wait("w", ("a",), duration_us=3 * S), Task("a", "f")))
    run(script)
    assert starts_ms(script, "a") == [3_000]


def test_a_wait_may_ask_how_long(world):
    script = world(flow(Wait("w", ("a",), resolves_data=True), Task("a", "f")))
    script.answers["w"] = [70 * MS]
    run(script)
    assert starts_ms(script, "a") == [70]


def test_a_step_that_takes_too_long_is_dropped_and_its_result_ignored(world):
    guard = ErrorPolicy(catch=(Catcher(("States.Timeout",), ("z",)),), timeout_us=15 * MS)
    script = world(flow(Task("a", "g", error_policy=guard), Task("z", "h")))
    run(script)
    assert script.all(DropJob) == [(15 * MS, DropJob(1))]
    assert script.endings["c"].latency_us == 20 * MS


def test_each_try_has_its_own_time(world):
    script = world(
        flow(Task("a", "g", error_policy=ErrorPolicy((Retrier(("States.Timeout",), 10 * MS, 1),), timeout_us=15 * MS)))
    )
    run(script)
    assert starts_ms(script, "a") == [0, 25]
    assert script.ending("c") == "States.Timeout"


def test_a_silent_step_is_taken_for_dead(world):
    script = world(flow(Task("a", "g", error_policy=ErrorPolicy(heartbeat_us=8 * MS))))
    run(script)
    assert (script.ending("c"), script.all(FailCall)[0][0]) == ("States.HeartbeatTimeout", 8 * MS)


def test_a_step_that_says_it_is_alive_goes_on(world):
    script = world(flow(Task("a", "g", error_policy=ErrorPolicy(heartbeat_us=8 * MS))))
    script.at(0).arrives("c", target="w")
    for at_ms in (7, 14):
        script.at(at_ms * MS).tell(Heartbeat("c", 1))
    script.at(S)
    assert isinstance(script.endings["c"], Reply)


def test_a_loop_that_is_alive_says_nothing_about_the_step_that_waits_on_it(world):
    script = world(flow(Task("a", "g", error_policy=ErrorPolicy(heartbeat_us=8 * MS))))
    script.at(0).arrives("c", target="w")
    script.at(7 * MS).tell(Heartbeat("c", 1, alive_only=True))
    script.at(S)
    assert script.ending("c") == "States.HeartbeatTimeout"


def test_a_run_may_have_a_time_of_its_own(world):
    script = world(flow(Task("a", "f", ("b",)), Task("b", "g"), timeout_us=25 * MS))
    run(script)
    assert (script.ending("c"), script.all(FailCall)[0][0]) == ("States.Timeout", 25 * MS)


# ------------------------------------------------------------------------------------------------------- parallel and each


def test_parallel_goes_on_when_all_branches_have_ended(world):
    script = world(flow(Parallel("p", (branch("f"), branch("g"), branch("h")), ("z",)), Task("z", "h")))
    run(script)
    assert starts_ms(script, "z") == [20]


def test_with_enough_branches_ended_the_rest_is_cancelled(world):
    script = world(flow(Parallel("p", (branch("f"), branch("g"), branch("h")), ("z",), wait_for=2), Task("z", "h")))
    run(script)
    assert starts_ms(script, "z") == [10]
    assert script.all(DropJob) == [(10 * MS, DropJob(2))]


def test_a_quorum_can_do_without_a_branch_that_fails(world):
    script = world(flow(Parallel("p", (branch("f"), branch("g")), wait_for=1)), {"x": ["Boom"]})
    run(script)
    assert isinstance(script.endings["c"], Reply)


def test_a_quorum_out_of_reach_fails_at_once(world):
    script = world(flow(Parallel("p", (branch("f"), branch("g")), wait_for=2)), {"x": ["Boom"]})
    run(script)
    assert script.all(FailCall)[0][0] == 10 * MS


def test_a_map_keeps_so_many_items_under_way(world):
    script = world(flow(Each("e", flow(Task("x", "f")), max_concurrency=2)))
    script.answers["e"] = [5]
    run(script)
    assert starts_ms(script, "x") == [0, 0, 10, 10, 20]


def test_a_map_tolerates_some_failures(world):
    script = world(flow(Each("e", flow(Task("x", "f")), tolerated_failures=2)), {"x": ["Boom", "Boom"]})
    script.answers["e"] = [4]
    run(script)
    assert isinstance(script.endings["c"], Reply)


def test_a_map_closes_as_soon_as_too_many_items_have_failed(world):
    script = world(
        flow(Each("e", flow(Task("x", "f", ("y",)), Task("y", "g")), tolerated_failure_share=0.25, max_concurrency=2)),
        {"x": ["Boom"] * 2},
    )
    script.answers["e"] = [4]
    run(script)
    assert script.ending("c") == "States.ExceedToleratedFailureThreshold"
    assert len(starts_ms(script, "x")) < 4


def test_data_may_set_the_limits_of_a_map(world):
    script = world(flow(Each("e", flow(Task("x", "f")))))
    script.engine = False
    script.at(0).arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", 5, limits=(2, 1)))
    assert len(script.controller.state.runs["c"].jobs) == 2


def test_succeed_ends_its_flow_and_drops_what_else_goes_on(world):
    script = world(flow(Task("a", "f", ("s",)), Task("b", "g"), Succeed("s"), start=("a", "b")))
    run(script)
    assert script.endings["c"].latency_us == 10 * MS
    assert script.all(DropJob) == [(10 * MS, DropJob(2))]


def test_fail_fails_its_flow_by_name(world):
    script = world(flow(Task("a", "f", ("x",)), FailNode("x", "Custom")))
    run(script)
    assert script.ending("c") == "Custom"


# --------------------------------------------------------------------------------------------------------------- questions


def test_a_node_that_asks_does_so_at_its_start_and_at_its_end(world):
    script = world(flow(Task("a", "f", resolves_data=True)))
    run(script)
    assert [action.stage for _, action in script.all(ResolveData)] == ["begin", "end"]  # type: ignore[attr-defined]


def test_the_end_of_a_task_may_send_the_token_elsewhere(world):
    script = world(flow(Task("a", "f", ("b",), resolves_data=True, potential_next=("z",)), Task("b", "g"), Task("z", "h")))
    script.engine = False
    script.at(0).arrives("c", target="w")
    script.tell(DataResolved("c", 0, "a", execution_id=1))
    script.finishes()
    script.tell(DataResolved("c", 0, "a", 1, execution_id=1))
    assert [batch.function for batch in script.running] == ["h"]


def test_a_caught_error_is_told_with_where_it_began(world):
    script = world(
        flow(
            Parallel("p", (branch("f"),), resolves_data=True, error_policy=ErrorPolicy(catch=(Catcher(ALL, ("z",)),))), Pass("z")
        ),
        {"x": ["Boom"]},
    )
    run(script)
    [fault] = [action.fault for _, action in script.all(ResolveData) if action.stage == "catch"]  # type: ignore[attr-defined]
    assert (fault.name, fault.scope, fault.node) == ("Boom", 1, "x")


def test_a_loop_of_questions_that_never_ends_is_ended(world):
    script = world(flow(Pass("p", ("c",), resolves_data=True), Choice("c", (("p",), ()))))
    script.engine = False
    script.at(0).arrives("c1", target="w")
    controller = script.controller
    for turn in range(1, MAX_DATA_REQUESTS + 1):
        controller.handle(0, DataResolved("c1", 0, "p", execution_id=turn))
        last = controller.handle(0, DataResolved("c1", 0, "c", 0))
    assert FailCall("c1", "States.Runtime", "p") in last


@pytest.mark.parametrize(
    "bad",
    [
        flow(Parallel("p", ())),
        flow(Parallel("p", (branch("f"),), wait_for=2)),
        flow(Each("e", branch("f"), tolerated_failures=-1)),
        flow(Each("e", branch("f"), tolerated_failure_share=1.5)),
        flow(Wait("w", duration_us=-1)),
        flow(Task("a", "f", error_policy=ErrorPolicy(catch=(Catcher(ALL, ("nowhere",)),)))),
        flow(Task("a", "f", error_policy=ErrorPolicy((Retrier(ALL, -1),)))),
        flow(Parallel("p", (flow(Task("x", "f", ("y",))),))),
    ],
)
def test_what_cannot_be_is_refused(bad: Flow):
    with pytest.raises(BadFlow):
        bad.check()
