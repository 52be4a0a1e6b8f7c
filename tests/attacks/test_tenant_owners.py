"""Owners of state, triggers, models and secrets (H1, H2, H7): a tenant reaches its own, and nothing of the operator's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.access.admin_service import AdminService
from lamina.store import kv
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import ROOT, Managed, managed
from tests.serving import run, write_app

pytestmark = pytest.mark.live

ACME = """
import os, lamina
app = lamina.App("acme-app")

@app.function(scale=lamina.Scale(min=1, max=1))
def acmefn(pin):
    lamina.context().state["pin"] = pin
    app.state["pin"] = pin
    return {k: v for k, v in os.environ.items() if k.startswith("LAMINA_SECRET")}
"""

EVIL = """
import lamina
app = lamina.App("evil-app")

@app.on_change("*", workflow="acmefn")
@app.function(scale=lamina.Scale(max=1))
def spy(key, value):
    app.state[f"seen/{key}"] = value

@app.on_change("*")
@app.function(scale=lamina.Scale(max=1))
def own(key, value):
    if not key.startswith("own/"):
        app.state[f"own/{key}"] = value
"""

FORGED_TRIGGER = """
import lamina
from lamina.sdk.triggers import Trigger

app = lamina.App("evil-app")
app.function(name="f")(lambda pin: pin)
app.triggers.append(Trigger("every", "acmefn", every_us=100_000, input={"pin": 1}))
"""

FORGED_FLOW = """
import lamina, msgspec
from lamina.core.workflow.flow import Flow

app = lamina.App("evil-app")

@app.function()
def f(pin):
    return pin

@app.workflow()
def w(pin):
    return f(pin)

honest = lamina.App.deployed

def deployed(self):
    found = honest(self)
    text = msgspec.json.encode(found.flows).replace(b'"function":"f"', b'"function":"acmefn"')
    return msgspec.structs.replace(found, flows=msgspec.json.decode(text, type=tuple[Flow, ...]))

lamina.App.deployed = deployed
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


async def both_deployed(server: Managed) -> tuple[str, str]:
    """Tokens of acme and evil, which have an app each."""
    acme, evil = [await server.token("invoke", "read", "deploy", tenant=name) for name in ("acme", "evil")]
    for name, source, token in (("acme-app", ACME, acme), ("evil-app", EVIL, evil)):
        answer = await server.deploy(name, source, token)
        assert answer.status == 200, answer.body
    return acme, evil


