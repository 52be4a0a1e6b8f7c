"""Test runtime for apps: same controller, same policies, no processes, no sockets, and a clock that only moves when told.

    runtime = Runtime(app, takes={"detect": "20ms"}, mocks={"recognise": lambda crop: "text"})
    assert runtime.call("read_page", image=page) == ["text"]
    assert runtime.now_ms == 20

Functions run in this process when their batch ends; how long they took is what `takes` says, so a test of deadlines,
batches or rejections gives the same result on every machine.

`Server` is for tests over HTTP: the real server on a free port, with functions in threads of the test:

    with Server(app, mocks={"recognise": lambda crop: "text"}) as server:
        assert httpx.post(f"{server.url}/v1/workflows/read_page", content=page).json() == ["text"]
        assert server.client.call("read_page", {"image": page}) == ["text"]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from lamina import encoding, policies
from lamina.core.actions import Action, FailCall, Kill, Load, Reply, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, CallCancelled, DeviceJoined, Event, InstanceLost, InstanceReady, JobOutcome
from lamina.core.policy import DispatchRole
from lamina.drivers.driver import Ending, exception_for
from lamina.drivers.virtual import DeviceChange, Scheduled, VirtualDriver
from lamina.engines.in_process import run_mock
from lamina.errors import BadValue, Cancelled, Conflict
from lamina.expr import evaluate
from lamina.gateway.local_server import LocalServer
from lamina.plugins import DEFAULT_POLICY
from lamina.policies import new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sdk.app import App
from lamina.sdk.app_state import WHICH_REQUEST, BatchState
from lamina.sdk.binding import bind_arguments
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.runner import Runner
from lamina.sim.hardware_model import HardwareModel
from lamina.types import DeviceSpec, SliceLimits, call_for
from lamina.units import parse_us
from lamina.values.run_values import RunValues
from lamina.worker.job_codec import error_info

Step = Callable[..., Any]


class Server(LocalServer):
    """An app behind HTTP on a free port, for the time of a `with`. Functions run in threads of this process, eight batches at
    once, so that mocks, `monkeypatch`, a debugger and coverage see them; with `in_process=False` in workers, as when served."""

    def __init__(self, app: App, *, in_process: bool = True, units: int = 8, **options: Any) -> None:
        super().__init__(app, in_process=in_process, units=units, **options)


class Pending:
    """A submitted call. It proceeds when the clock does."""

    def __init__(self, runtime: Runtime, call_id: str) -> None:
        self._runtime = runtime
        self.id = call_id
        self.reply: Reply | None = None
        self._value: Any = None
        self._error: Exception | None = None

    def _on_end(self, ending: Ending) -> None:
        data = self._runtime._data
        if isinstance(ending, Reply):
            self.reply = ending
            self._value = encoding.decode(data.result(ending.call_id))
        else:
            failure = ending if isinstance(ending, FailCall) else None
            self._error = exception_for(ending, data.error(ending.call_id, failure))

    @property
    def done(self) -> bool:
        return self.reply is not None or self._error is not None

    def result(self) -> Any:
        """The value, or the error raised; moves the clock until one of them is there."""
        self._runtime.run_until(lambda: self.done)
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        self._runtime.post(CallCancelled(self.id))


class Runtime:
    """An app on a virtual clock.

    `takes` gives the time of a batch per function: one figure ("5ms"), or a function of the batch size in milliseconds. What
    is not named takes `default_takes`. `mocks` stand in for functions; they get one call's arguments.
    """

    def __init__(
        self,
        app: App,
        *,
        mocks: Mapping[str, Step] | None = None,
        takes: Mapping[str, str | Callable[[int], float]] | None = None,
        default_takes: str = "1ms",
        load_takes: str = "0ms",
        policy: str | DispatchRole = DEFAULT_POLICY,
        devices: list[DeviceSpec] | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._app = app
        for name in (*(mocks or {}), *(takes or {})):
            if name not in app.functions:
                raise BadValue(f"{name!r} is no function of this app", hint=f"there are {', '.join(app.functions)}")
        self.devices = devices or [
            DeviceSpec(
                id="test0",
                kind="test",
                family=family,
                units=8,
                memory_mib=1_000_000,
                limits=SliceLimits(batches_per_instance=1 if family == "cpu" else 0),
            )
            for family in (("cpu",) if all(f.spec.gpu != "must" for f in app.functions.values()) else ("gpu",))
        ]
        table = ProfileTable(self._profiles(takes or {}, default_takes, parse_us(load_takes, "load_takes")), margin=2 * noise)
        self.controller = new_controller(policies.build(policy) if isinstance(policy, str) else policy, table)
        self._data = RunValues(None, None)
        hardware = HardwareModel(table, random.Random(seed), noise, 0.0)
        self._executor = _InProcessExecutor(app, self.controller, hardware, self._data, dict(mocks or {}), self.devices)
        self._driver = VirtualDriver(
            self.controller, self._executor, self._data, observers=[lambda *_: self.controller.state.check()]
        )
        self._count = 0
        for device in self.devices:
            self.post(DeviceJoined(device))
        self.post(app.deployed())

    @property
    def now_us(self) -> int:
        return self._driver.now_us()

    @property
    def batches(self) -> list[StartBatch]:
        """Every batch so far, in order."""
        return self._executor.batches

    @property
    def now_ms(self) -> float:
        return self.now_us / 1000

    def call(self, name: str, /, *args: Any, **inputs: Any) -> Any:
        """Submit a call and move the clock until it is answered."""
        return self.submit(name, *args, **inputs).result()

    def submit(self, name: str, /, *args: Any, **inputs: Any) -> Pending:
        target = self._app.target(name)
        named = bind_arguments(target.params, args, inputs)
        self._count += 1
        pending = Pending(self, f"call-{self._count}")
        call = call_for(pending.id, name, self.now_us, self.controller.flows[name].slo)
        self._driver.submit(call, {key: encoding.encode(value) for key, value in named.items()}, pending._on_end)
        return pending

    def advance(self, time: str) -> None:
        """Move the clock by "5ms"; everything due by then happens."""
        self.run_until(lambda: False, self.now_us + parse_us(time))

    def run_until(self, reached: Callable[[], bool], limit_us: int | None = None) -> None:
        """Move the clock until this holds, or to the limit."""
        if limit_us is not None:
            self._driver.run(until=reached, until_us=limit_us)
            return
        self._driver.run(until=lambda: reached() or not self.controller.state.runs)
        if not reached():
            raise Cancelled("nothing is left that could happen, and this has not")

    def post(self, event: Event) -> None:
        """Let something happen now: a fault, for instance."""
        self._driver.post(event)

    def _profiles(self, takes: Mapping[str, str | Callable[[int], float]], default: str, load_us: int) -> list[Profile]:
        found = []
        for name, function in self._app.functions.items():
            time = takes.get(name, default)
            sizes = sorted({1, 2, 4, 8, 16, 32, 64, function.spec.max_batch})
            points = [
                Point(batch=n, units=1, p50_us=time(n) * 1000 if callable(time) else float(parse_us(time, f"takes[{name}]")))
                for n in sizes
                if n <= function.spec.max_batch
            ]
            kinds = {device.kind for device in self.devices}
            found += [Profile(function=name, device=kind, points=points, load_us=load_us) for kind in sorted(kinds)]
        return found


class _StaleRead(Conflict):
    """A request that has read what was changed meanwhile: it runs again."""


class _InProcessExecutor:
    """Functions run in this process, when their batch ends."""

    def __init__(
        self,
        app: App,
        controller: Controller,
        hardware: HardwareModel,
        data: RunValues,
        mocks: Mapping[str, Step],
        devices: list[DeviceSpec],
    ) -> None:
        self._app = app
        self._controller = controller
        self._hardware = hardware
        self._data = data
        self._mocks = mocks
        self._kinds = {device.id: device.kind for device in devices}
        self._runners: dict[str, Runner] = {}
        self._ends_us: dict[int, int] = {}
        self.batches: list[StartBatch] = []

    def before_event(self, now_us: int, event: Event | DeviceChange) -> Scheduled:
        return ()

    def perform(self, now_us: int, action: Action) -> Scheduled:
        match action:
            case StartBatch():
                return self._start(now_us, action)
            case Load():
                load_us = self._hardware.load_us(action.function, self._kinds[action.device])
                return ((now_us + load_us, InstanceReady(action.instance, load_us)),)
            case Kill():
                return ((now_us, InstanceLost(action.instance, action.reason)),)
            case _:
                return ()

    def _start(self, now_us: int, action: StartBatch) -> Scheduled:
        self.batches.append(action)
        units = action.mask.bit_count()
        took_us = self._hardware.batch_us(action.function, self._kinds[action.device], len(action.jobs), units)
        end_us = max(now_us, self._ends_us.pop(action.behind, 0)) + took_us
        self._ends_us[action.batch_id] = end_us

        def finish() -> Event | None:
            if action.batch_id not in self._controller.state.batches:
                return None
            return BatchFinished(action.batch_id, took_us, tuple(self._run(action)))

        return ((end_us, finish),)

    def _run(self, action: StartBatch) -> list[JobOutcome]:
        calls = []
        for job in action.jobs:
            given = self._data.inputs(job)
            opened = {leaf: encoding.decode(stored) for leaf, stored in given.leaves if isinstance(stored, bytes)}
            calls.append({name: evaluate(expr, opened.__getitem__) for name, expr in given.args.items()})
        outcomes = []
        for job, result in zip(action.jobs, self._results(action.function, calls), strict=True):
            encoded = b""
            try:
                encoded = encoding.encode(result) if not isinstance(result, Exception) else b""
            except BadValue as error:  # as in a worker: the function's fault
                result = TypeError(f"its result: {error.message}; {error.hint}")
            if isinstance(result, Exception):
                self._data.put_error(job, error_info(result))
                outcomes.append(JobOutcome(False, "function-failed", type(result).__name__, isinstance(result, _StaleRead)))
            else:
                self._data.put(job, encoded)
                outcomes.append(JobOutcome())
        return outcomes

    def _results(self, name: str, calls: list[dict[str, Any]]) -> list[Any]:
        mock = self._mocks.get(name)
        if mock is None:
            if name not in self._runners:
                self._runners[name] = self._app.functions[name].open()
            return self._run_batch(self._runners[name], calls, self._app.functions[name].spec.max_batch > 1)
        return run_mock(mock, calls)

    def _run_batch(self, runner: Runner, calls: list[dict[str, Any]], is_batched: bool) -> list[Any]:
        """What a call changes of the state is kept if it succeeds; `app.state` shows it."""
        local = self._app.local_state
        state = BatchState(lambda place, key: local.read(key))
        whole = WHICH_REQUEST if is_batched else state.transaction(0)
        with active_context(BatchContext(batch=len(calls), transaction=whole, batch_state=state)):
            results = runner.run(calls)
        verdicts = local.commit_batch(state.changes(lambda place: not isinstance(results[place], Exception)))
        for place, verdict in verdicts.items():
            if verdict is not True:
                results[place] = verdict or _StaleRead("state: what was read was changed meanwhile, again and again")
        return results
