"""Recovery of durable runs: cut off at any moment and replayed from the journal, a run ends as if nothing had happened.

Every document of the conformance suite is executed as a durable run, in virtual time, and cut off after each of its entries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from lamina import encoding
from lamina.asl.compile import compile_flow
from lamina.asl.document import resolve_resource, resources_of
from lamina.asl_local_run import ExecutionOutcome, VirtualTasks, local_controller, local_setup, outcome_of
from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.controller import Controller
from lamina.core.workflow import engine
from lamina.core.workflow.flow import Flow, Task
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.drivers.virtual import Scheduled, VirtualDriver
from lamina.durable.recovery import RunRecovery
from lamina.store.runs import JournalRow, LoadedRun, RunRow
from lamina.types import Call
from lamina.values.asl_values import INPUT
from lamina.values.run_values import RunValues
from tests.asl.conformance_case import BEGAN_US, Case, tasks
from tests.asl.test_conformance import CASES

Log = list[tuple[JournalEntry, bytes | None]]
MOST = 6
"""Cuts per document: the first ones, and the last."""


@pytest.fixture(autouse=True)
def loops_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a loop may go on is for the conformance suite itself; here it would be gone through again and again."""
    monkeypatch.setattr(engine, "MAX_DATA_REQUESTS", 500)


class Cut(Exception):
    """The power is gone."""


class JournaledTasks(VirtualTasks):
    """Tasks that remember what they were started with, and a journal that is on disk at once."""

    def __init__(self, tasks: dict[str, Callable[..., Any]], controller: Controller, data: RunValues, log: Log, cut: int) -> None:
        super().__init__(tasks, controller, data)
        self.log = log
        self.cut = cut
        self.started: dict[int, tuple[str, dict[str, Any]]] = {}

    def perform(self, now_us: int, action: do.Action) -> Scheduled:
        if isinstance(action, do.AppendJournal):
            self.log.append((action.entry, self._data.journal_value(action.call_id, action.entry)))
            if len(self.log) == self.cut:
                raise Cut
            return [(now_us, partial(self.journaled, action.call_id, action.entry))]
        if isinstance(action, do.StartBatch):
            given = self._data.inputs(action.jobs[0])
            arguments = {name: encoding.decode(stored) for (_, name), stored in given.leaves if isinstance(stored, bytes)}
            self.started[action.jobs[0].id] = (action.function, arguments)
        return super().perform(now_us, action)

    def journaled(self, name: str, entry: JournalEntry) -> ev.Journaled:
        self._data.set_replay_time(name, BEGAN_US + entry.at_us)
        return ev.Journaled(name, entry)


class DurableRun:
    """`log` is the journal of the run before, which ended at `now_us`; the power goes when the log is `cut` long."""

    def __init__(self, flow: Flow, functions: dict[str, Callable[..., Any]], log: Log, now_us: int, cut: int) -> None:
        self.flow = flow
        self.log = log
        self.controller = local_controller()
        self.data = RunValues(None, None, wall_us=lambda: BEGAN_US + self.driver.now_us(), rng=random.Random(7))
        self.tasks = JournaledTasks(functions, self.controller, self.data, log, cut)
        self.outcomes: list[ExecutionOutcome] = []
        self.driver = VirtualDriver(
            self.controller,
            self.tasks,
            self.data,
            on_end=lambda at_us, ending: self.outcomes.append(outcome_of(ending, self.data, at_us)),
            observers=[lambda *_: self.controller.state.check()],
            skips_idle_ticks=True,
        )
        self.driver.run(until_us=now_us)

    def run(self, name: str, given: Any) -> ExecutionOutcome:
        for event in local_setup(self.flow):
            self.driver.post(event)
        self.data.open(name, self.flow, {INPUT: encoding.encode(given)}, BEGAN_US)
        call = Call(name, self.flow.name, 0, durable=True)
        if not self.log and not self.driver.now_us():
            self.driver.post(ev.CallArrived(call))
        else:
            self.driver.post(ev.CallRecovered(call))
            for entry, value in list(self.log):
                self.data.replay_outcome(name, entry, value)
                self.driver.post(self.tasks.journaled(name, entry))
            self.driver.post(ev.ReplayDone(name))
        self.driver.run(until=lambda: bool(self.outcomes))
        return self.outcomes[0]

    def in_flight(self) -> set[int]:
        """Jobs that were lost with the power: they are done again."""
        runs = self.controller.state.runs.values()
        return {id for run in runs for id in run.jobs} - {entry.job_id for entry, _ in self.log}


