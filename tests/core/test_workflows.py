"""Runs of workflows: joins, maps, choices, loops, and what is left of the time for each step."""

from __future__ import annotations

import pytest

from lamina.core.actions import DropJob, FailCall, Reply, ResolveData
from lamina.core.events import CallCancelled, DataResolved, Deployed, DeviceJoined, DeviceLost, JobOutcome
from lamina.core.workflow.engine import MAX_ITEMS
from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.core.workflow.runs import MAX_OPEN_ITEMS
from lamina.types import NEVER_US
from tests.script import BIG_GPU, Script, a_function

MS = 1_000
FUNCTIONS = [a_function(name, share=0.125, max_batch=8) for name in "fgh"]
TAKES = {"f": 10 * MS, "g": 20 * MS, "h": 5 * MS}


def flow(name: str, *nodes, start: tuple[str, ...]) -> Flow:
    return Flow(name, {node.name: node for node in nodes}, start)


def body(*nodes, start: tuple[str, ...]) -> Flow:
    return flow("body", *nodes, start=start)


CHAIN = flow("w", Task("a", "f", ("b",)), Task("b", "g"), start=("a",))
JOIN = flow(
    "w",
    Task("a", "f", ("l", "r")),
    Task("l", "g", ("j",)),
    Task("r", "h", ("j",)),
    Task("j", "f", tokens_needed=2),
    start=("a",),
)
MAP = flow("w", Each("e", body(Task("x", "f"), start=("x",)), ("z",)), Task("z", "h"), start=("e",))
NESTED = flow(
    "w",
    Each("e", body(Each("i", body(Task("x", "f"), start=("x",)), ("y",)), Task("y", "g"), start=("i",)), ("z",)),
    Task("z", "h"),
    start=("e",),
)
CHOICE = flow(
    "w",
    Choice("c", (("a",), ("b",), ())),
    Task("a", "f", ("m",)),
    Task("b", "g", ("m",)),
    Pass("m", ("z",)),
    Task("z", "h"),
    start=("c",),
)


@pytest.fixture
def world(script: Script):
    def given(workflow: Flow, *, engine: bool = True, **more) -> Script:
        return script.given(*FUNCTIONS, flows=[workflow], devices=[BIG_GPU], takes=TAKES, engine=engine, **more)

    return given


def steps(script: Script) -> list[str]:
    """Nodes in the order their jobs were started."""
    return [job.node for batch in script.batches for job in batch.jobs]


def test_a_step_starts_when_the_one_before_it_has_ended(world):
    script = world(CHAIN)
    script.at(0).arrives("c", target="w")
    script.at(100 * MS)
    assert steps(script) == ["a", "b"]
    assert script.endings["c"].latency_us == 30 * MS


def test_an_answer_adds_up_what_its_steps_waited_and_cost(world):
    script = world(CHAIN)
    script.at(0).arrives("c", target="w")
    script.at(100 * MS)
    reply = script.endings["c"]
    assert reply.queue_us == 0
    assert reply.cost == pytest.approx((10 + 20) / 1000 / 8)


def test_a_join_waits_for_all_and_starts_once(world):
    script = world(JOIN)
    script.at(0).arrives("c", target="w")
    script.at(100 * MS)
    assert sorted(steps(script)) == ["a", "j", "l", "r"]
    assert script.endings["c"].latency_us == 10 * MS + 20 * MS + 10 * MS


@pytest.mark.parametrize("items", [0, 1, 5])
def test_a_map_runs_its_body_once_per_item_and_goes_on_when_all_are_done(world, items: int):
    script = world(MAP)
    script.answers["e"] = [items]
    script.at(0).arrives("c", target="w")
    script.at(200 * MS)
    assert steps(script) == ["x"] * items + ["z"]
    assert isinstance(script.endings["c"], Reply)


def test_items_of_a_map_share_a_batch(world):
    script = world(MAP, engine=False)
    script.at(0).arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", 4))
    [batch] = script.batches
    assert [job.scope for job in batch.jobs] == [1, 2, 3, 4]


def test_maps_nest(world):
    script = world(NESTED)
    script.answers.update({"e": [2], "i": [3, 0]})
    script.at(0).arrives("c", target="w")
    script.at(300 * MS)
    assert sorted(steps(script)) == ["x", "x", "x", "y", "y", "z"]


