"""Triggers as resources: listed, added, changed and removed on a running server; kept over restarts; owned by tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lamina
from lamina.bootstrap import open_local
from lamina.cli.triggers import command
from lamina.errors import BadValue, Conflict, NotFound, UnknownTarget
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run, write_app

pytestmark = pytest.mark.live

APP = """
import lamina

app = lamina.App("desk")


@app.cron("0 3 * * *")
@app.function(scale=lamina.Scale(max=1))
def tidy(due=None, room="hall"):
    app.state.map("tidied")[room] = 1


@app.function(scale=lamina.Scale(max=1))
def seen(key, value):
    app.state.map("seen")[key] = value


@app.function(scale=lamina.Scale(max=1))
def write(key, value):
    app.state[key] = value


@app.function(scale=lamina.Scale(max=1))
def look():
    return {"tidied": app.state.map("tidied").entries, "seen": app.state.map("seen").entries}
"""


async def opened(folder: Path, *, kept: bool = True) -> Gateway:
    store = open_store(str(folder / "runs.db")) if kept else None
    return await open_gateway(open_local(str(write_app(folder, APP))), store=store)


async def until(client: lamina.AsyncClient, name: str, **wanted: Any) -> None:
    while (await client.call("look", {}))[name] != wanted:
        await asyncio.sleep(0.02)


def test_a_trigger_is_added_to_a_running_server_and_starts_its_target(tmp_path: Path) -> None:
    async def work() -> tuple[Any, Any]:
        gateway = await opened(tmp_path)
        try:
            async with lamina.AsyncClient(gateway.url) as client:
                made = await client.add_trigger("often", "tidy", every="100ms", input={"room": "attic"})
                await until(client, "tidied", attic=1)
                await client.add_trigger("watch", "seen", on_change="page/*")
                await client.call("write", {"key": "page/1", "value": "x"})
                await until(client, "seen", **{"page/1": "x"})
                return made, await client.triggers()
        finally:
            await gateway.stop(5)

    made, listed = run(work)
    assert (made["every"], made["state"], made["declared"]) == ("100ms", "active", False)
    assert sorted(one["kind"] for one in listed) == ["change", "cron", "every"]
    assert next(one for one in listed if one["id"] == "often")["started"] >= 1


def test_added_triggers_are_there_after_a_restart_and_removed_ones_are_not(tmp_path: Path) -> None:
    async def work() -> list[list[str]]:
        listed = []
        for turn in range(3):
            gateway = await opened(tmp_path)
            try:
                async with lamina.AsyncClient(gateway.url) as client:
                    listed.append(sorted(one["id"] for one in await client.triggers() if not one["declared"]))
                    if turn == 0:
                        await client.add_trigger("often", "tidy", every="1h")
                        await client.add_trigger("rare", "tidy", cron="0 4 * * *", zone="Europe/Berlin")
                    elif turn == 1:
                        await client.remove_trigger("often")
            finally:
                await gateway.stop(5)
        return listed

    assert run(work) == [[], ["often", "rare"], ["rare"]]


def test_the_same_name_changes_a_trigger(tmp_path: Path) -> None:
    async def work() -> list[Any]:
        gateway = await opened(tmp_path)
        try:
            async with lamina.AsyncClient(gateway.url) as client:
                await client.add_trigger("often", "tidy", every="1h")
                await client.add_trigger("often", "tidy", every="2h", overlap="queue")
                return [one for one in await client.triggers() if one["id"] == "often"]
        finally:
            await gateway.stop(5)

    (only,) = run(work)
    assert (only["every"], only["overlap"]) == ("2h", "queue")


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ({"target": "tidi", "every": "1h"}, "no function or workflow 'tidi'"),
        ({"target": "tidy"}, "nothing says when it starts"),
        ({"target": "tidy", "every": "1h", "cron": "* * * * *"}, "every and cron says when"),
        ({"target": "tidy", "every": "1ms"}, "'1ms' is too often"),
        ({"target": "tidy", "cron": "61 * * * *"}, "61"),
        ({"target": "seen", "every": "1h"}, "cannot be started by itself"),
        ({"target": "tidy", "every": "1h", "overlap": "perhaps"}, "none of skip"),
        ({"target": "tidy", "broker": "yard", "topic": "x"}, "none is called 'yard'"),
        ({"target": "tidy", "every": "1h", "input": {"floor": 1}}, "floor"),
    ],
)
def test_bad_terms_are_refused_with_the_field(tmp_path: Path, terms: dict[str, Any], told: str) -> None:
    async def work() -> str:
        gateway = await opened(tmp_path)
        try:
            async with lamina.AsyncClient(gateway.url) as client:
                with pytest.raises((BadValue, NotFound, UnknownTarget)) as caught:
                    await client.add_trigger("x", **terms)
                assert len(await client.triggers()) == 1
                return str(caught.value)
        finally:
            await gateway.stop(5)

    assert told in run(work)


def test_a_trigger_of_the_app_is_listed_and_cannot_be_removed(tmp_path: Path) -> None:
    async def work() -> Any:
        gateway = await opened(tmp_path)
        try:
            async with lamina.AsyncClient(gateway.url) as client:
                (declared,) = await client.triggers()
                with pytest.raises(Conflict, match="declared in the app"):
                    await client.remove_trigger(declared["id"])
                with pytest.raises(NotFound):
                    await client.remove_trigger("nothing")
                return declared
        finally:
            await gateway.stop(5)

    declared = run(work)
    assert declared["cron"] == "0 3 * * *" and declared["next"].endswith("T03:00:00Z")


def test_without_a_store_none_is_added(tmp_path: Path) -> None:
    async def work() -> None:
        gateway = await opened(tmp_path, kept=False)
        try:
            async with lamina.AsyncClient(gateway.url) as client:
                with pytest.raises(BadValue, match="where there is a store"):
                    await client.add_trigger("often", "tidy", every="1h")
        finally:
            await gateway.stop(5)

    run(work)


TENANTS = """
import lamina
app = lamina.App("{name}-app")

