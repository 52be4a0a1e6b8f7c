"""The authorization table, tried cell by cell: every route of every listener with every wrong caller and every right one.

The cases are made from the table itself, so a new route is tried as soon as it has a row; without one it fails at start.
"""

from __future__ import annotations

import asyncio
import re
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lamina.access.admin_service import AdminService
from lamina.access.authorization import REACHES, RULES, AccessRule, MissingAccessRule, RouteMap, reference_page
from lamina.access.records import SCOPES, Identity, Scope
from lamina.errors import Forbidden, NotFound
from lamina.gateway.deploy import app_package
from lamina.gateway.oip import reflection
from tests.gateway.deploy.admin_fixture import ROOT, Managed, managed, zipped
from tests.serving import APP, Answer, Browser, write_app

pytestmark = pytest.mark.live

SOURCE = """
import lamina
app = lamina.App("{name}-app")

@app.function(scale=lamina.Scale(max=1))
def {name}fn(x):
    return x

@app.workflow()
def {name}flow(x):
    return {name}fn(x)
"""
GRAPH = """
from lamina import kernels

@kernels.numpy_kernel
def {name}copy(x, y):
    y[...] = x

@app.kernel_graph(scale=lamina.Scale(max=1))
def {name}graph(g):
    g.launch({name}copy, g.input("x", "float32", (1,)), kernels.out(g.output("y", "float32", (1,))))
"""
WEB = """
async def web(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})

app.mount("/page", web)
"""
OURS, THEIRS = "acme", "evil"
BODIES = {
    "infer": b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["1"]}]}',
    "generate": b'{"x": 1}',
    "functions": b"1",
    "workflows": b"1",
    "kernels": b'{"x": [1]}',
}
ADMIN_BODIES = {
    "token/create": b'{"name": "t", "tenant": "acme"}',
    "token/revoke": b'{"id": "none"}',
    "tenant/set": b'{"name": "acme"}',
    "tenant/remove": b'{"name": "none"}',
    "user/invite": b'{"name": "ada", "tenant": "acme"}',
    "user/remove": b'{"name": "none"}',
    "secret/set": b'{"name": "s", "value": "v", "tenant": "acme"}',
    "secret/remove": b'{"name": "none", "tenant": "acme"}',
}
"""Subjects that are not there: what is tried is who may ask, and asking must not take away what others need."""


@dataclass
class Table:
    """A server with an app of the operator's and one of each tenant, and tokens of all kinds."""

    server: Managed
    loop: asyncio.AbstractEventLoop
    tokens: dict[tuple[str, str], str] = field(default_factory=dict)  #: by tenant and scope
    revoked: str = ""
    expired: str = ""
    runs: dict[str, str] = field(default_factory=dict)  #: by tenant
    graphs: dict[str, str] = field(default_factory=dict)  #: by tenant

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(100)

    async def prepare(self) -> None:
        server = self.server
        for tenant in (OURS, THEIRS, ""):
            for scope in SCOPES:
                self.tokens[tenant, scope] = await server.token(scope, tenant=tenant)
        for tenant in (OURS, THEIRS):
            answer = await server.deploy(f"{tenant}-app", (SOURCE + GRAPH).format(name=tenant), self.tokens[tenant, "deploy"])
            assert answer.status == 200, answer.body
            token = self.tokens[tenant, "invoke"]
            accepted = await server.call(f"/v1/functions/{tenant}fn", 1, token, prefer="respond-async")
            self.runs[tenant] = accepted.json["id"]
        for target in server.gateway.targets.all:
            if target.signature is not None and target.signature.graph:
                self.graphs[target.tenant] = target.signature.graph
        assert set(self.graphs) == {OURS, THEIRS, ""}
        desk = AdminService(server.admin.access)
        made = await desk.perform(ROOT, "token/create", {"name": "gone", "scopes": list(SCOPES)})
        await desk.perform(ROOT, "token/revoke", {"id": made["id"]})
        self.revoked = made["token"]
        self.expired = (await desk.perform(ROOT, "token/create", {"name": "old", "scopes": list(SCOPES), "expires": "1us"}))[
            "token"
        ]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    """On a public address, where every caller needs a token."""
    folder = tmp_path_factory.mktemp("table")
    app = write_app(folder, APP + GRAPH.format(name="tested") + WEB)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def first_token() -> None:
        from lamina.gateway.deploy.admin_server import open_access
        from lamina.store.open import open_store

        store = open_store(str(folder / "store.db"))
        await AdminService(await open_access(store)).perform(ROOT, "token/create", {"name": "first"})
        await store.close()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    do(first_token())
    opened = managed(app, folder, runs=True, host="0.0.0.0", admin_host="0.0.0.0", grpc_port=0, console=True)
    server = do(opened.__aenter__())
    try:
        made = Table(server, loop)
        do(made.prepare())
        yield made
    finally:
        do(opened.__aexit__(None, None, None))
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# --------------------------------------------------------------------- one request


