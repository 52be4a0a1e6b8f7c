"""`GET /v1/explain/ID`: why a call was rejected, delayed or served as it was, on a server that writes no log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lamina
from lamina.access.admin_service import AdminService
from lamina.bootstrap import open_emulated
from lamina.cli import root
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_server import open_access
from lamina.gateway.routes import explain
from lamina.gateway.routes.explain import SAMPLED_BURST
from lamina.predict.profile import Point, Profile
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import ROOT
from tests.serving import Browser, run, served, write_app

UNITS = (1, 2, 4, 8)


def app() -> lamina.App:
    """Calls of 30 ms; `hopeless` would have to be done in 5 ms."""
    made = lamina.App("explained")
    gpu, one = lamina.GPU(0.25), lamina.Scale(min=1, max=1)

    @made.function(scale=one, gpu=gpu, slo="500ms")
    def thirty(x: Any) -> Any:
        return x

    @made.function(scale=one, gpu=gpu, slo="5ms")
    def hopeless(x: Any) -> Any:
        return x

    @made.workflow(slo="5s")
    def twice(x: Any) -> Any:
        return thirty(thirty(x))

    return made


def whole_device() -> lamina.App:
    made = lamina.App("whole")

    @made.function(scale=lamina.Scale(min=1, max=1), gpu=lamina.GPU(1.0))
    def second(x: Any) -> Any:
        return x

    return made


def profile(name: str, us: int) -> Profile:
    points = [Point(batch=1, units=units, p50_us=us) for units in UNITS]
    return Profile(function=name, device="h200", points=points, load_us=1_000)


PROFILES = [profile("thirty", 30_000), profile("hopeless", 30_000), profile("second", 300_000)]


@contextlib.asynccontextmanager
async def gateway(made: lamina.App | None = None, **options: Any) -> AsyncIterator[Gateway]:
    found = await open_gateway(open_emulated(made or app(), "h200", PROFILES), **options)
    try:
        while not found.is_ready():
            await asyncio.sleep(0.001)
        yield found
    finally:
        await found.stop(0.1)


async def explained(browser: Browser, call_id: str, **headers: str) -> dict[str, Any]:
    answer = await browser.ask("GET", f"/v1/explain/{call_id}", **headers)
    assert answer.status == 200, answer.body
    return dict(answer.json)


@pytest.mark.live
@pytest.mark.parametrize("ingress", [0, 1])
def test_a_call_that_was_served_says_where_and_how_long(tmp_path: Path, ingress: int):
    async def work() -> None:
        async with served(write_app(tmp_path), policy="frontier", ingress=ingress) as server, Browser(server.port) as browser:
            answer = await browser.post("/v1/functions/echo", 7)
            told = await explained(browser, answer.headers["lamina-call-id"])
            assert told["target"] == "echo" and told["end"]["what"] == "in time"
            assert told["steps"][0]["slice"] == answer.headers["lamina-slice"]
            assert told["steps"][0]["took_ms"] > 0 and told["age_ms"] >= 0
            bad = await browser.ask("POST", "/v1/functions/echo", b"{", "application/json")
            end = (await explained(browser, bad.json["id"]))["end"]
            assert (bad.status, end["what"]) == (400, "refused: bad-value") and "before the controller" in end["why"]

    run(work)


def test_a_rejected_call_names_the_rule_and_what_was_weighed():
    async def work() -> None:
        async with gateway() as server, Browser(server.port) as browser:
            answer = await browser.post("/v1/functions/thirty", 1, lamina_deadline_ms="20")
            assert answer.status == 429
            end = (await explained(browser, answer.json["id"]))["end"]
            assert end["what"] == "refused: deadline" and end["why"]["rule"] == "deadline"
            assert end["why"]["expected_ms"] > end["why"]["allowed_ms"]
            assert end["offer_ms"] == answer.json["offer_ms"]
            arguments = ["explain", answer.json["id"], "--url", server.url]
            said = await asyncio.to_thread(lambda: CliRunner().invoke(root, arguments).output)
            assert "refused: deadline, rule: deadline" in said and "It had 20.0 ms from its arrival to its answer." in said
            assert "too late." in said and "in all; it had 20.0 ms" in said

    run(work)


def test_a_rejection_from_the_cache_says_which_call_it_is_like():
    async def work() -> None:
        async with gateway() as server, Browser(server.port) as browser:
            answers = [await browser.post("/v1/functions/hopeless", 1) for _ in range(20)]
            told = [await explained(browser, answer.json["id"]) for answer in answers if answer.status == 429]
            cached = [one for one in told if "rejection cache" in str(one["end"]["why"])]
            assert cached and all(one["end"]["offer_ms"] > 5 for one in cached)
            first = cached[0]["end"]["why"].split()[2]
            assert (await explained(browser, first))["end"]["why"]["rule"] == "deadline"

    run(work)


def test_refusals_before_the_controller_are_sampled_and_cannot_push_calls_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explain, "SAMPLED_PER_S", 1e-6)  # however slow the machine is, none beyond the burst comes in time

    async def work() -> None:
        async with gateway() as server, Browser(server.port) as browser:
            answer = await browser.post("/v1/functions/thirty", 1)
            for _ in range(SAMPLED_BURST + 300):
                last = await browser.ask("POST", "/v1/functions/nothing-here", b"1")
            assert server.driver.recorder.packed_bytes < 400 * (SAMPLED_BURST + 300)
            assert (await explained(browser, answer.headers["lamina-call-id"]))["end"]["what"] == "in time"
            unknown = await browser.ask("GET", f"/v1/explain/{last.json['id']}")
            assert unknown.status == 404 and "50 a second" in unknown.json["hint"]

    run(work)


def test_a_call_in_flight_says_what_it_waits_for():
    """The function takes the whole device: one batch runs, one is booked behind it, one waits."""

    async def work() -> None:
        async with gateway(whole_device()) as server, contextlib.AsyncExitStack() as stack:
            browsers = [await stack.enter_async_context(Browser(server.port)) for _ in range(4)]
            runs, calls = server.driver.controller.state.runs, []
            for place, browser in enumerate(browsers[:3]):
                calls.append(asyncio.create_task(browser.post("/v1/functions/second", 1)))
                while len(runs) <= place:
                    await asyncio.sleep(0.001)
            last = list(runs)[2]
            told = await explained(browsers[3], last)
            while not told["waiting"] or not told["waiting"][0]["delay"]:
                told = await explained(browsers[3], last)
            assert told["waiting"][0]["function"] == "second" and told["waiting"][0]["delay"].startswith("no slot")
            assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200, 200]
            assert (await explained(browsers[3], last))["steps"][0]["delay"].startswith("no slot")

    run(work)


def test_a_durable_run_is_told_by_its_id(tmp_path: Path):
    async def work() -> None:
        store = open_store(str(tmp_path / "runs.db"))
        async with gateway(store=store) as server, Browser(server.port) as browser:
            started = await browser.post("/v1/workflows/twice", 1, prefer="respond-async")
            run_id = started.json["id"]
            while (await browser.ask("GET", f"/v1/runs/{run_id}")).json["state"] != "succeeded":
                await asyncio.sleep(0.01)
            told = await explained(browser, run_id)
            assert told["target"] == "twice" and len(told["steps"]) == 2 and told["end"]["what"] == "in time"

    run(work)


def test_a_tenant_sees_its_own_calls_and_no_others(tmp_path: Path):
    async def work() -> None:
        access = await open_access(open_store(str(tmp_path / "store.db")))
        tokens = {}
        for tenant in ("acme", "evil", ""):
            if tenant:
                await AdminService(access).perform(ROOT, "tenant/set", {"name": tenant})
            given = {"name": f"t{tenant}", "tenant": tenant, "scopes": ["read", "invoke"]}
            made = await AdminService(access).perform(ROOT, "token/create", given)
            tokens[tenant] = f"Bearer {made['token']}"
        async with gateway(access=access, listen=ListenConfig(host="0.0.0.0")) as server, Browser(server.port) as browser:
            answer = await browser.post("/v1/functions/thirty", 1, authorization=tokens["acme"])
            where = f"/v1/explain/{answer.headers['lamina-call-id']}"
            said = {tenant: (await browser.ask("GET", where, authorization=token)).status for tenant, token in tokens.items()}
            assert said == {"acme": 200, "evil": 404, "": 200}
            refused = await browser.post("/v1/functions/thirty", 1)
            where = f"/v1/explain/{refused.json['id']}"
            said = {tenant: (await browser.ask("GET", where, authorization=token)).status for tenant, token in tokens.items()}
            assert (refused.status, said) == (401, {"acme": 404, "evil": 404, "": 200})
            assert (await browser.ask("GET", where)).status == 401

    run(work)


@pytest.mark.parametrize(("path", "status"), [("/v1/explain/" + "x" * 65, 400), ("/v1/explain/%ff", 404)])
def test_an_id_that_is_none_is_said_to_be_none(path: str, status: int):
    async def work() -> None:
        async with gateway() as server, Browser(server.port) as browser:
            assert (await browser.ask("GET", path)).status == status
            assert (await browser.ask("POST", path)).status == 405

    run(work)


@pytest.mark.live
def test_the_event_log_of_a_server_is_there_a_moment_after_a_call_and_survives_kill_9(tmp_path: Path):
    log = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "lamina", "serve", str(write_app(tmp_path)), "--port", "0", "--json", "--log", str(log)]
    with subprocess.Popen([*command, "--store", "none"], stdout=subprocess.PIPE, env={**os.environ}) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            with lamina.Client(url) as client:
                call = client.call_detailed("echo", {"x": 1})
            until = time.monotonic() + 30
            while f'"{call.call_id}"' not in log.read_text() or '"Reply"' not in log.read_text():
                assert time.monotonic() < until, "the log is not flushed"
                time.sleep(0.02)
        finally:
            server.send_signal(signal.SIGKILL)
    said = CliRunner().invoke(root, ["explain", call.call_id, "--log", str(log)]).output
    assert "in time" in said
