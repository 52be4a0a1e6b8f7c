"""HTTP router of `/v1`: paths to handlers, authorization and error responses. Calls themselves are handled by `CallHandler`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from typing import Any

import msgspec

import lamina
from lamina.access.authorization import UNKNOWN_ROUTE, Grant, RouteMap, is_management, rule_of
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import LaminaError, NotFound, UnknownTarget
from lamina.gateway.auth import Authorize
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.explain import SampledRefusals
from lamina.gateway.routes.http_codec import JSON, DecodedBody
from lamina.gateway.routes.problems import (
    HttpProblem,
    defect_problem,
    error_problem,
    make_problem,
    reject_method,
    respond_problem,
)
from lamina.gateway.routes.profiles import take_snapshot
from lamina.gateway.routes.sockets import with_bearer
from lamina.gateway.routes.status import status
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.gateway.web_app.web_process import WebProcess
from lamina.predict.online import measured_times
from lamina.sdk.binding import Param
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http_server import Handler
from lamina.server.process_status import ProcessStatus
from lamina.server.websocket import BadHandshake, UpgradeRequired

_INDEX = {
    "server": f"lamina {lamina.__version__}",
    "functions": "/v1/functions",
    "workflows": "/v1/workflows",
    "kernels": "/v1/kernels",
    "buffers": "/v1/buffers",
    "models": "/v2",
    "runs": "/v1/runs",
    "state": "/v1/state",
    "triggers": "/v1/triggers",
    "bill": "/v1/bill",
    "status": "/v1/status",
    "profiles": "/v1/profiles",
    "metrics": "/metrics",
    "health": "/healthz",
    "ready": "/readyz",
    "openapi": "/openapi.json",
    "docs": "/docs",
}

_ABOUT_THE_PROCESS = (b"/healthz", b"/readyz", b"/metrics", b"/v1/status", b"/v2/health/")
"""Paths that a standby answers too. What it has read of anything else is out of date."""

MAX_DOCUMENTS = 64

Document = Callable[[Grant], tuple[bytes, bytes]]
"""Makes a body for a client, and its content type."""

RouteHandler = Callable[..., None]
"""Handles a request with its exchange, its grant, and what the path names."""

DESCRIBE = {kind: rule_of("calls", f"GET /v1/{kind}s/{{{kind}}}") for kind in ("function", "workflow")}
MOUNTED = rule_of("calls", "* /{page*}")
CALL = {kind: rule_of("calls", f"POST /v1/{kind}s/{{{kind}}}") for kind in ("function", "workflow")}


class Router:
    """Routes of a gateway: calls, documents, `routes` of other parts, and handlers mounted by prefix with their own."""

    def __init__(
        self,
        driver: RealtimeDriver,
        targets: TargetRegistry,
        metrics: Metrics,
        call_handler: CallHandler,
        authorize: Authorize,
        process: ProcessStatus,
        refusals: SampledRefusals,
        *,
        is_ready: Callable[[], bool],
        memory: Callable[[], dict[str, Any]],
        openapi: Callable[[Grant], dict[str, Any]],
        routes: Mapping[str, RouteHandler],
        mounts: Mapping[bytes, Handler],
        web: WebProcess | None = None,
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self.targets = targets
        self.call_handler = call_handler
        self.authorize = authorize
        self.is_ready = is_ready
        self._process = process
        self._refusals = refusals
        self._mounts = mounts
        self._web = web
        self._memory = memory
        self._make_openapi = openapi
        self._documents: dict[str, bytes] = {}  #: that describe the API, by tenant
        targets.subscribe(self._documents.clear)
        self._suggestion_limiter = RateLimiter()  #: the search for a similar name takes long
        documents: dict[str, Document] = {
            "/": lambda grant: (msgspec.json.encode(_INDEX), JSON),
            "/v1/functions": lambda grant: self._listing("function", grant),
            "/v1/workflows": lambda grant: self._listing("workflow", grant),
            "/v1/status": lambda grant: self._status(),
            "/v1/profiles": lambda grant: self._profiles(),
            "/metrics": lambda grant: (metrics.exposition(), b"text/plain; version=0.0.4; charset=utf-8"),
            "/openapi.json": lambda grant: (self._openapi(grant), JSON),
            "/docs": lambda grant: (_static("docs.html"), b"text/html; charset=utf-8"),
            "/docs/page.css": lambda grant: (_static("docs.css"), b"text/css; charset=utf-8"),
            "/docs/page.js": lambda grant: (_static("docs.js"), b"text/javascript; charset=utf-8"),
            "/healthz": lambda grant: (b'{"status":"ok","role":"%s"}' % self._role(), JSON),
        }
        self._known_paths = [path for path in documents if len(path) > 1]
        self._routes: RouteMap[RouteHandler] = RouteMap(
            "calls",
            {
                **{f"GET {path}": partial(_respond_document, document) for path, document in documents.items()},
                "GET /readyz": self._respond_ready,
                **routes,
            },
        )

    def handle(
        self, request: HttpRequest, exchange: Exchange, decoded: DecodedBody | None = None, *, web_apps: bool = True
    ) -> None:
        """Handle a request; `decoded`: its body has been read by an ingress process. `web_apps`: it may be for one of them."""
        try:
            if b"sec-websocket-protocol" in request.headers:
                request = with_bearer(request)
            target = self.targets.by_path.get(request.path)
            if target is None:
                self._handle_other(request, exchange, self._web if web_apps else None)
            elif request.method != "POST":
                self._describe_target(target, request, exchange)
            elif self._process.refusal is not None:
                raise self._process.refusal()
            else:
                rule = CALL[target.kind]
                caller = self.authorize(request, rule)
                if target.tenant and not rule.sees(caller, target.tenant):
                    raise self._not_found(request, Grant(caller, rule))
                if target.split is not None:
                    target = target.split.choose(request.headers)
                self.call_handler.handle(target, request, exchange, caller, decoded)
        except LaminaError as error:
            problem = error_problem(error)
            respond_problem(exchange, problem)
            self._refusals.record_problem(problem, request.path.decode("latin-1"))
        except Exception as error:
            respond_problem(exchange, defect_problem(f"{request.method} {request.path[:200]!r} failed", error))

    def _role(self) -> bytes:
        return b"standby" if self._process.is_standby else b"leader"

    def _handle_other(self, request: HttpRequest, exchange: Exchange, web: WebProcess | None) -> None:
        path = request.path
        if path == b"*" and request.method == "OPTIONS":  # of the server as a whole: a ping, says RFC 9110 9.3.7
            exchange.respond(204)
            return
        if self._process.is_standby and self._process.refusal is not None and not path.startswith(_ABOUT_THE_PROCESS):
            raise self._process.refusal()
        if web is not None and path == b"/" and web.has_root:
            web.handle("/", request, exchange)
            return
        for prefix, handler in self._mounts.items():
            if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                handler(request, exchange)
                return
        found = self._routes.find(request.method, path)
        if isinstance(found, str):
            reject_method(request, exchange, found)
        elif found is None and web is not None and (mount := web.mount_of(path)) is not None:
            self.authorize(request, MOUNTED)
            web.handle(mount, request, exchange)
        elif found is None:
            raise self._not_found(request, Grant(self.authorize(request, UNKNOWN_ROUTE), DESCRIBE["function"]))
        else:
            grant = Grant(self.authorize(request, found.rule), found.rule)
            found.handler(request, exchange, grant, *found.params)

    def _describe_target(self, target: CallTarget, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            reject_method(request, exchange, "GET, HEAD, POST")
            return
        if self._process.is_standby and self._process.refusal is not None:
            raise self._process.refusal()
        rule = DESCRIBE[target.kind]
        grant = Grant(self.authorize(request, rule), rule)
        if not grant.sees(target.tenant):
            raise self._not_found(request, grant)
        if b"sec-websocket-key" in request.headers:
            raise _no_socket(target)
        exchange.respond(200, msgspec.json.encode(_describe(target, self._times_ms(target.name))))

    def _respond_ready(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        if self._process.refusal is not None:
            respond_problem(exchange, error_problem(self._process.refusal()))
        elif not self.is_ready():
            respond_problem(exchange, self._unready_problem())
        else:
            exchange.respond(200, b'{"status":"ready","role":"leader"}')

    def _unready_problem(self) -> HttpProblem:
        """Problem of a server that is not ready. The route is public, so it names the operator's own functions that cannot be
        loaded, with the kind of their error alone."""
        engine = self._driver.engine
        own = {name: info for name, info in engine.load_errors.items() if not engine.shared.source(name).tenant}
        if not own:
            return make_problem(503, "not ready", hint="it is starting or stopping")
        said = ", ".join(f"{name} ({info.type})" for name, info in sorted(own.items())[:8])
        return make_problem(503, f"not ready: {said} cannot be loaded", hint="the server's log says why; it is tried again")

    def _not_found(self, request: HttpRequest, grant: Grant) -> LaminaError:
        """404, with the nearest name this client may see as a hint."""
        where = request.path[:80].decode("latin-1")
        if where.startswith("/v1/runs/"):
            return NotFound(f"nothing at {where!r}", hint="of a run there are result, history, cancel and retry")
        if is_management(where):
            hint = "ask that one (--admin-url); lamina serve --admin-port 8701 opens it"
            return UnknownTarget(f"{where!r} is for the management listener; this one takes calls", hint=hint)
        hint = "GET /v1/functions and /v1/workflows list what can be called, /openapi.json all there is"
        if self._suggestion_limiter.try_acquire():
            path, name = where.rstrip("/"), where.rstrip("/").rpartition("/")[2]
            seen = {one.name: f"/v1/{one.kind}s/{one.name}" for one in self.targets.all if grant.sees(one.tenant)}
            names = [name, *(difflib.get_close_matches(name, seen, n=1) if path.count("/") > 1 else [])]
            close = difflib.get_close_matches(path, self._known_paths, n=1, cutoff=0.8)
            found = [seen[one] for one in names if one in seen] or close
            hint = f"did you mean {found[0]}?" if found else hint
        return UnknownTarget(f"nothing at {where!r}", hint=hint)

    # ---------------------------------------------------------------- documents

    def _listing(self, kind: str, grant: Grant) -> tuple[bytes, bytes]:
        seen = [target for target in self.targets.all if target.kind == kind and grant.sees(target.tenant)]
        times_ms = self._times_ms() if kind == "function" else {}
        return msgspec.json.encode([_describe(target, times_ms) for target in seen]), JSON

    def _times_ms(self, of: str = "") -> dict[str, float]:
        """By function, what one request has taken alone on its best slice."""
        best: dict[str, float] = {}
        for function, _, us in measured_times(self._driver.controller.predictor, of):
            best[function] = min(best.get(function, us / 1000), us / 1000)
        return best

    def _openapi(self, grant: Grant) -> bytes:
        """The document of what a tenant may see, of nothing else: also its schemas would tell. Made once for each deployment."""
        found = self._documents.get(grant.tenant)
        if found is None:
            if len(self._documents) >= MAX_DOCUMENTS:
                self._documents.clear()
            found = self._documents[grant.tenant] = msgspec.json.encode(self._make_openapi(grant))
        return found

    def _status(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(status(self._driver, self._metrics.rolling, self.targets.all, self._memory())), JSON

    def _profiles(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(take_snapshot(self._driver, self._metrics.rolling, self.targets.all)), JSON


@cache
def _static(name: str) -> bytes:
    """A file of the page that describes the API: it loads nothing from elsewhere."""
    return resources.files("lamina.gateway").joinpath("static", name).read_bytes()


def _respond_document(document: Document, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
    body, kind = document(grant)
    exchange.respond(200, body, kind)


def _input(param: Param) -> dict[str, Any]:
    return {"name": param.name, "required": param.required} | ({"type": param.type} if param.type else {})


def _no_socket(target: CallTarget) -> LaminaError:
    """A WebSocket was asked for where the description of a target is."""
    if target.kind == "workflow":
        return BadHandshake("workflows have no WebSocket", hint="POST the inputs")
    path = f"/v1/functions/{target.name}/ws"
    return UpgradeRequired(f"there is no WebSocket at this path: it is at {path}", hint=f"open {path}")


def _describe(target: CallTarget, times_ms: dict[str, float]) -> dict[str, Any]:
    return {
        "name": target.name,
        "kind": target.kind,
        "inputs": [_input(param) for param in target.params],
        "slo_ms": target.slo.latency_us / 1000 or None,
        **({"takes_ms": round(times_ms[target.name], 3)} if times_ms.get(target.name) else {}),
        **({"cache_s": target.cache_us / 1e6} if target.cache_us else {}),
        "doc": target.doc,
    }
