"""Authorization table: every route of every listener, the scope it takes, and whose things it reaches.

This is the only place where that is decided. Routers are made from their rows (`RouteMap`), so a route without one fails when the
server starts; handlers get a `Grant`, which answers every question about owners. `docs/reference/authorization.md` is generated
from the table, and so is the test that tries every row with every wrong caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from msgspec import Struct

from lamina.access.records import Identity, Scope
from lamina.errors import Forbidden, LaminaError

Listener = Literal["calls", "grpc", "management"]
LISTENERS: tuple[Listener, ...] = get_args(Listener)

Reach = Literal["public", "token", "all", "visible", "own", "change", "operator"]
REACHES: dict[Reach, str] = {
    "public": "no token is asked for",
    "token": "any valid token, whatever its scopes",
    "all": "any caller with the scope: nothing of it belongs to a tenant",
    "visible": "things of the caller's tenant and of the operator's apps; those of other tenants are not found (404)",
    "own": "things of the caller's tenant alone; all others are not found (404)",
    "change": "things of the caller's tenant alone; the operator's are refused (403), those of other tenants are not found (404)",
    "operator": "callers of no tenant; all others are refused (403)",
}
"""What each reach means. A caller of no tenant is the operator, and reaches everything its scopes allow."""


class AccessRule(Struct, frozen=True):
    """Row of the table: the scope a route takes, and its reach."""

    scope: Scope | None
    reach: Reach

    def check_identity(self, caller: Identity) -> None:
        """Check scope and, for what is the operator's alone, tenant."""
        if self.scope is not None and self.scope not in caller.scopes:
            held = ", ".join(sorted(caller.scopes)) or "nothing"
            raise Forbidden(f"this token may not {self.scope}", hint=f"it may {held}")
        if self.reach == "operator" and caller.tenant:
            raise Forbidden("this is for the operator of the server", hint=f"this token is of tenant {caller.tenant!r}")

    def sees(self, caller: Identity, owner: str) -> bool:
        """Whether things of this owner are there for a caller."""
        tenant = caller.tenant
        return not tenant or owner == tenant or (not owner and self.reach in ("visible", "change"))

    def check_owner(self, caller: Identity, owner: str, missing: LaminaError) -> None:
        """Check that a caller reaches a thing of this owner; `missing` is raised where it is not to know of it."""
        if not self.sees(caller, owner):
            raise missing
        if self.reach == "change" and caller.tenant and owner != caller.tenant:
            raise Forbidden("this belongs to the operator of the server", hint=f"this token is of tenant {caller.tenant!r}")


class Grant(NamedTuple):
    """Grant of one request: an authenticated caller, under the rule of the route."""

    caller: Identity
    rule: AccessRule

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    def sees(self, owner: str) -> bool:
        return self.rule.sees(self.caller, owner)

    def check_owner(self, owner: str, missing: LaminaError) -> None:
        self.rule.check_owner(self.caller, owner, missing)


def sees_internals(caller: Identity, owner: str) -> bool:
    """Whether a caller is told what code of this owner said when it failed, with its trace and the paths in it."""
    return "deploy" in caller.scopes and (not caller.tenant or caller.tenant == owner)