def flow_of(case: Case) -> Flow:
    return compile_flow(case.document, "machine", lambda resource: (resource, None), dialect=case.dialect)  # type: ignore[arg-type]


def execute(case: Case, cut: int = 0) -> tuple[ExecutionOutcome, Log, bool]:
    """The last says whether work was lost by the cut."""

    def functions() -> dict[str, Callable[..., Any]]:
        known = tasks()
        return {resource: resolve_resource(resource, known) for resource in resources_of(case.document)}

    first = DurableRun(flow_of(case), functions(), [], 0, cut)
    try:
        return first.run("execution-1", case.given), first.log, False
    except Cut:
        pass
    world = functions()
    lost = first.in_flight()
    for id, (function, arguments) in first.tasks.started.items():  # the world outside remembers what was done to it
        if id in lost:
            continue
        try:
            world[function](*arguments.values())
        except Exception:
            continue
    second = DurableRun(flow_of(case), world, first.log, first.driver.now_us(), 0)
    return second.run("execution-1", case.given), second.log, bool(lost)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_is_cut_off_comes_out_as_if_it_had_not_been(case: Case):
    whole, log, _ = execute(case)
    for cut in {*range(1, min(MOST, len(log)) + 1), len(log)} - {0}:
        again, _, lost = execute(case, cut)
        told = f"cut off after note {cut}"
        assert (again.ok, again.output, again.error, again.cause) == (whole.ok, whole.output, whole.error, whole.cause), told
        assert again.took_us >= whole.took_us if lost else again.took_us == whole.took_us, told


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeping_notes_changes_nothing_of_what_a_run_does(case: Case):
    outcome, _, _ = execute(case)
    if case.error or not outcome.ok:
        assert (outcome.ok, outcome.error) == (False, case.error), outcome
    else:
        assert outcome.output == case.want
    assert case.took_s is None or outcome.took_us == pytest.approx(case.took_s * 1e6, abs=2)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_step_that_was_kept_is_not_kept_again(case: Case):
    _, log, _ = execute(case)
    _, resumed, _ = execute(case, (len(log) + 1) // 2)
    assert sorted(note.execution_key for note, _ in resumed) == sorted(note.execution_key for note, _ in log)


ORIGIN_US = 1_700_000_000_000_000
"""When the controller's time began."""


def a_recovery(applied: list[JournalEntry], ended: list[Any], replayed: list[bytes | None]) -> RunRecovery:
    flow = Flow("flow", {"a": Task("a", "f")}, ("a",))
    data = SimpleNamespace(replay_outcome=lambda id, entry, value: replayed.append(value))
    driver: Any = SimpleNamespace(
        controller=SimpleNamespace(flows={"flow": flow}), data=data, recover=lambda *_: None, post=lambda event: None
    )
    return RunRecovery(
        *(driver, SimpleNamespace(), ORIGIN_US, lambda id: True),  # type: ignore[arg-type]
        apply=lambda id, number, entry: applied.append(entry),
        on_ended=ended.append,
        set_aside=lambda id, error: None,
    )


def a_run(recovery: RunRecovery, **changes: Any) -> LoadedRun:
    digest = recovery.flow_digest("flow")[0]
    row = RunRow("1" * 24, "workflow", "flow", "", "queued", 0, 0.0, 10, ORIGIN_US, 0, ORIGIN_US + 5, 0, digest)
    entry = JournalEntry("done", ORIGIN_US + 7, 0, "a", queued_us=ORIGIN_US + 3, began_us=ORIGIN_US + 4)
    return LoadedRun(replace(row, **changes), msgspec.msgpack.encode({}), [JournalRow(1, entry, b"value")])


def test_times_of_a_journal_are_of_the_clock_of_the_controller_that_replays_it():
    applied, ended, replayed = list[JournalEntry](), list[Any](), list[bytes | None]()
    recovery = a_recovery(applied, ended, replayed)

    async def work() -> None:
        recovery._write_started = lambda now_us: None  # type: ignore[method-assign]
        recovery.start(a_run(recovery), ORIGIN_US + 100)

    asyncio.run(work())
    assert [(entry.at_us, entry.queued_us, entry.began_us) for entry in applied] == [(7, 3, 4)]
    assert replayed == [b"value"] and not ended


def test_a_run_past_its_deadline_does_not_begin():
    ended = list[Any]()
    recovery = a_recovery([], ended, [])
    recovery.start(a_run(recovery, deadline_us=ORIGIN_US + 50), ORIGIN_US + 50)
    assert ended == [do.FailCall("1" * 24, "deadline")]
