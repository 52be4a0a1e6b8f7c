"""Authentication and authorization (T1, T2): which tokens open which routes, and what cannot be reached at all."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from lamina.access.admin_service import AdminService
from lamina.bootstrap import open_local
from lamina.errors import BadValue
from lamina.gateway.bootstrap import ListenConfig, check_host, open_gateway
from lamina.gateway.deploy.admin_server import open_access
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import ROOT, managed
from tests.serving import Browser, raw, run, write_app

pytestmark = pytest.mark.live

MANAGEMENT = [
    ("POST", "/v1/admin/token/create", "admin"),
    ("POST", "/v1/admin/tenant/set", "admin"),
    ("POST", "/v1/admin/user/invite", "admin"),
    ("POST", "/v1/admin/secret/set", "admin"),
    ("POST", "/v1/admin/audit/list", "admin"),
    ("PUT", "/v1/apps/tested", "deploy"),
    ("POST", "/v1/apps/tested/rollback", "deploy"),
    ("POST", "/v1/functions/echo/terms", "deploy"),
    ("GET", "/v1/apps", "read"),
    ("GET", "/v1/apps/tested/history", "read"),
    ("GET", "/v1/logs", "read"),
    ("GET", "/v1/whoami", "read"),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com", ""])
def test_beyond_loopback_it_does_not_start_without_a_token(app: Path, tmp_path: Path, host: str) -> None:
    async def work() -> None:
        store = open_store(str(tmp_path / "store.db"))
        access = await open_access(store)
        for known in (None, access):
            with pytest.raises(BadValue, match="loopback"):
                await open_gateway(open_local(str(app)), ListenConfig(host=host), access=known)
        await AdminService(access).perform(ROOT, "token/create", {"name": "t", "expires": "1us"})
        with pytest.raises(BadValue, match="loopback"):
            check_host(host, access)  # it has expired
        await AdminService(access).perform(ROOT, "token/create", {"name": "t"})
        assert check_host(host, access)
        await store.close()

    run(work)


def test_where_others_can_come_in_every_route_but_health_takes_a_token(app: Path, tmp_path: Path) -> None:
    async def work() -> dict[str, list[int]]:
        store = open_store(str(tmp_path / "store.db"))
        access = await open_access(store)
        made = await AdminService(access).perform(ROOT, "token/create", {"name": "t", "scopes": ["read"]})
        gateway = await open_gateway(open_local(str(app)), ListenConfig(host="0.0.0.0"), access=access)
        said: dict[str, list[int]] = {}
        try:
            async with Browser(gateway.port) as browser:
                for path in ("/v1/functions", "/v1/functions/echo", "/v1/status", "/metrics", "/openapi.json", "/v2", "/nowhere"):
                    none = await browser.ask("GET", path)
                    query = await browser.ask("GET", f"{path}?token={made['token']}&authorization=Bearer%20{made['token']}")
                    other = await browser.ask("GET", path, X_Api_Key=made["token"], X_Authorization=f"Bearer {made['token']}")
                    wrong = await browser.ask("GET", path, Authorization="Bearer lmt_wrong")
                    right = await browser.ask("GET", path, Authorization=f"Bearer {made['token']}")
                    said[path] = [one.status for one in (none, query, other, wrong, right)]
                call = await browser.ask("POST", "/v1/functions/echo", b"1")
                weak = await browser.ask("POST", "/v1/functions/echo", b"1", Authorization=f"Bearer {made['token']}")
                said["call"] = [call.status, weak.status, (await browser.ask("GET", "/healthz")).status]
                assert call.headers["www-authenticate"] == "Bearer"
        finally:
            await gateway.stop(5)
            await store.close()
        return said

    said = run(work)
    assert said.pop("call") == [401, 403, 200]
    for path, statuses in said.items():
        assert statuses == [401, 401, 401, 401, 404 if path == "/nowhere" else 200], path


def test_management_wants_the_scope_it_names_and_a_wrong_token_is_worse_than_none(
    app: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def work() -> list[str]:
        async with managed(app, tmp_path / "kept") as server:
            tokens = {scope: await server.token(scope) for scope in ("invoke", "read", "deploy", "admin")}
            for method, path, scope in MANAGEMENT:
                wrong = await server.ask(method, path, b"{}", "lmt_wrong")
                assert wrong.status == 401, path
                for held, token in tokens.items():
                    answer = await server.ask(method, path, b"{}", token)
                    assert (answer.status == 403) == (held != scope), (path, held, answer.status)
            twice = await server.ask("GET", "/v1/apps", Authorization=f"Bearer {tokens['read']}", authorization="Bearer x")
            assert twice.status == 400
            return list(tokens.values())

    for token in run(work):
        assert token not in caplog.text


def test_nothing_of_management_can_be_reached_where_calls_come_in(app: Path, tmp_path: Path) -> None:
    async def work() -> set[int]:
        async with managed(app, tmp_path / "kept") as server, Browser(server.gateway.port) as browser:
            statuses = set()
            for _, path, _ in MANAGEMENT:
                for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                    override = {"X_HTTP_Method_Override": "PUT", "X_Method_Override": "PUT", "X_HTTP_Method": "PUT"}
                    statuses.add((await browser.ask(method, path, b"{}", **override)).status)
            assert server.admin.deployments.active.apps["tested"].number == 0
            return statuses

    assert run(work) == {404}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_page_from_elsewhere_in_a_browser_on_this_machine_cannot_manage(
    app: Path, tmp_path: Path, headers: dict[str, str]
) -> None:
    async def work() -> tuple[int, int]:
        async with managed(app, tmp_path / "kept") as server:
            answer = await server.ask("POST", "/v1/admin/token/create", b'{"name": "t"}', **headers)
            rebound = b"GET /v1/apps HTTP/1.1\r\nHost: evil.example:8701\r\n\r\n"
            other = await raw(server.admin.port, rebound)
            assert other is not None and not server.admin.access.tokens
            return answer.status, other.status

    assert run(work) == (403, 403)


def test_a_tenant_sees_and_calls_what_is_its_own_and_what_is_the_operators(app: Path, tmp_path: Path) -> None:
    source = 'import lamina\napp = lamina.App("mine")\n@app.function(scale=lamina.Scale(max=1))\ndef own(x):\n    return x\n'

    async def work() -> list[int]:
        async with managed(app, tmp_path / "kept") as server:
            ours = await server.token("invoke", "read", "deploy", tenant="acme")
            theirs = await server.token("invoke", "read", "deploy", tenant="other")
            assert (await server.deploy("mine", source, ours)).status == 200
            taken = await server.deploy("mine", source, theirs)
            shared = await server.deploy("tested", source, ours)
            calls = [await server.call("/v1/functions/own", 1, token) for token in (ours, theirs)]
            looks = [await server.call("/v1/functions/own", token=token, method="GET") for token in (ours, theirs)]
            listed = (await server.call("/v1/functions", token=theirs, method="GET")).json
            assert "own" not in [one["name"] for one in listed] and "echo" in [one["name"] for one in listed]
            every = await server.call("/v1/functions/echo", 1, theirs)
            return [one.status for one in (taken, shared, *calls, *looks, every)]

    assert run(work) == [403, 403, 200, 404, 200, 404, 200]


def test_a_quota_is_kept_from_the_moment_it_is_set_and_the_refusal_says_which(app: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with managed(app, tmp_path / "kept") as server:
            token = await server.token("invoke", tenant="acme", rate_per_s=0.01)
            first, second = [await server.call("/v1/functions/echo", 1, token) for _ in range(2)]
            assert (first.status, second.status) == (200, 429)
            assert (second.json["reason"], second.json["detail"]) == (
                "quota",
                "the tenant's quota is used up: 0.01 calls a second",
            )
            assert int(second.headers["retry-after"]) >= 1
            assert (await server.call("/v1/functions/echo", 1)).status == 200  # others are not concerned
            await AdminService(server.admin.access).perform(ROOT, "tenant/set", {"name": "acme", "rate_per_s": 1e6})
            await asyncio.sleep(0)
            assert (await server.call("/v1/functions/echo", 1, token)).status == 200

    run(work)


def test_functions_find_the_secrets_of_their_tenant_and_no_others(app: Path, tmp_path: Path) -> None:
    source = (
        'import os, lamina\napp = lamina.App("mine")\n@app.function(scale=lamina.Scale(max=1))\n'
        'def peek():\n    return {k: v for k, v in os.environ.items() if k.startswith("LAMINA_SECRET")}\n'
    )

    async def work() -> object:
        async with managed(app, tmp_path / "kept") as server:
            token = await server.token("deploy", "invoke", tenant="acme")
            desk = AdminService(server.admin.access)
            await desk.perform(ROOT, "secret/set", {"name": "api-key", "value": "ours", "tenant": "acme"})
            await desk.perform(ROOT, "secret/set", {"name": "root-key", "value": "theirs"})
            await server.deploy("mine", source, token)
            return (await server.call("/v1/functions/peek", token=token)).json

    assert run(work) == {"LAMINA_SECRET_API_KEY": "ours"}


def test_what_functions_print_can_be_followed(app: Path, tmp_path: Path) -> None:
    source = 'import lamina\napp = lamina.App("loud")\n@app.function(scale=lamina.Scale(max=1))\ndef shout(x):\n    print(x)\n'

    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy("loud", source)
            await server.call("/v1/functions/shout", "one")
            reader, writer = await asyncio.open_connection("127.0.0.1", server.admin.port)
            writer.write(b"GET /v1/logs?function=shout&follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await server.call("/v1/functions/shout", "two")
            seen = b""
            while b'"two"' not in seen:
                seen += await reader.read(4096)
            writer.close()
            return [b'"one"' in seen, b'"two"' in seen]

    assert run(work) == [True, True]
