"""Deployments under durable runs and triggers: running ones keep their version, triggers start the new one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.deploy.admin_fixture import Managed, managed
from tests.gateway.deploy.test_deployments import settled
from tests.serving import run

pytestmark = pytest.mark.live

APP = """
import time
from pathlib import Path
import lamina
app = lamina.App("shop")
one = lamina.Scale(min=1, max=1)
here = Path({here!r})

@app.function(scale=one)
def first(x):
    return ["{version}", x]

@app.function(scale=one)
def wait(x):
    while not (here / "go").exists():
        time.sleep(0.01)
    return x

{trigger}
@app.workflow()
def order(x=0):
    return {steps}

{more}
"""
CLOCK = """
@app.every("100ms")
@app.function(scale=one)
def tick(due):
    app.state.counter("{name}").add(1)
"""


def source(here: Path, version: str, steps: str = "first(wait(first(x)))", clock: str = "", trigger: str = "") -> str:
    more = CLOCK.format(name=clock) if clock else ""
    return APP.format(here=str(here), version=version, steps=steps, more=more, trigger=trigger)


async def started(server: Managed, **headers: str) -> str:
    answer = await server.call("/v1/workflows/order", 7, Prefer="respond-async", **headers)
    assert answer.status == 202, answer.body
    return str(answer.json["id"])


async def ended(server: Managed, run_id: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await server.call(f"/v1/runs/{run_id}", method="GET")).json
        if found["state"] not in ("queued", "running"):
            return found
        await asyncio.sleep(0.02)


async def counted(server: Managed, name: str) -> int:
    answer = await server.call(f"/v1/state/{name}", method="GET")
    return int(answer.json["value"]) if answer.status == 200 else 0


async def until_counted(server: Managed, name: str, more_than: int = 0) -> int:
    while (count := await counted(server, name)) <= more_than:
        await asyncio.sleep(0.02)
    return count


def app_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "app.py"
    path.write_text(text)
    return path


def test_a_durable_run_under_way_goes_on_with_the_steps_it_began_with_and_survives_a_restart_as_well(tmp_path: Path) -> None:
    """The second version's workflow has other steps: the run keeps its own, with functions as they are now."""
    app = app_file(tmp_path, source(tmp_path, "v0"))
    kept = tmp_path / "kept"

    async def work() -> tuple[Any, Any]:
        async with managed(app, kept, runs=True, grace_s=0.2) as server:  # the old run is to outlive it
            old = await started(server)
            while (await server.call(f"/v1/runs/{old}/history", method="GET")).body.count(b'"first"') < 1:
                await asyncio.sleep(0.02)
            assert (await server.deploy("shop", source(tmp_path, "v1", steps="first(x)"))).status == 200
            await settled(server)
            new = await ended(server, await started(server))
        (tmp_path / "go").touch()
        async with managed(app, kept, runs=True) as server:
            await ended(server, old)
            result = (await server.call(f"/v1/runs/{old}/result", method="GET")).json
            return result, new["state"]

    result, new_state = run(work)
    assert result == ["v1", ["v0", 7]] and new_state == "succeeded"


def test_triggers_come_go_and_come_back_with_the_version_that_has_them(tmp_path: Path) -> None:
    app = app_file(tmp_path, source(tmp_path, "v0"))

    async def work() -> list[Any]:
        async with managed(app, tmp_path / "kept", runs=True) as server:
            await server.deploy("shop", source(tmp_path, "v1", clock="one"))
            ones = await until_counted(server, "one")
            await server.deploy("shop", source(tmp_path, "v2", clock="two"))
            twos = await until_counted(server, "two")
            (listed,) = (await server.ask("GET", "/v1/apps")).json
            ones = await counted(server, "one")
            await until_counted(server, "two", twos + 2)
            stopped = await counted(server, "one") - ones
            await settled(server)
            await server.ask("POST", "/v1/apps/shop/rollback", b"{}")
            await settled(server)
            back = await until_counted(server, "one", ones + 1) > ones
            await server.ask("POST", "/v1/apps/shop/rollback", b'{"version": 0}')
            await settled(server)
            (last,) = (await server.ask("GET", "/v1/apps")).json
            gone = await server.call("/v1/functions/tick", "now")
            return [listed["triggers"], stopped <= 1, back, last["triggers"], gone.status]

    assert run(work) == [["every/tick/100000us"], True, True, [], 404]


def test_a_second_server_goes_on_with_the_triggers_of_what_was_deployed_last(tmp_path: Path) -> None:
    app = app_file(tmp_path, source(tmp_path, "v0", clock="zero"))

    async def work() -> tuple[int, int]:
        async with managed(app, tmp_path / "kept", runs=True) as server:
            await server.deploy("shop", source(tmp_path, "v1", clock="one"))
            await until_counted(server, "one")
        async with managed(app, tmp_path / "kept", runs=True) as server:
            before = await counted(server, "zero"), await counted(server, "one")
            ones = await until_counted(server, "one", before[1] + 2)
            return await counted(server, "zero") - before[0], ones - before[1]

    zeros, ones = run(work)
    assert (zeros, ones >= 3) == (0, True)


def test_a_tenant_cannot_roll_back_what_is_the_operators(tmp_path: Path) -> None:
    app = app_file(tmp_path, source(tmp_path, "v0"))

    async def work() -> tuple[int, int]:
        async with managed(app, tmp_path / "kept") as server:
            token = await server.token("deploy", tenant="acme")
            await server.deploy("shop", source(tmp_path, "v1"))
            answer = await server.ask("POST", "/v1/apps/shop/rollback", b"{}", token)
            return answer.status, server.admin.deployments.active.apps["shop"].number

    assert run(work) == (403, 1)
