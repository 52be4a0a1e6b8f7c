"""The page and its figures: policy, size, files, the way to the listener for calls, calls and their remedies."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

import lamina
from lamina.gateway.console.routes import page, static_files
from tests.gateway.console.emulated_fixture import ask, console_server, in_loop
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import write_app

pytestmark = pytest.mark.live

STATIC = Path(lamina.__file__).parent / "gateway" / "console" / "static"


def test_the_page_is_at_most_80_kb_compressed() -> None:
    files = static_files()
    assert {"app.js", "devices.js", "console.css", "vendor/preact.js", "vendor/dagre.js"} <= files.keys()
    assert sum(len(one.packed) for one in files.values()) + len(gzip.compress(page())) <= 80_000
    assert "MIT" in (STATIC / "vendor" / "LICENSES.txt").read_text()


def test_the_page_has_nothing_that_its_policy_forbids() -> None:
    text = page().decode()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", text)
    for name, file in static_files().items():
        source = file.content.decode()
        assert "innerHTML" not in source.replace("dangerouslySetInnerHTML", "").replace(".innerHTML", "", 5) or "vendor" in name
        if name.endswith(".js") and "vendor" not in name:
            assert not re.search(
                r"\beval\(|new Function|document\.write|innerHTML|insertAdjacentHTML|document\.cookie", source
            ), name


@in_loop
async def test_files_views_and_their_headers(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (_, admin):
        found = await ask(admin.port, "GET", "/console")
        policy = found.headers["content-security-policy"]
        assert found.status == 200 and "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy and found.headers["x-frame-options"] == "DENY"
        view = await ask(admin.port, "GET", "/console/runs/0660")
        assert view.body == found.body and view.headers["content-type"].startswith("text/html")
        script = await ask(admin.port, "GET", "/console/app.js", accept_encoding="gzip")
        assert script.headers["content-encoding"] == "gzip" and gzip.decompress(script.body) == static_files()["app.js"].content
        again = await ask(admin.port, "GET", "/console/app.js", if_none_match=script.headers["etag"])
        assert again.status == 304 and not again.body
        for path in ("/console/none.js", "/console/../secret.py", "/console/vendor/../../routes.py"):
            assert (await ask(admin.port, "GET", path)).status == 404


@in_loop
async def test_without_a_console_there_is_none(tmp_path: Path) -> None:
    async with managed(write_app(tmp_path), tmp_path) as server:
        for path in ("/console", "/console/app.js", "/v1/console/feed", "/calls/v1/functions"):
            assert (await server.ask("GET", path)).status == 404


@in_loop
async def test_calls_pass_the_authorization_of_both_listeners(tmp_path: Path) -> None:
    """Where calls need no token and management does, the way through management needs one too."""
    from lamina.access.admin_service import AdminService
    from lamina.access.records import Identity
    from lamina.gateway.deploy.admin_server import open_access
    from lamina.store.open import open_store

    store = open_store(str(tmp_path / "store.db"))
    desk = AdminService(await open_access(store))
    token = (await desk.perform(Identity(), "token/create", {"name": "reader", "scopes": ["read"]}))["token"]
    await store.close()
    async with console_server(tmp_path, admin_host="0.0.0.0") as (gateway, admin):
        assert (await ask(gateway.port, "GET", "/v1/status")).status == 200
        assert (await ask(admin.port, "GET", "/calls/v1/status")).status == 401
        known = {"authorization": f"Bearer {token}"}
        assert (await ask(admin.port, "GET", "/calls/v1/status", **known)).status == 200
        assert (await ask(admin.port, "POST", "/calls/v1/functions/look", 1, **known)).status == 403
        assert (await ask(admin.port, "GET", "/console")).status == 200  # the page itself has nothing to hide


@in_loop
async def test_a_refused_call_is_explained_with_what_would_have_let_it_in(tmp_path: Path) -> None:
    async with console_server(tmp_path, explain=True) as (gateway, admin):
        refused = await ask(gateway.port, "POST", "/v1/functions/look", 1, lamina_deadline_ms="0.3")
        assert refused.status == 429
        rows = (await ask(admin.port, "GET", "/v1/console/calls?outcome=refused")).json["calls"]
        assert [(row["target"], row["reason"]) for row in rows] == [("look", "deadline")]
        told = (await ask(admin.port, "GET", f"/v1/console/calls/{rows[0]['id']}")).json
        assert told["end"]["what"] == "refused: deadline" and told["goal_ms"] == 0.3
        kinds = {one["kind"]: one for one in told["remedies"]}
        assert kinds["time"]["deadline_ms"] == pytest.approx(refused.json["offer_ms"], abs=0.01)
        assert "more than it had" in kinds["time"]["text"]
        assert told["explanation"][0] == "It had 300 µs from its arrival to its answer." and told["like"] == ""
        assert sum(term["ms"] for term in told["terms"]) == pytest.approx(refused.json["offer_ms"] + told["unread_ms"], abs=0.01)
        assert kinds["units"]["helps"] is False and kinds["units"]["alone_ms"] > kinds["units"]["whole_ms"] > 0.3


@in_loop
async def test_calls_are_listed_with_their_batch_and_its_mates(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin):
        for _ in range(3):
            await ask(gateway.port, "POST", "/v1/workflows/both", 1)
        rows = (await ask(admin.port, "GET", "/v1/console/calls?target=both&limit=2")).json["calls"]
        assert len(rows) == 2 and rows[0]["slice"].startswith("h200-0/") and rows[0]["batch"] == 1
        told = (await ask(admin.port, "GET", f"/v1/console/calls/{rows[0]['id']}")).json
        assert [step["function"] for step in told["steps"]] == ["look", "look"] and told["steps"][0]["mates"] == []
        for bad in ("?outcome=nice", "?limit=many", "?limit=9999", "?colour=1"):
            assert (await ask(admin.port, "GET", f"/v1/console/calls{bad}")).status == 400
        assert (await ask(admin.port, "GET", "/v1/console/calls/none")).status == 404


@in_loop
async def test_functions_are_listed_page_by_page(tmp_path: Path) -> None:
    app = lamina.App("many")
    for number in range(700):
        app.function(name=f"f{number:03}", gpu=lamina.GPU(0.2, required=True))(lambda x: x)
    async with console_server(tmp_path, app) as (gateway, admin):
        await ask(gateway.port, "POST", "/v1/functions/f512", 1)
        found = (await ask(admin.port, "GET", "/v1/console/functions?limit=2")).json
        assert found["total"] == 700 and [one["name"] for one in found["functions"]] == ["f512", "f000"]
        found = (await ask(admin.port, "GET", "/v1/console/functions?search=F69&sort=name&offset=8")).json
        assert found["total"] == 10 and [one["name"] for one in found["functions"]] == ["f698", "f699"]
        assert (await ask(admin.port, "GET", "/v1/console/functions?sort=hue")).status == 400


@in_loop
async def test_one_function_has_its_profile_beside_what_was_observed(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin):
        await ask(gateway.port, "POST", "/v1/functions/look", 1)
        found = (await ask(admin.port, "GET", "/v1/console/functions/look")).json
        assert found["max_batch"] == 4 and found["batch_sizes"] == {"<= 1": 1} and found["recent"]["answers"] == 1
        point = next(one for one in found["profile"] if (one["batch"], one["units"]) == (1, 3))
        assert point["profiled_ms"] == pytest.approx(2.0) and point["planned_ms"] > 1
        [seen] = found["observed"]
        assert (seen["batch"], seen["batches"], seen["device"]) == (1, 1, "h200") and seen["p50_ms"] > 0
        assert seen["profiled_ms"] == pytest.approx(6.0 / seen["units"])
        flow = (await ask(admin.port, "GET", "/v1/console/functions/both")).json
        assert flow["kind"] == "workflow" and flow["steps"] == ["look"]
        graph = (await ask(admin.port, "GET", "/v1/console/graph/both")).json
        assert len(graph["boxes"]) == 2 and len(graph["edges"]) == 1
        assert (await ask(admin.port, "GET", "/v1/console/functions/none")).status == 404