_CALLS: dict[str, tuple[Scope | None, Reach]] = {
    "GET /": ("read", "all"),
    "GET /healthz": (None, "public"),
    "GET /readyz": (None, "public"),
    "GET /metrics": ("read", "operator"),
    "GET /openapi.json": ("read", "visible"),
    "GET /docs": (None, "public"),
    "GET /docs/page.css": (None, "public"),
    "GET /docs/page.js": (None, "public"),
    "GET /v1/status": ("read", "operator"),
    "GET /v1/profiles": ("read", "operator"),
    "GET /v1/functions": ("read", "visible"),
    "GET /v1/functions/{function}": ("read", "visible"),
    "POST /v1/functions/{function}": ("invoke", "visible"),
    "GET /v1/functions/{function}/events": ("invoke", "visible"),
    "GET /v1/functions/{function}/ws": ("invoke", "visible"),
    "GET /v1/kernels": ("read", "visible"),
    "GET /v1/kernels/{graph}": ("read", "visible"),
    "POST /v1/kernels/{graph}": ("invoke", "visible"),
    "GET /v1/buffers": ("read", "own"),
    "GET /v1/buffers/{buffer*}": ("read", "own"),
    "PUT /v1/buffers/{buffer*}": ("invoke", "own"),
    "DELETE /v1/buffers/{buffer*}": ("invoke", "own"),
    "GET /v1/buckets": ("read", "own"),
    "GET /v1/buckets/{bucket}": ("read", "own"),
    "GET /v1/buckets/{bucket}/{object*}": ("read", "own"),
    "PUT /v1/buckets/{bucket}/{object*}": ("invoke", "own"),
    "DELETE /v1/buckets/{bucket}/{object*}": ("invoke", "own"),
    "GET /v1/workflows": ("read", "visible"),
    "GET /v1/workflows/{workflow}": ("read", "visible"),
    "POST /v1/workflows/{workflow}": ("invoke", "visible"),
    "GET /v1/runs": ("read", "own"),
    "GET /v1/runs/{run}": ("read", "own"),
    "GET /v1/runs/{run}/result": ("read", "own"),
    "GET /v1/runs/{run}/history": ("read", "own"),
    "POST /v1/runs/{run}/cancel": ("invoke", "own"),
    "POST /v1/runs/{run}/retry": ("invoke", "own"),
    "GET /v1/sessions": ("read", "own"),
    "POST /v1/functions/{function}/sessions": ("invoke", "visible"),
    "GET /v1/sessions/{session}": ("read", "own"),
    "DELETE /v1/sessions/{session}": ("invoke", "own"),
    "POST /v1/sessions/{session}/messages": ("invoke", "own"),
    "GET /v1/sessions/{session}/messages": ("invoke", "own"),
    "POST /v1/tasks/{task}/success": ("invoke", "own"),
    "POST /v1/tasks/{task}/failure": ("invoke", "own"),
    "POST /v1/tasks/{task}/heartbeat": ("invoke", "own"),
    "GET /v1/state": ("read", "own"),
    "GET /v1/state/{key*}": ("read", "own"),
    "PUT /v1/state/{key*}": ("invoke", "own"),
    "DELETE /v1/state/{key*}": ("invoke", "own"),
    "GET /v1/triggers": ("read", "own"),
    "GET /v1/triggers/{trigger}": ("read", "own"),
    "PUT /v1/triggers/{trigger}": ("deploy", "change"),
    "DELETE /v1/triggers/{trigger}": ("deploy", "change"),
    "GET /v1/bill": ("read", "own"),
    "GET /v1/explain/{call}": ("read", "own"),
    "GET /v2": ("read", "all"),
    "GET /v2/health/live": (None, "public"),
    "GET /v2/health/ready": (None, "public"),
    "GET /v2/models/stats": ("read", "visible"),
    "POST /v2/repository/index": ("read", "visible"),
    "POST /v2/repository/models/{model}/load": ("deploy", "change"),
    "POST /v2/repository/models/{model}/unload": ("deploy", "change"),
    "* /{page*}": (None, "public"),  # of a web app beside the functions, which lets its users in itself
}
for _model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
    _CALLS |= {f"GET {_model}{part}": ("read", "visible") for part in ("", "/ready", "/config", "/stats")}
    _CALLS |= {f"POST {_model}/{verb}": ("invoke", "visible") for verb in ("infer", "generate", "generate_stream")}

