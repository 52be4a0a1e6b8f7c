"""C4: a run that cannot begin is set aside with its error, and the runs behind it begin."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from lamina.cli import root
from lamina.core.events import CallArrived
from lamina.gateway.bootstrap import Gateway
from tests.attacks.gateways import emulated
from tests.serving import Browser, run

ASYNC = {"Prefer": "respond-async"}


class Poisoned(Exception):
    """What a defect of the server would raise."""


@contextmanager
def poison(gateway: Gateway, is_poison: Callable[[Any], bool]) -> Iterator[None]:
    """The controller fails on events that `is_poison` names."""
    controller = gateway.driver.controller
    handlers = controller._handlers
    before = dict(handlers)

    def failing(kind: type) -> Callable[[Any], None]:
        def handle(event: Any) -> None:
            if is_poison(event):
                raise Poisoned(f"{kind.__name__} is too much")
            before[kind](event)

        return handle

    handlers.update({kind: failing(kind) for kind in before})
    try:
        yield
    finally:
        handlers.update(before)


def is_idle_call(event: Any) -> bool:
    return isinstance(event, CallArrived) and event.call.target == "idle"


async def until_state(browser: Browser, id: str, *states: str) -> dict[str, Any]:
    while True:
        shown: dict[str, Any] = (await browser.ask("GET", f"/v1/runs/{id}")).json
        if shown["state"] in states:
            return shown
        await asyncio.sleep(0.005)


def test_a_workflow_without_functions_has_a_cost_limit_like_any_other(tmp_path: Path) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            waited = await browser.post("/v1/workflows/idle", {"x": 1}, lamina_cost_limit="0.5")
            assert waited.status == 200, waited.body
            begun = await browser.post("/v1/workflows/idle", {"x": 1}, lamina_cost_limit="0.5", **ASYNC)
            assert begun.status == 202
            await until_state(browser, begun.json["id"], "succeeded")

    run(work)


def test_runs_that_cannot_begin_are_quarantined_and_the_others_begin(tmp_path: Path) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            with poison(gateway, is_idle_call):
                bad = [(await browser.post("/v1/workflows/idle", {}, **ASYNC)).json["id"] for _ in range(6)]
                good = [(await browser.post("/v1/functions/echo", 1, **ASYNC)).json["id"] for _ in range(4)]
                for id in good:
                    await until_state(browser, id, "succeeded")
                for id in bad:
                    shown = await until_state(browser, id, "quarantined")
                    assert shown["problem"]["code"] == "quarantined"
                    assert "Poisoned" in shown["problem"]["detail"]
                    answer = await browser.ask("GET", f"/v1/runs/{id}/result?wait_ms=60000")
                    assert (answer.status, answer.json["code"]) == (500, "quarantined")
            listed = (await browser.ask("GET", "/v1/runs?state=quarantined")).json["runs"]
            assert sorted(one["id"] for one in listed) == sorted(bad)
            assert all("Poisoned" in one["problem"]["detail"] for one in listed)
            again = await browser.ask("POST", f"/v1/runs/{bad[0]}/retry")
            assert again.status == 202
            await until_state(browser, bad[0], "succeeded")
            assert (await browser.ask("POST", f"/v1/runs/{bad[1]}/cancel")).json["state"] == "cancelled"
            assert gateway.durable is not None and gateway.durable.resident_count == 0
            assert not gateway.driver.calls_in_flight and not gateway.driver.controller.state.runs

    run(work)


def test_a_quarantined_run_holds_up_nothing_after_a_restart(tmp_path: Path) -> None:
    """Six such runs wait in the store, as an earlier server left them; four others are behind them."""
    place = str(tmp_path / "runs.db")

    async def leave() -> list[str]:
        async with emulated(place) as gateway, Browser(gateway.port) as browser:
            assert gateway.durable is not None
            gateway.durable.loader.close()  # it accepts runs, and begins none
            made = [(await browser.post("/v1/workflows/idle", {}, **ASYNC)).json["id"] for _ in range(6)]
            return made + [(await browser.post("/v1/functions/echo", 1, **ASYNC)).json["id"] for _ in range(4)]

    ids = run(leave)
    damage = sqlite3.connect(place)
    damage.execute("UPDATE runs SET inputs = ? WHERE target = 'idle'", (b"\xc1 this is no value",))
    damage.commit()
    damage.close()

    async def take_up() -> None:
        async with emulated(place) as gateway, Browser(gateway.port) as browser:
            for id in ids[6:]:
                await until_state(browser, id, "succeeded")
            for id in ids[:6]:
                await until_state(browser, id, "quarantined")

    run(take_up)


def test_a_run_whose_journal_is_damaged_is_quarantined_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "runs.db")

    async def leave() -> list[str]:
        async with emulated(place) as gateway, Browser(gateway.port) as browser:
            made = [(await browser.post("/v1/workflows/twice", 1, **ASYNC)).json["id"] for _ in range(3)]
            for id in made:
                await until_state(browser, id, "succeeded")
            return made

    ids = run(leave)
    damage = sqlite3.connect(place)
    damage.execute("UPDATE runs SET state = 'running', ended_us = 0, result = NULL, about = NULL")
    damage.execute("UPDATE notes SET body = ? WHERE run = ?", (b"\xc1", ids[0]))
    damage.commit()
    damage.close()

    async def take_up() -> None:
        async with emulated(place) as gateway, Browser(gateway.port) as browser:
            shown = await until_state(browser, ids[0], "quarantined")
            assert "journal" in shown["problem"]["detail"]
            for id in ids[1:]:
                await until_state(browser, id, "succeeded")

    run(take_up)


def test_a_waited_for_call_that_fails_on_the_way_in_leaves_nothing_in_the_books() -> None:
    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            driver = gateway.driver
            with poison(gateway, is_idle_call):
                answer = await browser.post("/v1/workflows/idle", {})
            assert (answer.status, answer.json["code"]) == (500, "internal")
            assert not driver.calls_in_flight and not driver.data._runs and not driver.controller.state.runs
            assert (await browser.post("/v1/functions/echo", 5)).status == 200
            started_s = asyncio.get_running_loop().time()
            await gateway.stop(30.0)
            assert asyncio.get_running_loop().time() - started_s < 20.0, "a stop waits for calls in the books"

    run(work)


def test_the_command_lists_quarantined_runs_with_their_errors(tmp_path: Path) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            with poison(gateway, is_idle_call):
                id = (await browser.post("/v1/workflows/idle", {}, **ASYNC)).json["id"]
                await until_state(browser, id, "quarantined")
            await browser.post("/v1/functions/echo", 1, **ASYNC)
            ask = ["runs", "ls", "--quarantined", "--url", gateway.url]
            shown = await asyncio.to_thread(CliRunner().invoke, root, ask)
            assert id in shown.output and "Poisoned" in shown.output and "echo" not in shown.output
            as_json = await asyncio.to_thread(CliRunner().invoke, root, [*ask, "--json"])
            assert [one["id"] for one in json.loads(as_json.output)] == [id]

    run(work)