@app.function(scale=lamina.Scale(max=1))
def {name}_job(due=None):
    return 1
"""


def test_triggers_belong_to_the_tenant_of_their_target_and_rest_while_it_is_not_served(tmp_path: Path) -> None:
    async def work() -> tuple[list[int], list[str], str]:
        async with managed(write_app(tmp_path, APP), tmp_path / "kept", runs=True) as server:
            tokens = {name: await server.token("deploy", "read", tenant=name) for name in ("acme", "evil")}
            for name, token in tokens.items():
                assert (await server.deploy(f"{name}-app", TENANTS.format(name=name), token)).status == 200
            terms = {"target": "acme_job", "every": "1h"}

            async def put(token: str, id: str, terms: dict[str, str]) -> int:
                return (await server.call(f"/v1/triggers/{id}", terms, token, "PUT")).status

            statuses = [
                await put(tokens["acme"], "mine", terms),
                await put(tokens["evil"], "mine", terms),  # another's target
                await put(tokens["evil"], "mine", {"target": "evil_job", "every": "1h"}),  # another's name
                await put(tokens["evil"], "own", {"target": "tidy", "every": "1h"}),  # the operator's target
                (await server.call("/v1/triggers/mine", None, tokens["evil"], "GET")).status,
                (await server.call("/v1/triggers/mine", None, tokens["evil"], "DELETE")).status,
            ]
            seen = (await server.call("/v1/triggers", None, tokens["evil"], "GET")).json["triggers"]
            await server.deploy("acme-app", TENANTS.format(name="acme").replace("acme_job", "acme_other"), tokens["acme"])
            while True:
                about = (await server.call("/v1/triggers/mine", None, tokens["acme"], "GET")).json
                if about["state"] != "active":
                    return statuses, [one["id"] for one in seen], about["state"]
                await asyncio.sleep(0.02)

    statuses, seen, state = run(work)
    assert statuses == [201, 404, 409, 403, 404, 404]
    assert seen == [] and state.startswith("resting")


def test_the_command_lists_adds_shows_and_removes(tmp_path: Path) -> None:
    async def work() -> list[str]:
        gateway = await opened(tmp_path)

        def said(*words: str) -> str:
            done = CliRunner().invoke(command, [*words, "--url", gateway.url], standalone_mode=False)
            assert done.exception is None, done.output
            return done.output

        try:
            lines = [("add", "nightly", "tidy", "--cron", "0 4 * * *", "--input", 'room="attic"'), ("ls",), ("show", "nightly")]
            lines += [("rm", "nightly"), ("ls", "--json")]
            return [await asyncio.to_thread(said, *words) for words in lines]
        finally:
            await gateway.stop(5)

    added, listed, shown, _, left = run(work)
    assert added == "nightly starts tidy: 0 4 * * * UTC\n"
    assert "nightly" in listed and "(in the app)" in listed
    assert json.loads(shown)["input"] == {"room": "attic"}
    assert len(json.loads(left)) == 1