def path_of(table: Table, route: str, tenant: str) -> str:
    """The path of a route for a thing of this tenant's; "": of the operator's."""
    names = {
        "function": f"{tenant}fn" if tenant else "echo",
        "workflow": f"{tenant}flow" if tenant else "twice",
        "model": f"{tenant}fn" if tenant else "echo",
        "version": "1",
        "app": f"{tenant}-app" if tenant else "tested",
        "run": table.runs.get(tenant, "0" * 24),
        "call": table.runs.get(tenant, "0" * 24),
        "graph": table.graphs[tenant],
        "session": "none",
        "bucket": "box",
        "task": table.server.gateway.driver.data.tokens.make("0" * 24, 1),
        "node": "far",
        "target": f"{tenant}fn" if tenant else "echo",
        "trigger": f"{tenant or 'own'}-trigger",
    }
    method, _, path = route.partition(" ")
    path = path.replace("{buffer*}", "b?dtype=uint8&shape=2" if method == "PUT" else "b")
    path = path.replace("{page*}", "page/of/a/web/app")
    path = path.replace("{object*}", "b")
    path = path.replace("{file*}", "app.js")  # of the console, as are those below
    path = path.replace("{route*}", "v1/functions/{function}" if method == "POST" else "v1/functions")
    if "{key*}" in path or path == "/v1/state":
        path = path.replace("{key*}", "k") + f"?app={names['app']}"
    return re.sub(r"\{(\w+)\}", lambda found: names[found[1]], path)


async def ask_http(table: Table, listener: str, route: str, token: str, tenant: str) -> Answer:
    method, path = route.partition(" ")[0].replace("*", "GET"), path_of(table, route, tenant)
    port = table.server.gateway.port if listener == "calls" else table.server.admin.port
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body = b"{}" if method != "GET" else b""
    if method == "POST" and (listener == "calls" or path.startswith("/calls/")):
        body = next((known for word, known in BODIES.items() if word in path), body)
    if "/admin/" in path:
        body = ADMIN_BODIES.get(path.removeprefix("/v1/admin/"), b"{}").replace(b"acme", (tenant or OURS).encode())
    if method == "PUT" and path.endswith("/traffic"):
        body = b'{"weights": {"%d": 100}}' % (1 if tenant else 0)
    elif method == "PUT" and "/apps/" in path:
        body = zipped({"app.py": (SOURCE + GRAPH).format(name=tenant or "tested").encode()})
        headers |= {"lamina_sha256": app_package.sha256_hex(body), "lamina_entry": "app.py"}
    if "{trigger}" in route:
        target = f"{tenant}fn" if tenant else "echo"
        body = b'{"target": "%s", "every": "24h", "input": {"x": 1}}' % target.encode() if method == "PUT" else b""
        if method != "PUT":
            await ask_http(table, listener, "PUT /v1/triggers/{trigger}", table.tokens[tenant, "deploy"], tenant)
    elif "{object*}" in route and method != "PUT":
        for owner in (OURS, ""):
            await ask_http(table, listener, "PUT /v1/buckets/{bucket}/{object*}", table.tokens[owner, "invoke"], owner)
    elif "{buffer*}" in route and method != "PUT":  # which has one owner: the caller's tenant
        for owner in (OURS, ""):
            await ask_http(table, listener, "PUT /v1/buffers/{buffer*}", table.tokens[owner, "invoke"], owner)
    elif method == "DELETE":
        await ask_http(table, listener, route.replace("DELETE", "PUT"), table.tokens[tenant, "invoke"], tenant)
    async with Browser(port) as browser:
        return await browser.ask(method, path, body, "application/json", **headers)