def test_h1_state_of_a_tenant_is_not_there_for_another(app: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with managed(app, tmp_path / "kept", runs=True) as server:
            acme, evil = await both_deployed(server)
            assert (await server.call("/v1/functions/acmefn", 1234, acme)).status == 200
            for place in ("workflow=acmefn", "app=acme-app"):
                path = f"/v1/state/pin?{place}"
                assert (await server.call(path, token=acme, method="GET")).json["value"] == 1234
                assert (await server.call(path, token="", method="GET")).json["value"] == 1234  # the operator
                tries = [
                    await server.call(path, token=evil, method="GET"),
                    await server.call(f"/v1/state?{place}", token=evil, method="GET"),
                    await server.call(path, 6666, evil, method="PUT"),
                    await server.call(path, token=evil, method="DELETE"),
                ]
                assert [one.status for one in tries] == [404] * 4
                assert (await server.call(path, token=acme, method="GET")).json["value"] == 1234
            planted = await server.call("/v1/state/x?workflow=not-there", 1, evil, method="PUT")
            operators = await server.call("/v1/state/x?app=tested", 1, evil, method="PUT")
            assert (planted.status, operators.status) == (404, 404)

    run(work)


def test_h1_a_trigger_sees_the_changes_of_its_own_tenant_alone(app: Path, tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with managed(app, tmp_path / "kept", runs=True) as server:
            acme, evil = await both_deployed(server)
            assert (await server.call("/v1/functions/acmefn", 1234, acme)).status == 200
            assert (await server.call("/v1/state/mark?app=evil-app", 1, evil, method="PUT")).status == 200
            while True:  # its own change, which comes after acme's, has been told
                listed = await server.call("/v1/state", token=evil, method="GET")
                keys = [one["key"] for one in listed.json["keys"]]
                if "own/mark" in keys:
                    break
                await asyncio.sleep(0.05)
            runs = (await server.call("/v1/runs", token=evil, method="GET")).json["runs"]
            assert {one["target"] for one in runs} == {"own"} and {one["tenant"] for one in runs} == {"evil"}
            return keys

    assert run(work) == ["mark", "own/mark"]


@pytest.mark.parametrize("forged", ["flow", "trigger"])
def test_h1_an_app_starts_nothing_of_another_tenant_s(app: Path, tmp_path: Path, forged: str) -> None:
    """A package is described by its own code, which may say anything."""
    source = FORGED_TRIGGER if forged == "trigger" else FORGED_FLOW

    async def work() -> Any:
        async with managed(app, tmp_path / "kept") as server:
            acme, evil = [await server.token("invoke", "deploy", tenant=name) for name in ("acme", "evil")]
            assert (await server.deploy("acme-app", ACME, acme)).status == 200
            return await server.deploy("evil-app", source, evil)

    answer = run(work)
    assert answer.status == 400 and "acmefn" in answer.json["detail"], answer.body


def test_h2_the_first_instance_of_a_deploy_has_its_own_tenant_s_secrets(app: Path, tmp_path: Path) -> None:
    async def work() -> Any:
        async with managed(app, tmp_path / "kept") as server:
            token = await server.token("deploy", "invoke", tenant="acme")
            desk = AdminService(server.admin.access)
            await desk.perform(ROOT, "secret/set", {"name": "opkey", "value": "OPERATOR"})
            await desk.perform(ROOT, "secret/set", {"name": "key", "value": "acme's", "tenant": "acme"})
            assert (await server.deploy("acme-app", ACME, token)).status == 200  # it has a minimum of one instance
            return (await server.call("/v1/functions/acmefn", 1, token)).json

    assert run(work) == {"LAMINA_SECRET_KEY": "acme's"}


def test_h7_a_tenant_s_token_unloads_its_own_models_alone(app: Path, tmp_path: Path) -> None:
    async def work() -> list[int]:
        async with managed(app, tmp_path / "kept") as server:
            acme, evil = await both_deployed(server)
            tries = [f"/v2/repository/models/{model}/{verb}" for model in ("echo", "acmefn") for verb in ("unload", "load")]
            said = [(await server.call(path, {}, evil)).status for path in tries]
            assert (await server.call("/v2/models/echo/ready", token=acme, method="GET")).status == 200
            said.append((await server.call("/v2/repository/models/acmefn/unload", {}, acme)).status)
            return said

    assert run(work) == [403, 403, 404, 404, 200]


FORGED_MODEL = """
import lamina
from dataclasses import dataclass
from lamina.sdk.tensors import Port, Signature

app = lamina.App("evil-app")

@dataclass
class Plan:
    takeover: int

@app.function(scale=lamina.Scale(max=1))
def functions(plan: Plan) -> Plan:
    return plan

forged = Signature((Port("plan", None, True),), (Port("result"),), model="echo", version="999")
type(functions).signature = property(lambda function: forged)
"""


def test_h7_a_tenant_s_function_is_no_version_of_the_operator_s_model(app: Path, tmp_path: Path) -> None:
    """A package says itself which model its functions are versions of: calls of others went there, and to unload one's own
    version unloaded all of them."""

    async def work() -> None:
        async with managed(app, tmp_path / "kept") as server:
            acme = await server.token("invoke", "read", "deploy", tenant="acme")
            evil = await server.token("invoke", "read", "deploy", tenant="evil")
            deployed = await server.deploy("evil-app", FORGED_MODEL, evil)
            assert deployed.status == 200, deployed.body
            for token in ("", acme, evil):
                about = (await server.call("/v2/models/echo", token=token, method="GET")).json
                assert "999" not in about["versions"], token
            unloaded = (await server.call("/v2/repository/models/echo/unload", {}, evil)).status
            assert unloaded == 403 and (await server.call("/v2/models/echo/ready", token=acme, method="GET")).status == 200

            # the description of the API: schemas would tell as well, and a name is no part of another's path
            told = {
                who: (await server.call("/openapi.json", token=token, method="GET"))
                for who, token in (("acme", acme), ("evil", evil))
            }
            assert b"takeover" in told["evil"].body and b"takeover" not in told["acme"].body and b"Plan" not in told["acme"].body
            assert "/v1/functions/echo" in told["acme"].json["paths"]
            assert not [path for path in told["acme"].json["paths"] if path.endswith("/functions/functions")]
            assert "/v1/functions/functions" in told["evil"].json["paths"]

    run(work)


def test_the_name_of_an_app_that_cannot_be_loaded_now_stays_its_owner_s(app: Path, tmp_path: Path) -> None:
    async def work() -> tuple[int, int]:
        async with managed(app, tmp_path / "kept") as server:
            acme = await server.token("deploy", tenant="acme")
            assert (await server.deploy("acme-app", ACME, acme)).status == 200
        (tmp_path / "kept" / "apps" / "acme-app" / "1" / "app.py").write_text("1 / 0")
        async with managed(app, tmp_path / "kept") as server:
            assert "acme-app" not in server.admin.deployments.active.apps
            evil = await server.token("deploy", tenant="evil")
            taken = await server.deploy("acme-app", EVIL.replace("evil-app", "acme-app"), evil)
            acme = await server.token("deploy", tenant="acme")
            return taken.status, (await server.deploy("acme-app", ACME, acme)).status

    assert run(work) == (403, 200)


def test_state_of_before_it_had_owners_is_given_them_once(app: Path, tmp_path: Path) -> None:
    async def put(scope: str, key: str, value: int) -> None:
        store = open_store(str(tmp_path / "kept" / "store.db"))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.write(lambda db: kv.put(db, scope, key, "value", encoding.encode(value), 1), done.set_result)
        await done
        await store.close()

    async def forget_owners() -> None:
        store = open_store(str(tmp_path / "kept" / "store.db"))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.write(lambda db: kv.delete(db, "owners", "state"), done.set_result)
        await done
        await store.close()

    async def work() -> None:
        async with managed(app, tmp_path / "kept", runs=True) as server:
            acme = await server.token("deploy", "read", tenant="acme")
            assert (await server.deploy("acme-app", ACME, acme)).status == 200
        await forget_owners()
        for scope in ("app/acme-app", "workflow/acmefn", "workflow/twice", "app/tested"):
            await put(scope, "old", 7)
        for start in range(2):
            async with managed(app, tmp_path / "kept", runs=True) as server:
                for place, mine in (
                    ("app=acme-app", True),
                    ("workflow=acmefn", True),
                    ("workflow=twice", False),
                    ("app=tested", False),
                ):
                    path = f"/v1/state/old?{place}"
                    assert (await server.call(path, token=acme, method="GET")).status == (200 if mine else 404), (start, place)
                    assert (await server.call(path, method="GET")).json["value"] == 7
                assert (await server.call("/v1/state/late?workflow=acmefn", method="GET")).status == 404
            await put("workflow/acmefn", "late", 8)  # what comes after the move is the operator's

    run(work)
