"""C4, the class behind it: wherever a callback may raise into a loop that serves others, an exception is injected, and the others
are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.core.actions import Load, StartBatch
from lamina.core.events import CallArrived, Tick
from lamina.durable.loader import RunLoader
from lamina.gateway.bootstrap import Gateway
from lamina.gateway.ingress.messages import ClientGone, IngressMessages
from lamina.gateway.ingress.session import IngressSession
from lamina.gateway.ingress.throttle import HostThrottle
from lamina.ipc import child_process
from lamina.ipc.child_process import ChildProcess
from lamina.ipc.event_loop import Timer, clock_us
from lamina.server.grpc import GrpcServer
from lamina.server.http1 import HttpConnection
from lamina.store.callbacks import CallbackQueue
from lamina.store.runs import LoadedRun, RunRow
from tests.attacks.gateways import emulated
from tests.attacks.test_c4_quarantine import ASYNC, until_state
from tests.serving import Browser, run


class Injected(Exception):
    """A defect of the server."""


def failing_once(real: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    left = [True]

    def call(*arguments: Any) -> Any:
        if left[0] and when(*arguments):
            left[0] = False
            raise Injected("here")
        return real(*arguments)

    return call


def served(inject: Callable[[Gateway], None], work: Callable[[Gateway, Browser], Any], store: str = "") -> None:
    async def all_of_it() -> None:
        async with emulated(store, policy="fifo") as gateway, Browser(gateway.port) as browser:
            assert (await browser.post("/v1/functions/echo", 1)).status == 200
            inject(gateway)
            await work(gateway, browser)
            assert (await browser.post("/v1/functions/echo", 1)).status == 200
            assert not gateway.driver.calls_in_flight and not gateway.driver.controller.state.runs
            gateway.driver.controller.state.check()

    run(all_of_it)


async def one_of_many_fails(gateway: Gateway, browser: Browser) -> None:
    """Eight calls at once, of which one meets the defect: seven are answered as ever."""

    async def call() -> int:
        async with Browser(gateway.port) as another:
            return (await another.post("/v1/functions/echo", 1)).status

    found = await asyncio.gather(*(call() for _ in range(8)))
    assert sorted(found) == [200] * 7 + [500], found


# ------------------------------------------------------------------------- the driver and the controller


def test_a_call_that_cannot_be_admitted_is_answered_and_alone() -> None:
    def inject(gateway: Gateway) -> None:
        handlers = gateway.driver.controller._handlers
        handlers[CallArrived] = failing_once(handlers[CallArrived])

    served(inject, one_of_many_fails)


def test_a_job_whose_outcome_cannot_be_handled_spoils_no_other_of_its_batch() -> None:
    def inject(gateway: Gateway) -> None:
        calls = gateway.driver.controller._calls
        calls.on_job_succeeded = failing_once(calls.on_job_succeeded)  # type: ignore[method-assign]

    served(inject, one_of_many_fails)


def test_an_answer_that_cannot_be_made_is_still_an_answer() -> None:
    def inject(gateway: Gateway) -> None:
        metrics = gateway.router.call_handler.metrics
        metrics.on_call_ended = failing_once(metrics.on_call_ended)  # type: ignore[method-assign]

    served(inject, one_of_many_fails)


def test_a_policy_that_raises_is_asked_again_and_costs_no_call() -> None:
    def inject(gateway: Gateway) -> None:
        controller = gateway.driver.controller
        controller._dispatch = failing_once(controller._dispatch)  # type: ignore[method-assign]

    async def work(gateway: Gateway, browser: Browser) -> None:
        first = asyncio.ensure_future(browser.post("/v1/functions/echo", 1))
        async with Browser(gateway.port) as another:
            assert (await another.post("/v1/functions/echo", 2)).status == 200
        assert (await first).status == 200

    served(inject, work)


@pytest.mark.parametrize("kind", [StartBatch, Load])
def test_an_action_that_cannot_be_performed_is_answered_by_its_failure(kind: type) -> None:
    def inject(gateway: Gateway) -> None:
        engine = gateway.driver.engine
        engine.perform = failing_once(engine.perform, lambda action: isinstance(action, kind))  # type: ignore[method-assign]

    async def work(gateway: Gateway, browser: Browser) -> None:
        assert (await browser.post("/v1/functions/echo", 1)).status in (200, 500, 503)

    served(inject, work)


def test_an_observer_that_raises_is_the_only_one_that_misses_something() -> None:
    def inject(gateway: Gateway) -> None:
        def observe(*_: object) -> None:
            raise Injected("here")

        gateway.driver._observers.insert(0, observe)

    async def work(gateway: Gateway, browser: Browser) -> None:
        before = gateway.metrics.exposition()
        assert (await browser.post("/v1/functions/echo", 1)).status == 200
        assert gateway.metrics.exposition() != before

    served(inject, work)


@pytest.mark.slow
def test_a_tick_that_fails_is_not_the_last(tmp_path: Path) -> None:
    def inject(gateway: Gateway) -> None:
        engine = gateway.driver.controller._engine
        engine._fire_timer = failing_once(engine._fire_timer)  # type: ignore[method-assign]

    async def work(gateway: Gateway, browser: Browser) -> None:
        ids = [(await browser.post("/v1/workflows/nap", {}, **ASYNC)).json["id"] for _ in range(4)]
        states = [(await until_state(browser, id, "succeeded", "quarantined"))["state"] for id in ids]
        assert sorted(states) == ["quarantined", "succeeded", "succeeded", "succeeded"]

    served(inject, work, str(tmp_path / "runs.db"))


@pytest.mark.slow
def test_a_tick_whose_housekeeping_fails_is_not_the_last() -> None:
    def inject(gateway: Gateway) -> None:
        failures = gateway.driver.controller._failures
        failures.kill_hung = failing_once(failures.kill_hung)  # type: ignore[method-assign]

    async def work(gateway: Gateway, browser: Browser) -> None:
        ticks = []
        gateway.driver.add_observer(lambda now_us, event, actions: ticks.append(now_us) if isinstance(event, Tick) else None)
        gateway.driver.controller._housekeeping_at_us = 0
        gateway.driver.post(Tick())
        seen = len(ticks)
        while len(ticks) <= seen:
            await asyncio.sleep(0.01)

    served(inject, work)


def test_a_timer_whose_callback_raises_calls_the_next_one() -> None:
    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        timer, fired = Timer(asyncio.get_running_loop()), asyncio.Event()

        def fail() -> None:
            raise Injected("here")

        timer.call_at(clock_us(), fail)
        timer.call_at(clock_us(), fired.set)
        await fired.wait()
        timer.close()

    run(work)


# ---------------------------------------------------------------------------- durable runs and the store


@pytest.mark.parametrize("place", ["submit", "journal", "outcome", "counted", "listener"])
def test_a_durable_run_that_meets_a_defect_holds_up_no_other(tmp_path: Path, place: str) -> None:
    def inject(gateway: Gateway) -> None:
        driver, durable = gateway.driver, gateway.durable
        assert durable is not None
        if place == "submit":
            driver.submit = failing_once(driver.submit)  # type: ignore[method-assign]
        elif place == "journal":
            driver._append_journal = failing_once(driver._append_journal)
        elif place == "outcome":
            durable._outcome_of = failing_once(durable._outcome_of)  # type: ignore[method-assign]
        elif place == "counted":
            durable._on_end = failing_once(durable._on_end)
        else:
            durable._notify = failing_once(durable._notify)  # type: ignore[method-assign]

    async def work(gateway: Gateway, browser: Browser) -> None:
        ids = [(await browser.post("/v1/workflows/twice", 1, **ASYNC)).json["id"] for _ in range(5)]
        states = [(await until_state(browser, id, "succeeded", "quarantined"))["state"] for id in ids]
        assert states.count("succeeded") >= 4
        assert ("quarantined" in states) == (place in ("submit", "journal", "outcome"))
        assert gateway.durable is not None and gateway.durable.resident_count == 0

    served(inject, work, str(tmp_path / "runs.db"))


def test_the_loader_goes_on_after_a_start_that_raised() -> None:
    started: list[str] = []

    def start(loaded: LoadedRun) -> None:
        if not started:
            started.append("failed")
            raise Injected("here")
        started.append(loaded.row.id)

    loader = RunLoader(None, start, lambda exclude: True)  # type: ignore[arg-type]
    rows = [RunRow(f"{number:024x}", "function", "f", "", "queued", 0, 0.0, 1, 1, 0, 0, 0, "") for number in range(3)]
    loader._loaded.extend(LoadedRun(row, b"", []) for row in rows)
    with pytest.raises(Injected):
        loader.load_more()
    loader.load_more()
    assert started == ["failed", rows[1].id, rows[2].id]


def test_a_callback_of_the_store_that_raises_keeps_none_from_being_called() -> None:
    async def work() -> None:
        queue, called = CallbackQueue(asyncio.get_running_loop()), asyncio.Event()

        def fail(_: object) -> None:
            raise Injected("here")

        queue.post([(fail, None, True), (fail, None, False), (lambda _: called.set(), None, True)])
        await called.wait()

    run(work)


# --------------------------------------------------------------------------------- servers and processes


class _Broken:
    """A connection whose timeouts cannot be checked."""

    def __init__(self) -> None:
        self.aborted = False

    def check_timeouts(self, now_s: float) -> None:
        raise Injected("here")

    def abort(self) -> None:
        self.aborted = True


class _Sound(_Broken):
    def __init__(self) -> None:
        super().__init__()
        self.checked = asyncio.Event()

    def check_timeouts(self, now_s: float) -> None:
        self.checked.set()


@pytest.mark.slow
def test_one_connection_does_not_keep_the_others_from_their_timeouts() -> None:
    async def work() -> None:
        async with emulated() as gateway:
            broken, sound = _Broken(), _Sound()
            gateway.server.connections |= {broken, sound}  # type: ignore[arg-type]
            await sound.checked.wait()
            sound.checked.clear()
            await sound.checked.wait()
            assert broken.aborted
            gateway.server.connections -= {broken, sound}  # type: ignore[arg-type]

    run(work)


def test_one_grpc_connection_does_not_keep_the_others_from_their_timeouts() -> None:
    async def work() -> None:
        class NoService:
            methods: dict[bytes, Any] = {}

        server = GrpcServer(NoService(), 1_000)  # type: ignore[arg-type]
        broken, sound = _Broken(), _Sound()
        server._connections |= {broken, sound}  # type: ignore[arg-type]
        await server.start("127.0.0.1", 0)
        await sound.checked.wait()
        sound.checked.clear()
        await sound.checked.wait()
        assert broken.aborted
        server._connections -= {broken, sound}  # type: ignore[arg-type]
        await server.stop(1.0)

    run(work)


def test_a_disconnect_of_one_pipelined_request_is_told_to_all() -> None:
    async def work() -> None:
        async with emulated() as gateway:
            connection, told = HttpConnection(gateway.server), []

            def fail() -> None:
                raise Injected("here")

            for told_of in (fail, lambda: told.append(1)):
                connection._start_exchange(True, False, 0).when_disconnected(told_of)
            connection.connection_lost(None)
            assert told == [1]

    run(work)


def test_a_frame_that_cannot_be_handled_is_not_the_last_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "SLICE_S", 60.0)  # on a busy machine a line of the log takes longer than a slice
    seen = []

    def on_frame(frame: Any) -> None:
        if not seen:
            seen.append("failed")
            raise Injected("here")
        seen.append(frame)

    class Reader:
        def feed(self, data: bytes) -> list[int]:
            return list(data)

    process = ChildProcess.__new__(ChildProcess)
    process._reader, process._on_frame, process.pid = Reader(), on_frame, 1  # type: ignore[assignment]
    process._is_cut_off = process._has_ended = process._is_waiting = process._is_write_blocked = False
    process._frames = None
    process.data_received(b"\x01\x02\x03")
    assert seen == ["failed", 2, 3]


def test_a_message_of_an_ingress_process_spoils_none_of_another_client() -> None:
    seen = []

    def on_gone(message: ClientGone) -> None:
        if message.number == 1:
            raise Injected("here")
        seen.append(message.number)

    session = IngressSession.__new__(IngressSession)
    session._handlers = {ClientGone: on_gone}
    session.pending = {}
    session._throttle = HostThrottle()
    session.on_messages(IngressMessages([ClientGone(1), ClientGone(2)]))
    assert seen == [2]