_GRPC: dict[str, tuple[Scope | None, Reach]] = {
    "Check": (None, "public"),
    "ServerReflectionInfo": (None, "public"),
    "ServerLive": (None, "public"),
    "ServerReady": (None, "public"),
    "ServerMetadata": ("read", "all"),
    "ModelReady": ("read", "visible"),
    "ModelMetadata": ("read", "visible"),
    "ModelConfig": ("read", "visible"),
    "ModelStatistics": ("read", "visible"),
    "ModelInfer": ("invoke", "visible"),
    "ModelStreamInfer": ("invoke", "visible"),
    "RepositoryIndex": ("read", "visible"),
    "RepositoryModelLoad": ("deploy", "change"),
    "RepositoryModelUnload": ("deploy", "change"),
}

_MANAGEMENT: dict[str, tuple[Scope | None, Reach]] = {
    "GET /healthz": (None, "public"),
    "POST /v1/auth/log-in": (None, "public"),
    "POST /v1/auth/sign-up": (None, "public"),
    "POST /v1/auth/log-out": (None, "token"),
    "GET /v1/whoami": ("read", "all"),
    "GET /v1/apps": ("read", "visible"),
    "PUT /v1/apps/{app}": ("deploy", "change"),
    "GET /v1/apps/{app}/history": ("read", "visible"),
    "POST /v1/apps/{app}/rollback": ("deploy", "change"),
    "GET /v1/apps/{app}/traffic": ("read", "visible"),
    "PUT /v1/apps/{app}/traffic": ("deploy", "change"),
    "POST /v1/functions/{function}/terms": ("deploy", "change"),
    "GET /v1/logs": ("read", "own"),
    "GET /v1/nodes": ("read", "operator"),
    "POST /v1/nodes/{node}/drain": ("admin", "operator"),
    "GET /console": (None, "public"),
    "GET /console/": (None, "public"),
    "GET /console/{file*}": (None, "public"),
    "GET /v1/console/feed": ("read", "operator"),
    "GET /v1/console/functions": ("read", "operator"),
    "GET /v1/console/functions/{target}": ("read", "operator"),
    "GET /v1/console/calls": ("read", "operator"),
    "GET /v1/console/calls/{call}": ("read", "operator"),
    "GET /v1/console/graph/{workflow}": ("read", "visible"),
    "GET /v1/console/plan": ("read", "operator"),
    "POST /v1/console/plan": ("read", "operator"),
    "POST /v1/console/scenario": ("read", "operator"),
    "GET /calls/{route*}": ("read", "all"),
    "POST /calls/{route*}": ("invoke", "all"),
    "POST /v1/admin/token/create": ("admin", "own"),
    "POST /v1/admin/token/list": ("admin", "own"),
    "POST /v1/admin/token/revoke": ("admin", "own"),
    "POST /v1/admin/tenant/set": ("admin", "operator"),
    "POST /v1/admin/tenant/list": ("admin", "own"),
    "POST /v1/admin/tenant/remove": ("admin", "operator"),
    "POST /v1/admin/user/invite": ("admin", "own"),
    "POST /v1/admin/user/list": ("admin", "own"),
    "POST /v1/admin/user/remove": ("admin", "own"),
    "POST /v1/admin/secret/set": ("admin", "own"),
    "POST /v1/admin/secret/list": ("admin", "own"),
    "POST /v1/admin/secret/remove": ("admin", "own"),
    "POST /v1/admin/audit/list": ("admin", "own"),
}

RULES: dict[Listener, dict[str, AccessRule]] = {
    listener: {route: AccessRule(scope, reach) for route, (scope, reach) in rows.items()}
    for listener, rows in zip(LISTENERS, (_CALLS, _GRPC, _MANAGEMENT), strict=True)
}


def _root(path: str) -> str:
    return "/".join(path.split("/")[:3])


_MANAGEMENT_ROOTS = {_root(one.partition(" ")[2]) for one in _MANAGEMENT} - {_root(one.partition(" ")[2]) for one in _CALLS}


def is_management(path: str) -> bool:
    """Whether a path is among those that the management listener alone has."""
    return _root(path) in _MANAGEMENT_ROOTS