@pytest.mark.parametrize(("branch", "expected"), [(0, ["a", "z"]), (1, ["b", "z"]), (2, [])])
def test_a_choice_goes_one_way_only(world, branch: int, expected: list[str]):
    script = world(CHOICE)
    script.answers["c"] = [branch]
    script.at(0).arrives("c1", target="w")
    script.at(200 * MS)
    assert steps(script) == expected
    assert isinstance(script.endings["c1"], Reply)


def test_a_loop_goes_round_as_often_as_its_choice_says(world):
    script = world(flow("w", Task("a", "f", ("c",)), Choice("c", (("a",), ("z",))), Task("z", "h"), start=("a",)))
    script.answers["c"] = [0, 0, 1]
    script.at(0).arrives("c1", target="w")
    script.at(200 * MS)
    assert steps(script) == ["a", "a", "a", "z"]


def test_a_workflow_without_work_is_answered_at_once(world):
    script = world(flow("w", Pass("p", ("q",)), Pass("q"), start=("p",)))
    [reply] = script.at(0).arrives("c", target="w")
    assert isinstance(reply, Reply)


def test_a_map_that_is_reached_twice_at_once_keeps_its_items_apart(world):
    """Two tokens, one node that waits for one: it runs twice, and the run is over when both are."""
    script = world(
        flow("w", Task("a", "f", ("e",)), Task("b", "f", ("e",)), Each("e", body(Task("x", "g"), start=("x",))), start=("a", "b"))
    )
    script.answers["e"] = [2, 3]
    script.at(0).arrives("c", target="w")
    script.at(300 * MS)
    assert steps(script).count("x") == 5
    assert isinstance(script.endings["c"], Reply)


# ----------------------------------------------------------------------------------------------- questions and answers


def test_a_map_asks_how_many_items_it_has(world):
    script = world(MAP, engine=False)
    assert script.at(0).arrives("c", target="w") == [ResolveData("c", 0, "e")]


