"""State and triggers on real servers: changes are durable, and each trigger starts once, also across crashes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.state.kv_state import StateTable
from lamina.state.triggers import Triggers
from lamina.store.open import open_store
from tests.serving import Answer, Browser, run, write_app

pytestmark = pytest.mark.live

APP = """
import lamina

app = lamina.App("triggered")
one = lamina.Scale(max=1)


@app.function(scale=one)
def mark(key, value):
    app.state.map("seen")[key] = value
    app.state.counter("marks").add(1)


@app.on_change("page/*")
@app.workflow()
async def changed(key, value):
    await mark(key, value)


@app.every("100ms")
@app.function(scale=one)
def tick(due):
    app.state.counter("ticks").add(1)


@app.function(scale=one)
def write(n):
    app.state[f"page/{n}"] = n


@app.function(scale=one)
def add(x):
    app.state.counter("sum").add(x)
    app.state.set("added").add(x)
    return x


@app.workflow()
async def add_twice(x):
    await add(x)
    return await add(x)


@app.function(scale=one)
def look():
    state = app.state
    return {
        "seen": state.map("seen").entries,
        "marks": state.counter("marks").value,
        "ticks": state.counter("ticks").value,
        "sum": state.counter("sum").value,
        "added": len(state.set("added")),
    }
"""


@asynccontextmanager
async def serving(folder: Path, kept: bool = True) -> AsyncIterator[tuple[Gateway, lamina.AsyncClient]]:
    path = write_app(folder, APP)
    store = open_store(str(folder / "runs.db")) if kept else None
    gateway = await open_gateway(open_local(str(path)), store=store)
    try:
        async with lamina.AsyncClient(gateway.url) as client:
            yield gateway, client
    finally:
        await gateway.stop(5)


async def until(client: lamina.AsyncClient, **wanted: Any) -> dict[str, Any]:
    """Looks until the state is at least so far; the test's own limit ends it otherwise."""
    while True:
        seen: dict[str, Any] = await client.call("look", {})
        if all(seen[name] >= value for name, value in wanted.items()):
            return seen
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("kept", [True, False])
def test_a_change_starts_what_watches_it_once_and_a_clock_goes_on(tmp_path: Path, kept: bool):
    async def work() -> dict[str, Any]:
        async with serving(tmp_path, kept) as (_, client):
            for n in (1, 2, 2, 3):  # putting the same again changes nothing
                await client.call("write", {"n": n})
            return await until(client, marks=3, ticks=3)

    seen = run(work)
    assert (seen["seen"], seen["marks"]) == ({"page/1": 1, "page/2": 2, "page/3": 3}, 3)


def test_state_is_there_after_a_restart_and_changes_are_not_told_again(tmp_path: Path):
    async def work(n: int) -> dict[str, Any]:
        async with serving(tmp_path) as (_, client):
            await client.call("write", {"n": n})
            return await until(client, marks=n)

    run(lambda: work(1))
    seen = run(lambda: work(2))
    assert (seen["seen"], seen["marks"]) == ({"page/1": 1, "page/2": 2}, 2)


def test_state_can_be_looked_at_and_changed_from_outside(tmp_path: Path):
    async def work() -> list[Answer]:
        async with serving(tmp_path) as (gateway, client), Browser(gateway.port) as browser:
            answers = [
                await browser.ask("PUT", "/v1/state/page%2F7", b"[7]"),
                await browser.ask("GET", "/v1/state/page%2F7"),
                await browser.ask("PUT", "/v1/state/page%2F7", b"8", if_match='"5"'),
                await browser.ask("GET", "/v1/state?prefix=page"),
            ]
            await until(client, marks=1)  # who watches it was told
            answers += [
                await browser.ask("GET", "/v1/state/seen"),
                await browser.ask("DELETE", "/v1/state/page%2F7"),
                await browser.ask("GET", "/v1/state/page%2F7"),
                await browser.ask("GET", "/v1/state/page%2F7?workflow=changed"),
                await browser.ask("POST", "/v1/state/page%2F7", b"1"),
                await browser.ask("GET", "/v1/state?what=1"),
            ]
            return answers

    put, got, stale, listed, seen, deleted, gone, other, wrong, odd = run(work)
    assert (put.status, put.json) == (200, {"key": "page/7", "version": 1})
    assert got.json == {"key": "page/7", "kind": "value", "version": 1, "value": [7]}
    assert [one["key"] for one in listed.json["keys"]] == ["page/7"]
    assert seen.json["value"] == {"page/7": [7]}
    assert [answer.status for answer in (stale, deleted, gone, other, wrong, odd)] == [409, 204, 404, 404, 405, 400]


class Later:
    """A store that has not answered yet."""

    exists = True

    def read(self, work: Any, done: Any) -> None:
        self.answer = done


def test_clocks_of_a_server_that_has_stopped_do_not_begin_when_what_was_left_is_read_at_last():
    async def work() -> int:
        app, store = lamina.App("late"), Later()
        app.every("100ms")(app.function(name="tick")(lambda due: None))
        triggers = Triggers(StateTable("late"), None, store)  # type: ignore[arg-type]
        triggers.set_app("late", app.triggers)
        triggers.open()
        triggers.close()
        store.answer(([], []))
        return len(triggers._clocks)

    assert run(work) == 0


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = write_app(folder, APP)
    command = [sys.executable, "-m", "lamina", "serve", str(path), "--port", "0", "--json", "--store", str(folder / "runs.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def post(url: str, body: Any, **headers: str) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def test_what_steps_change_is_applied_once_whenever_the_server_is_killed(tmp_path: Path):
    count = 30
    with server(tmp_path) as (process, url):
        for x in range(count):
            post(f"{url}/v1/workflows/add_twice", x, prefer="respond-async")
        while post(f"{url}/v1/functions/look", None)["added"] < 3:
            time.sleep(0.01)
        process.kill()
    with server(tmp_path) as (process, url):
        while any(get(f"{url}/v1/runs?state={state}")["runs"] for state in ("queued", "running")):
            time.sleep(0.02)
        assert post(f"{url}/v1/functions/look", None)["sum"] == 2 * sum(range(count))
