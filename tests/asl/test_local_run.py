"""Local executions: clocks, threads, and what tasks may do."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lamina.asl.compile import compile_flow
from lamina.asl_local_run import ExecutionOutcome, LocalStateMachine, TaskContext
from lamina.core.events import Tick
from tests.asl.conformance_case import catch, machine, one, task, timeless


def run(document: dict[str, Any], given: Any = None, virtual: bool = True, **tasks: Any) -> ExecutionOutcome:
    flow = compile_flow(document, "machine", lambda resource: (resource, None))
    return LocalStateMachine(flow, timeless(tasks), virtual=virtual, began_us=0, seed=1).run({} if given is None else given)


def test_years_pass_in_no_time():
    assert run(one(Type="Wait", Seconds=99_999_999)).took_us == 99_999_999 * 1_000_000


def test_a_task_that_takes_a_year_costs_a_handful_of_ticks():
    def patient(given: Any) -> Any:
        return given

    patient.takes_s = 31_536_000.0  # type: ignore[attr-defined]
    flow = compile_flow(machine("T", T=task("patient")), "machine", lambda resource: (resource, None))
    played = LocalStateMachine(flow, {"patient": patient}, began_us=0)
    assert played.run(1).took_us == 31_536_000 * 1_000_000
    assert sum(isinstance(event, Tick) for _, event, _ in played.history) < 10


def test_more_items_than_places_are_worked_off():
    document = one(Type="Map", ItemProcessor=machine("T", T=task("echo")))
    assert run(document, list(range(1_500)), echo=lambda given: given).output == list(range(1_500))


def test_more_items_than_places_take_longer():
    def second(given: Any) -> Any:
        return given

    second.takes_s = 1.0  # type: ignore[attr-defined]
    document = one(Type="Map", ItemProcessor=machine("T", T=task("second")))
    assert run(document, list(range(1_300)), second=second).took_us == 2_000_000  # 1,024 at a time


def test_the_same_seed_gives_the_same_history():
    document = machine(
        "P", P={"Type": "Pass", "Parameters": {"id.$": "States.UUID()", "n.$": "States.MathRandom(1, 1000000)"}, "End": True}
    )
    assert run(document) == run(document)


def test_full_jitter_waits_at_most_as_long_as_without_and_the_same_each_time():
    def fails(given: Any) -> Any:
        raise ValueError

    again = [{"ErrorEquals": ["ValueError"], "IntervalSeconds": 100, "JitterStrategy": "FULL"}]
    took_us = [run(machine("T", T=task("fails", Retry=again)), fails=fails).took_us for _ in range(2)]
    assert 0 < took_us[0] < 700_000_000
    assert took_us[0] == took_us[1]


@pytest.mark.live
def test_in_real_time_branches_really_run_side_by_side():
    together = threading.Barrier(4)

    def meet(given: Any) -> Any:
        together.wait(60)
        return given

    branches = [machine(f"T{i}", **{f"T{i}": task("meet")}) for i in range(4)]
    assert run(one(Type="Parallel", Branches=branches), 1, virtual=False, meet=meet).output == [1, 1, 1, 1]


@pytest.mark.live
def test_in_real_time_a_timeout_does_not_wait_for_its_task():
    may_end, ended = threading.Event(), threading.Event()

    def nap(given: Any) -> Any:
        may_end.wait(60)
        ended.set()

    document = machine(
        "T",
        T=task("nap", TimeoutSeconds=1, Next="E", Catch=[catch("States.Timeout", to="E", ResultPath=None)]),
        E={"Type": "Succeed"},
    )
    outcome = run(document, 7, virtual=False, nap=nap)
    was_over = ended.is_set()
    may_end.set()
    assert (outcome.output, was_over) == (7, False)


@pytest.mark.live
def test_in_real_time_a_task_may_say_that_it_is_alive():
    def beating(given: Any, context: TaskContext) -> Any:
        for _ in range(6):
            time.sleep(0.2)  # all together longer than it may be silent
            context.heartbeat()
        return context.state

    assert run(machine("T", T=task("beating", HeartbeatSeconds=1)), virtual=False, beating=beating).output == "T"


def test_a_result_that_cannot_travel_is_an_error_of_the_task():
    assert run(machine("T", T=task("odd")), odd=lambda given: object()).error == "BadValue"


def test_a_task_that_takes_nothing_is_called_with_nothing():
    assert run(machine("T", T=task("constant")), constant=lambda: 5).output == 5


def test_a_task_cannot_change_what_others_see():
    def spoil(given: Any) -> Any:
        given["list"].append(1)
        return None

    branches = [machine("A", A=task("spoil", ResultPath=None)), machine("B", B=task("spoil", ResultPath=None))]
    outcome = run(one(Type="Parallel", Branches=branches), {"list": []}, spoil=spoil)
    assert outcome.output == [{"list": []}, {"list": []}]