def ask_grpc(table: Table, name: str, token: str, tenant: str) -> int:
    """The gRPC status as HTTP's: 200, 401, 403, 404, or 0 for any other."""
    import grpc

    from lamina.gateway.oip.schema import HEALTH_CHECK, HEALTH_SERVICE, load_health_schema, load_schema

    schema = load_schema()
    kinds: Any = schema
    if name == reflection.METHOD:
        kind = reflection.Reflection().request_type
        with grpc.insecure_channel(f"127.0.0.1:{table.server.gateway.grpc_port}") as channel:
            where = f"/{reflection.service_of('v1')}/{name}"
            ask = channel.stream_stream(where, kind.SerializeToString, lambda body: body)
            return 200 if b"inference" in next(ask(iter([kind(list_services="*")]), timeout=30)) else 0
    if name == HEALTH_CHECK:
        kinds = load_health_schema()
        asks, answers, is_asked, service = "HealthCheckRequest", "HealthCheckResponse", False, HEALTH_SERVICE
    else:
        _, asks, answers, is_asked, _ = next(one for one in schema.methods if one[0] == name)
        service = schema.service
    model = f"{tenant}fn" if tenant else "echo"
    if name == "ModelReady":  # it may have been unloaded by a row before
        ask_grpc(table, "RepositoryModelLoad", table.tokens[tenant, "deploy"], tenant)
    message = kinds[asks]()
    for attribute in ("name", "model_name"):
        if hasattr(message, attribute):
            setattr(message, attribute, model)
    if hasattr(message, "raw_input_contents"):
        message.inputs.add(name="x", datatype="BYTES", shape=[1])
        message.raw_input_contents.append(struct.pack("<I", 1) + b"1")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{table.server.gateway.grpc_port}") as channel:
        where = f"/{service}/{name}"
        serialize, parse = type(message).SerializeToString, kinds[answers].FromString
        try:
            if is_asked:
                said = next(channel.stream_stream(where, serialize, parse)(iter([message]), metadata=metadata, timeout=30))
                text = said.error_message
                return (
                    401
                    if "token" in text and "may not" not in text
                    else 403
                    if "may not" in text
                    else 404
                    if "no model" in text
                    else 200
                )
            said = channel.unary_unary(where, serialize, parse)(message, metadata=metadata, timeout=30)
            return 404 if name == "ModelReady" and not said.ready else 200  # as is said of a model that nobody has
        except grpc.RpcError as error:
            return {16: 401, 7: 403, 5: 404}.get(error.code().value[0], 0)


def status_of(table: Table, listener: str, route: str, token: str, tenant: str = OURS) -> int:
    if listener == "grpc":
        return ask_grpc(table, route, token, tenant)
    found: Answer = table.do(ask_http(table, listener, route, token, tenant))
    return found.status


CELLS = [(listener, route, rule) for listener, rows in RULES.items() for route, rule in rows.items()]
GUARDED = [cell for cell in CELLS if cell[2].reach != "public"]
NAMES_A_THING = re.compile(
    r"\{(function|workflow|model|app|run|graph|trigger|key\*)\}|/admin/(secret|user|token)/(set|invite|create)|^Model|^RepositoryModel"
)
THINGS = [cell for cell in GUARDED if NAMES_A_THING.search(cell[1])]


def label(value: object) -> str:
    return (
        value.replace("/", "|")
        if isinstance(value, str)
        else f"{value.scope}-{value.reach}"
        if isinstance(value, AccessRule)
        else ""
    )


cells = pytest.mark.parametrize(("listener", "route", "rule"), GUARDED, ids=label)
things = pytest.mark.parametrize(("listener", "route", "rule"), THINGS, ids=label)


@cells
def test_a_caller_without_a_valid_token_is_not_let_in(table: Table, listener: str, route: str, rule: AccessRule) -> None:
    for token in ("", "lmt_wrong", table.revoked, table.expired):
        assert status_of(table, listener, route, token) == 401


@cells
def test_a_token_without_the_scope_is_refused(table: Table, listener: str, route: str, rule: AccessRule) -> None:
    for scope in SCOPES if rule.scope is not None else ():
        if scope != rule.scope:
            for tenant in (OURS, ""):
                assert status_of(table, listener, route, table.tokens[tenant, scope]) == 403, (scope, tenant)


@cells
def test_the_right_caller_is_let_in(table: Table, listener: str, route: str, rule: AccessRule) -> None:
    scope = rule.scope or "read"
    if route.endswith("log-out"):
        return  # there is no token of a session here: see tests/gateway/test_auth.py
    operator = status_of(table, listener, route, table.tokens["", scope], OURS)
    tenant = status_of(table, listener, route, table.tokens[OURS, scope], OURS)
    gone = 404 if re.search("/(revoke|remove|drain)$|{session}", route) else None  # what they name is not there
    assert operator not in (401, 403) and (operator != 404 or gone), operator
    if rule.reach == "operator":
        assert tenant == 403
    else:
        assert tenant not in (401, 403) and (tenant != 404 or gone), tenant


