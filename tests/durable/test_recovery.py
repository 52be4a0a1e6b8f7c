"""Recovery of durable runs: cut off at any moment and replayed from the journal, a run ends as if nothing had happened.

Every document of the conformance suite is executed as a durable run, in virtual time, and cut off after each of its notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from lamina import encoding
from lamina.asl.compile import compile_flow
from lamina.asl.document import resolve_resource, resources_of
from lamina.asl_local_run import ExecutionOutcome, _Execution
from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.workflow import engine
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits
from lamina.values.asl_values import INPUT
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


class Durable(_Execution):
    """`log` is what was kept of the run before; it is cut off when the log is `cut` long."""

    def __init__(self, flow: Flow, functions: dict[str, Callable[..., Any]], log: Log, now_us: int, cut: int) -> None:
        import random

        super().__init__(flow, functions, True, BEGAN_US, random.Random(7), [])
        self.log = log
        self.cut = cut
        self.now_us = now_us
        self.started: dict[int, tuple[str, dict[str, Any]]] = {}
        self._questions: deque[do.ResolveData] = deque()
        self._asking = False

    def run(self, name: str, given: Any) -> ExecutionOutcome:
        limits = SliceLimits(batches_per_instance=0)
        device = DeviceSpec(id="here", kind="here", family="cpu", units=1024, memory_mib=10**6, limits=limits)
        names = self._flow.functions
        specs = tuple(FunctionSpec(name=one, idempotent=False, max_queue=10**9, scale=ScaleSpec(max=1)) for one in names)
        self._tell(ev.DeviceJoined(device))
        self._tell(ev.Deployed(specs, (self._flow,)))
        self._data.open(name, self._flow, {INPUT: encoding.encode(given)}, BEGAN_US)
        call = Call(name, self._flow.name, 0, durable=True)
        if not self.log and not self.now_us:
            self._tell(ev.CallArrived(call))
        else:
            self._tell(ev.CallRecovered(call))
            for note, value in list(self.log):
                self._data.replay_outcome(name, note, value)
                self._hear(name, note)
            self._tell(ev.ReplayDone(name))
        while self._outcome is None:
            self._next()
        return self._outcome

    def _hear(self, name: str, note: JournalEntry) -> None:
        self._data.set_replay_time(name, BEGAN_US + note.at_us)
        self._tell(ev.Journaled(name, note))

    def _tell(self, event: ev.Event) -> None:
        """As the server's loop: what is asked is answered before anything else is told."""
        super()._tell(event)
        self._controller.state.check()
        if self._asking:
            return
        self._asking = True
        while self._questions:
            answer = self._answer(self._questions.popleft())
            if answer is not None:
                self._tell(answer)
        self._asking = False

    def _perform(self, action: do.Action) -> None:
        if isinstance(action, do.ResolveData):
            self._questions.append(action)
        elif isinstance(action, do.AppendJournal):
            self.log.append((action.entry, self._data.journal_value(action.call_id, action.entry)))
            if len(self.log) == self.cut:
                raise Cut
            self._later(self.now_us, lambda: self._hear(action.call_id, action.entry))
        else:
            super()._perform(action)

    def _start(self, action: do.StartBatch) -> None:
        given = self._data.inputs(action.jobs[0])
        arguments = {name: encoding.decode(stored) for (_, name), stored in given.leaves if isinstance(stored, bytes)}
        self.started[action.jobs[0].id] = (action.function, arguments)
        super()._start(action)

    def under_way(self) -> set[int]:
        """Jobs the power went for: they are done again."""
        runs = self._controller.state.runs.values()
        return {id for run in runs for id in run.jobs} - {note.job_id for note, _ in self.log}


def flow_of(case: Case) -> Flow:
    return compile_flow(case.document, "machine", lambda resource: (resource, None), dialect=case.dialect)  # type: ignore[arg-type]


def execute(case: Case, cut: int = 0) -> tuple[ExecutionOutcome, Log, bool]:
    """The last says whether work was lost by the cut."""

    def functions() -> dict[str, Callable[..., Any]]:
        known = tasks()
        return {resource: resolve_resource(resource, known) for resource in resources_of(case.document)}

    first = Durable(flow_of(case), functions(), [], 0, cut)
    try:
        return first.run("execution-1", case.given), first.log, False
    except Cut:
        pass
    world = functions()
    lost = first.under_way()
    for id, (function, arguments) in first.started.items():  # the world outside remembers what was done to it
        if id in lost:
            continue
        try:
            world[function](*arguments.values())
        except Exception:
            continue
    second = Durable(flow_of(case), world, first.log, first.now_us, 0)
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