UNKNOWN_ROUTE = AccessRule("read", "all")
"""Of paths that are not there: only callers that may read learn that they are not."""


class MissingAccessRule(LaminaError):
    """A route without a row in the authorization table."""

    code = "no-access-rule"


def rule_of(listener: Listener, route: str) -> AccessRule:
    rule = RULES[listener].get(route)
    if rule is None:
        raise MissingAccessRule(f"{listener}: {route!r} has no row", hint="add one to access/authorization.py")
    return rule


# ----------------------------------------------------------------------------- routes

H = TypeVar("H")


class MatchedRoute(NamedTuple, Generic[H]):
    """The route of a request, and what its path names."""

    rule: AccessRule
    handler: H
    params: tuple[str, ...]


class RouteMap(Generic[H]):
    """Routes of a listener by method and path, each with its row. `{name}` stands for one part of a path, `{name*}` for the
    rest of it. GET answers HEAD too. Paths are not percent-decoded."""

    def __init__(self, listener: Listener, handlers: Mapping[str, H]) -> None:
        self._exact: dict[str, dict[str, MatchedRoute[H]]] = {}
        self._patterns: list[tuple[tuple[str, ...], dict[str, MatchedRoute[H]]]] = []
        by_path: dict[str, dict[str, MatchedRoute[H]]] = {}
        for route, handler in handlers.items():
            method, _, path = route.partition(" ")
            found = MatchedRoute(rule_of(listener, route), handler, ())
            by_path.setdefault(path, {})[method] = found
            if method == "GET":
                by_path[path]["HEAD"] = found
        for path, methods in by_path.items():
            if "{" in path:
                self._patterns.append((tuple(path.split("/")), methods))
            else:
                self._exact[path] = methods

    def find(self, method: str, path: bytes) -> MatchedRoute[H] | str | None:
        """The route; the methods that are allowed, if this one is not; None if there is no such path."""
        text = path.decode("latin-1")
        methods = self._exact.get(text)
        params: tuple[str, ...] = ()
        if methods is None:
            parts = text.split("/")
            for pattern, candidate in self._patterns:
                found = _match(pattern, parts)
                if found is not None:
                    methods, params = candidate, found
                    break
            else:
                return None
        route = methods.get(method)
        if route is None:
            return ", ".join(methods)
        return route._replace(params=params) if params else route


def _match(pattern: tuple[str, ...], parts: list[str]) -> tuple[str, ...] | None:
    if pattern[-1].endswith("*}"):
        if len(parts) < len(pattern):
            return None
        parts = [*parts[: len(pattern) - 1], "/".join(parts[len(pattern) - 1 :])]
    if len(parts) != len(pattern):
        return None
    params = []
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted[:1] == "{":
            if not part:
                return None
            params.append(part)
        elif wanted != part:
            return None
    return tuple(params)


# -------------------------------------------------------------------------- the page

_TITLES: dict[Listener, str] = {"calls": "Calls", "grpc": "gRPC", "management": "Management"}


def reference_page() -> str:
    """The table as a page: `python -m lamina.access.authorization > docs/reference/authorization.md`."""
    lines = [
        "# Authorization",
        "",
        "Every route of every listener, the scope it takes, and whose things it reaches. This page is generated from the table",
        "that the server decides by (`access/authorization.py`). On loopback without a token the caller is the operator and has",
        "all scopes ([authentication](../how-to/authentication.md)).",
        "",
        "| reach | |",
        "|---|---|",
        *(f"| `{reach}` | {meaning} |" for reach, meaning in REACHES.items()),
    ]
    for listener, rows in RULES.items():
        lines += ["", f"## {_TITLES[listener]}", "", "| route | scope | reach |", "|---|---|---|"]
        lines += [f"| `{route}` | {rule.scope or ''} | {rule.reach} |" for route, rule in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference_page())
