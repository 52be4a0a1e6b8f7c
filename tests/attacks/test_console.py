"""The console: what a token that may read can do with it, and what is of its origin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lamina.errors import BadValue
from lamina.gateway.console.what_if import ServerChange
from lamina.gateway.routes.profiles import ServerSnapshot
from tests.gateway.console.emulated_fixture import ask, console_server, in_loop
from tests.serving import write_app

pytest.importorskip("wsproto")


def test_a_policy_that_is_a_file_is_not_run(tmp_path: Path) -> None:
    """To a simulation a path is a policy too. Whoever could read could have any Python file of the server run."""
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()")
    snapshot = ServerSnapshot(functions=[], flows=[], rates={}, profiles=[], devices=[])
    for policy in (str(file), "../policies/edf.py", "edf.py", "_edf", "nothing"):
        with pytest.raises(BadValue, match="policy"):
            ServerChange(policy=policy).check(snapshot)
    ServerChange(policy="edf").check(snapshot)


@in_loop
async def test_a_plan_with_such_a_policy_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()")
    async with console_server(tmp_path) as (gateway, admin):
        for _ in range(3):
            assert (await ask(gateway.port, "POST", "/v1/functions/look", {"x": 1})).status == 200
        told = await ask(admin.port, "POST", "/v1/console/plan", {"policy": str(file), "rates": {"look": 1.0}, "seconds": 1})
        assert told.status == 400 and "no" in told.json["detail"]
    assert not (tmp_path / "run").exists()


APP = """
import lamina

app = lamina.App("pages")


@app.function()
def look(x: int) -> int:
    return x


async def web(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<script>fetch('/v1/admin/token/create')</script>"})


app.mount("/", web)
"""


@pytest.mark.live
def test_pages_of_a_web_app_are_not_of_the_origin_of_management(tmp_path: Path) -> None:
    """A page with a script of somebody else's, asked for under /calls, could have used management as the operator who saw it."""
    from tests.gateway.deploy.admin_fixture import managed
    from tests.serving import run

    async def work() -> None:
        async with managed(write_app(tmp_path, APP), tmp_path, console=True) as server, asyncio.timeout(60):
            assert (await server.call("/page", method="GET")).headers["content-type"] == "text/html"
            for path in ("/calls/page", "/calls/", "/calls/v1/../page"):
                found = await server.ask("GET", path)
                assert found.headers["content-type"].partition(";")[0] in ("application/json", "application/problem+json"), path
            assert (await server.ask("GET", "/calls/v1/functions")).status == 200

    run(work)