@things
def test_things_of_another_tenant_s_are_not_there(table: Table, listener: str, route: str, rule: AccessRule) -> None:
    assert rule.scope is not None
    found = status_of(table, listener, route, table.tokens[THEIRS, rule.scope], OURS)
    says_no = 403 if "/admin/" in route or route == "PUT /v1/apps/{app}" else 404  # a name in a body, and one that is taken
    assert found == says_no


@things
def test_things_of_the_operator_s_are_called_and_not_changed(table: Table, listener: str, route: str, rule: AccessRule) -> None:
    assert rule.scope is not None
    if "/admin/" in route or "{run}" in route:
        return  # the operator has none here
    found = status_of(table, listener, route, table.tokens[THEIRS, rule.scope], "")
    if rule.reach == "visible":
        assert found not in (401, 403, 404)
    else:
        assert found == {"own": 404, "change": 403}[rule.reach]


def test_listings_show_what_a_tenant_may_see(table: Table) -> None:
    def listed(listener: str, route: str, tenant: str, scope: Scope = "read") -> str:
        answer: Answer = table.do(ask_http(table, listener, route, table.tokens[tenant, scope], tenant))
        assert answer.status == 200, answer.body
        return answer.body.decode()

    shared = ["GET /v1/functions", "GET /v1/workflows", "GET /openapi.json", "GET /v2/models/stats", "POST /v2/repository/index"]
    for route in shared:
        theirs, own = listed("calls", route, THEIRS), listed("calls", route, OURS)
        word = "flow" if "workflows" in route else "fn"
        assert f"{OURS}{word}" not in theirs and f"{THEIRS}{word}" in theirs and f"{OURS}{word}" in own
        assert ("twice" if word == "flow" else "echo") in theirs, route
    assert OURS not in listed("calls", "GET /v1/runs", THEIRS) and THEIRS in listed("calls", "GET /v1/runs", THEIRS)
    assert f"{OURS}-app" not in listed("management", "GET /v1/apps", THEIRS)
    for what in ("token/list", "tenant/list", "secret/list", "user/list", "audit/list"):
        assert f'"{OURS}"' not in listed("management", f"POST /v1/admin/{what}", THEIRS, "admin"), what


def test_public_routes_take_no_token(table: Table) -> None:
    for listener, route, rule in CELLS:
        if rule.reach == "public" and "auth" not in route:
            assert status_of(table, listener, route, "") in (200, 503), route


# ------------------------------------------------------------------------- the table


def test_a_route_without_a_row_fails_at_start() -> None:
    with pytest.raises(MissingAccessRule, match=r"POST /v1/backdoor"):
        RouteMap("calls", {"POST /v1/backdoor": lambda: None})


def test_every_row_has_a_route(table: Table) -> None:
    """A row without a route would promise what is not there."""
    gateway, admin = table.server.gateway, table.server.admin
    for listener, route, _ in CELLS:
        if listener == "grpc":
            assert route in gateway.oip.grpc_methods().request_types
            continue
        maps = [gateway.router._routes, gateway.oip.rest._routes] if listener == "calls" else [admin._routes._routes]
        method, path = route.partition(" ")[0], path_of(table, route, OURS).partition("?")[0].encode()
        web = gateway.router._web
        is_call = path in gateway.targets.by_path or (method == "*" and web is not None and web.mount_of(path) == "/page")
        assert is_call or any(not isinstance(one.find(method, path), str | None) for one in maps), route


@pytest.mark.parametrize("reach", REACHES)
def test_an_owner_is_judged_by_the_reach_alone(reach: Any) -> None:
    rule, missing = AccessRule("read", reach), NotFound("no")
    tenant, operator = Identity(OURS, "t", frozenset(("read",))), Identity("", "o", frozenset(("read",)))
    for owner in (OURS, THEIRS, ""):
        assert rule.sees(operator, owner)
    assert rule.sees(tenant, OURS) and not rule.sees(tenant, THEIRS)
    assert rule.sees(tenant, "") == (reach in ("visible", "change"))
    with pytest.raises(NotFound):
        rule.check_owner(tenant, THEIRS, missing)
    if reach == "change":
        with pytest.raises(Forbidden):
            rule.check_owner(tenant, "", missing)


def test_the_reference_page_is_what_the_table_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "authorization.md"
    assert page.read_text(encoding="utf-8") == reference_page(), (
        "python -m lamina.access.authorization > docs/reference/authorization.md"
    )