def test_an_answer_given_twice_counts_once(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", 2))
    assert script.tell(DataResolved("c", 0, "e", 2)) == []
    assert len(script.controller.state.runs["c"].jobs) == 2


def test_an_answer_to_no_question_does_nothing(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    assert script.tell(DataResolved("c", 0, "z", 1)) == []
    assert script.tell(DataResolved("c", 7, "e", 1)) == []
    assert script.tell(DataResolved("other", 0, "e", 1)) == []


def test_an_answer_after_the_run_has_ended_does_nothing(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    script.tell(CallCancelled("c"))
    assert script.tell(DataResolved("c", 0, "e", 2)) == []


def test_a_question_that_cannot_be_answered_fails_the_run_there(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    assert script.tell(DataResolved("c", 0, "e", error="bad-value")) == [FailCall("c", "bad-value", "e")]


@pytest.mark.parametrize("value", [-1, MAX_ITEMS + 1])
def test_a_number_of_items_that_cannot_be_fails_the_run_before_anything_is_made_of_it(world, value: int):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    assert script.tell(DataResolved("c", 0, "e", value)) == [FailCall("c", "bad-value", "e")]


def test_a_map_may_have_all_the_items_that_a_map_may_have(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    assert not [action for action in script.tell(DataResolved("c", 0, "e", MAX_ITEMS)) if isinstance(action, FailCall)]


def test_a_map_opens_no_more_items_than_one_turn_of_the_controller_has_time_for(world):
    script = world(MAP, engine=False)
    script.arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", MAX_OPEN_ITEMS + 20))
    jobs = script.controller.state.runs["c"].jobs
    assert len(jobs) == MAX_OPEN_ITEMS
    script.finishes()
    assert len(jobs) == MAX_OPEN_ITEMS, "as many more as have ended"


def test_maps_inside_a_map_have_too_many_items_only_beyond_what_one_may_have(world):
    script = world(NESTED, engine=False)
    script.arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", 2 * MAX_OPEN_ITEMS))
    inner = [DataResolved("c", 1 + number, "i", MAX_ITEMS) for number in range(MAX_OPEN_ITEMS)]
    failed = []
    while not failed:
        failed = [action for action in script.tell(inner.pop()) if isinstance(action, FailCall)]
    assert failed[0].error == "too-many-items"
    assert len(script.controller.state.runs) == 0 and len(inner) < MAX_OPEN_ITEMS - 1


@pytest.mark.parametrize("value", [-1, 3])
def test_a_branch_that_is_not_there_fails_the_run(world, value: int):
    script = world(CHOICE, engine=False)
    script.arrives("c1", target="w")
    assert script.tell(DataResolved("c1", 0, "c", value)) == [FailCall("c1", "bad-value", "c")]


# ---------------------------------------------------------------------------------------------------- ends and faults


def test_a_step_that_fails_ends_the_run_and_drops_its_other_steps(world):
    script = world(JOIN, engine=False)
    script.at(0).arrives("c", target="w")
    script.finishes(1)
    said = script.finishes(2, outcomes=(JobOutcome(False, "function-failed"),))
    assert said == [DropJob(3), FailCall("c", "function-failed", "l", 2)]


def test_cancelling_half_way_drops_what_waits_and_what_runs(world):
    script = world(MAP, engine=False)
    script.at(0).arrives("c", target="w")
    script.tell(DataResolved("c", 0, "e", 12))
    said = script.tell(CallCancelled("c"))
    assert said[:-1] == [DropJob(i) for i in range(1, 13)]
    assert said[-1] == FailCall("c", "cancelled")
    while script.running:
        assert script.finishes() == []


def test_a_lost_device_costs_a_run_time_but_not_its_result(world):
    script = world(JOIN)
    script.at(0).arrives("c", target="w")
    script.at(12 * MS).tell(DeviceLost("gpu0"))
    script.tell(DeviceJoined(BIG_GPU))
    script.at(10_000 * MS)
    assert isinstance(script.endings["c"], Reply)
    assert script.endings["c"].retries == 2


def test_a_run_keeps_the_workflow_it_began_with(world):
    script = world(CHAIN, engine=False)
    script.at(0).arrives("c", target="w")
    script.tell(Deployed((), (flow("w", Task("a", "f"), start=("a",)),)))
    script.finishes()
    assert [batch.function for batch in script.running] == ["g"]


# ----------------------------------------------------------------------------------------------------- what time is left


def due_us(script: Script, call_id: str) -> dict[str, int]:
    return {job.node: job.due_us for job in script.controller.state.runs[call_id].jobs.values()}


def test_a_step_is_due_early_enough_for_those_after_it(world):
    script = world(CHAIN, engine=False)
    script.at(0).arrives("c", target="w", within_us=100 * MS)
    assert due_us(script, "c") == {"a": 80 * MS}
    script.finishes()
    assert due_us(script, "c") == {"b": 100 * MS}


def test_before_a_join_the_longest_way_counts(world):
    script = world(JOIN, engine=False)
    script.at(0).arrives("c", target="w", within_us=100 * MS)
    assert due_us(script, "c") == {"a": 70 * MS}
    script.finishes()
    assert due_us(script, "c") == {"l": 90 * MS, "r": 90 * MS}


def test_inside_a_map_the_steps_after_the_map_count_too(world):
    script = world(NESTED, engine=False)
    script.at(0).arrives("c", target="w", within_us=100 * MS)
    script.tell(DataResolved("c", 0, "e", 1))
    script.tell(DataResolved("c", 1, "i", 1))
    assert due_us(script, "c") == {"x": 100 * MS - 20 * MS - 5 * MS}


def test_a_step_that_cannot_be_saved_ends_its_run_early(world):
    """At 75 ms the second step could still be done by 95; the third needs 5 more than there are."""
    chain = flow("w", Task("a", "f", ("b",)), Task("b", "g", ("z",)), Task("z", "h"), start=("a",))
    script = world(chain, engine=False)
    script.at(0).arrives("c", target="w", within_us=99 * MS)
    script.at(75 * MS).finishes()
    assert script.endings["c"] == FailCall("c", "deadline", "b", 2)


def test_without_a_deadline_no_step_is_ever_hopeless(world):
    script = world(CHAIN, engine=False)
    script.at(0).arrives("c", target="w")
    assert due_us(script, "c")["a"] > NEVER_US // 2
