"""Engine of a simulated server: functions run in this process when their batch ends; workers are slow, fail, and are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lamina import encoding
from lamina.core.actions import Action, DropJob, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost, InstanceReady, JobOutcome
from lamina.drivers.engine import EngineShared, JobValues
from lamina.errors import Conflict
from lamina.expr import evaluate
from lamina.sdk.app import App
from lamina.sdk.app_state import WHICH_REQUEST, BatchState, StateCell, StateKey
from lamina.sdk.context import BatchContext, active_context
from lamina.state.kv_state import StateTable
from lamina.types import DeviceSpec, SliceLimits
from lamina.values.references import ErrorInfo
from lamina.worker.job_codec import error_info
from tests.world.machine import Machine


class StaleRead(Conflict):
    """A step that has read what was changed meanwhile: it runs again."""


class WorldEngine:
    """`faults` is the share of batches and loads that go wrong."""

    def __init__(self, machine: Machine, app: App, state: StateTable, faults: float, shared: EngineShared) -> None:
        limits = SliceLimits(batches_per_instance=1)
        self.devices = [DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=4, memory_mib=100_000, limits=limits)]
        self.shared = shared
        self.references = None
        self.load_errors: dict[str, ErrorInfo] = {}
        self.ran = 0
        self._rng, self._faults = machine.rng, faults
        self._app, self._state = app, state
        self._open: dict[int, StartBatch] = {}
        self._followers: dict[int, list[StartBatch]] = {}
        self._dropped: set[int] = set()
        self._alive: set[str] = set()

    def calm(self) -> None:
        self._faults = 0.0

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        self._post, self._values = post, values
        self._loop = asyncio.get_running_loop()

    async def stop(self, grace_s: float) -> None:
        self._alive.clear()

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._open[action.batch_id] = action
                if action.behind in self._open:
                    self._followers.setdefault(action.behind, []).append(action)
                else:
                    self._begin(action)
            case Load():
                self._alive.add(action.instance)
                self._loop.call_later(self._rng.choice((0.0, 0.01, 0.5)), self._loaded, action)
            case Kill():
                self._loop.call_soon(self._lose, action.instance, action.reason)
            case Unload():
                self._alive.discard(action.instance)
            case DropJob():
                self._dropped.add(action.job_id)
            case _:
                pass

    def _loaded(self, action: Load) -> None:
        if action.instance not in self._alive:
            return
        if self._rng.random() < self._faults / 4:
            self._lose(action.instance, "worker-lost")
        else:
            self._post(InstanceReady(action.instance, 1_000))

    def _lose(self, instance: str, reason: str) -> None:
        if instance not in self._alive:
            return
        self._alive.discard(instance)
        for batch_id in [batch_id for batch_id, action in self._open.items() if action.instance == instance]:
            del self._open[batch_id]
        self._post(InstanceLost(instance, reason))

    def _begin(self, action: StartBatch) -> None:
        self._loop.call_later(self._rng.choice((0.0005, 0.002, 0.002, 0.05)), self._end, action)

    def _end(self, action: StartBatch) -> None:
        if action.batch_id not in self._open:
            return
        if self._rng.random() < self._faults:
            if self._rng.random() < 0.5:
                self._lose(action.instance, "worker-lost")
                return
            event: Event = BatchFailed(action.batch_id, "out-of-memory")
        else:
            event = BatchFinished(action.batch_id, 1_000, tuple(self._run(action)))
        del self._open[action.batch_id]
        self._post(event)
        for follower in self._followers.pop(action.batch_id, []):
            if follower.batch_id in self._open:
                self._begin(follower)

    def _run(self, action: StartBatch) -> list[JobOutcome]:
        runner = self._app.functions[action.function].open()
        calls = []
        for job in action.jobs:
            given = self._values.inputs(job)
            opened = {leaf: encoding.decode(stored) for leaf, stored in given.leaves if isinstance(stored, bytes)}
            args = given.args or {}
            calls.append(
                {name: evaluate(expr, opened.__getitem__) for name, expr in args.items()}
                or {n: v for (_, n), v in opened.items()}
            )
        results = self._in_transactions(action, runner, calls)
        outcomes = []
        for job, result in zip(action.jobs, results, strict=True):
            self.ran += 1
            if isinstance(result, Exception):
                self._values.put_error(job, error_info(result))
                outcomes.append(JobOutcome(False, "function-failed", type(result).__name__, isinstance(result, StaleRead)))
            else:
                self._values.put(job, encoding.encode(result))
                outcomes.append(JobOutcome())
        return outcomes

    def _in_transactions(self, action: StartBatch, runner: Any, calls: list[dict[str, Any]]) -> list[Any]:
        """The steps of a batch and their changes, which are made for those that are wanted and have read nothing stale."""
        function, jobs = action.function, action.jobs

        def read(place: int, key: StateKey) -> StateCell:
            return self._state.read(self._state.resolve_key(function, jobs[place].call_id, *key))

        state = BatchState(read)
        is_batched = self._app.functions[function].spec.max_batch > 1
        whole = WHICH_REQUEST if is_batched else state.transaction(0)
        with active_context(BatchContext(batch=len(calls), transaction=whole, batch_state=state)):
            results: list[Any] = runner.run(calls)
        changes = state.changes(lambda place: not isinstance(results[place], Exception) and jobs[place].id not in self._dropped)
        steps = [(job.call_id, job.scope, job.node) for job in jobs]
        for place, verdict in self._state.commit(function, steps, changes).items():
            if verdict is not True:
                results[place] = verdict or StaleRead("state: changed meanwhile, again and again")
        return results
