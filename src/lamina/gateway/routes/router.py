"""HTTP router of `/v1`: paths to handlers, authorization and error responses. Calls themselves are handled by `CallHandler`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import lamina
from lamina.access.records import Identity
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import Cancelled, Forbidden, LaminaError, UnknownTarget
from lamina.gateway.auth import LOCAL, Authorize
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.gateway.routes.calls import CallHandler, DecodedBody
from lamina.gateway.routes.http_codec import JSON
from lamina.gateway.routes.problems import defect_problem, error_problem, make_problem, reject_method, respond_problem
from lamina.gateway.routes.status import status
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.sdk.binding import Param
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import Handler
from lamina.server.process_status import ProcessStatus

_INDEX = {
    "server": f"lamina {lamina.__version__}",
    "functions": "/v1/functions",
    "workflows": "/v1/workflows",
    "models": "/v2",
    "runs": "/v1/runs",
    "state": "/v1/state",
    "bill": "/v1/bill",
    "status": "/v1/status",
    "metrics": "/metrics",
    "health": "/healthz",
    "ready": "/readyz",
    "openapi": "/openapi.json",
}

Document = Callable[[Identity], tuple[bytes, bytes]]
"""Makes a body for a client, and its content type."""


class Router:
    """Routes of a gateway: calls, documents, and handlers mounted by prefix (`mounts`)."""

    def __init__(
        self,
        driver: RealtimeDriver,
        targets: TargetRegistry,
        metrics: Metrics,
        call_handler: CallHandler,
        authorize: Authorize,
        process: ProcessStatus,
        *,
        is_ready: Callable[[], bool],
        memory: Callable[[], dict[str, Any]],
        openapi: Callable[[], dict[str, Any]],
        mounts: Mapping[bytes, Handler],
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self.targets = targets
        self.call_handler = call_handler
        self.authorize = authorize
        self.is_ready = is_ready
        self._process = process
        self._mounts = mounts
        self._memory = memory
        self._suggestion_limiter = RateLimiter()  #: the search for a similar name takes long
        self._documents: dict[bytes, Document] = {
            b"/": lambda caller: (msgspec.json.encode(_INDEX), JSON),
            b"/v1/functions": lambda caller: self._listing("function", caller),
            b"/v1/workflows": lambda caller: self._listing("workflow", caller),
            b"/v1/status": lambda caller: self._status(),
            b"/metrics": lambda caller: (metrics.exposition(), b"text/plain; version=0.0.4; charset=utf-8"),
            b"/openapi.json": lambda caller: (msgspec.json.encode(self._visible_paths(openapi(), caller)), JSON),
            b"/healthz": lambda caller: (b'{"status":"ok"}', JSON),
        }

    def handle(self, request: HttpRequest, exchange: Exchange, decoded: DecodedBody | None = None) -> None:
        """Handle a request; `decoded`: its body has been read by an ingress process."""
        try:
            target = self.targets.by_path.get(request.path)
            if target is None:
                self._handle_other(request, exchange)
            elif request.method != "POST":
                self._describe_target(target, request, exchange)
            elif self._process.is_closing:
                raise Cancelled("shutting down", hint="try another server")
            else:
                caller = self.authorize(request, "invoke")
                if target.tenant and not target.is_visible_to(caller.tenant):
                    raise self._not_found(request, caller)
                self.call_handler.handle(target, request, exchange, caller, decoded)
        except LaminaError as error:
            respond_problem(exchange, error_problem(error))
        except Exception as error:
            respond_problem(exchange, defect_problem(f"{request.method} {request.path[:200]!r} failed", error))

    def _handle_other(self, request: HttpRequest, exchange: Exchange) -> None:
        document = self._documents.get(request.path)
        if document is not None:
            self._respond_document(document, request, exchange)
            return
        if request.path == b"/readyz":
            self._respond_ready(request, exchange)
            return
        for prefix, handler in self._mounts.items():
            if request.path.startswith(prefix) and request.path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                handler(request, exchange)
                return
        raise self._not_found(request, self.authorize(request, "read"))  # only identities that may read learn what is not there

    def _describe_target(self, target: CallTarget, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            reject_method(request, exchange, "GET, HEAD, POST")
            return
        caller = self.authorize(request, "read")
        if not target.is_visible_to(caller.tenant):
            raise self._not_found(request, caller)
        exchange.respond(200, msgspec.json.encode(_describe(target)))

    def _respond_document(self, document: Document, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            reject_method(request, exchange, "GET, HEAD")
            return
        caller = LOCAL if request.path == b"/healthz" else self.authorize(request, "read")
        if caller.tenant and request.path in (b"/v1/status", b"/metrics"):
            raise Forbidden("figures of all tenants are for the operator of the server", hint="this token is a tenant's")
        body, kind = document(caller)
        exchange.respond(200, body, kind)

    def _respond_ready(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            reject_method(request, exchange, "GET, HEAD")
        elif not self.is_ready():
            respond_problem(exchange, make_problem(503, "not ready", hint="it is starting or stopping"))
        else:
            exchange.respond(200, b'{"status":"ready"}')

    def _not_found(self, request: HttpRequest, caller: Identity) -> UnknownTarget:
        """404, with the nearest name this client may see as a hint."""
        where = request.path[:80].decode("latin-1")
        hint = "GET /v1/functions and /v1/workflows list what can be called, /openapi.json all there is"
        if self._suggestion_limiter.try_acquire():
            path, name = where.rstrip("/"), where.rstrip("/").rpartition("/")[2]
            seen = {one.name: f"/v1/{one.kind}s/{one.name}" for one in self.targets.all if one.is_visible_to(caller.tenant)}
            others = [known.decode() for known in self._documents if len(known) > 1]
            names = [name, *(difflib.get_close_matches(name, seen, n=1) if path.count("/") > 1 else [])]
            found = [seen[one] for one in names if one in seen] or difflib.get_close_matches(path, others, n=1, cutoff=0.8)
            hint = f"did you mean {found[0]}?" if found else hint
        return UnknownTarget(f"nothing at {where!r}", hint=hint)

    # ---------------------------------------------------------------- documents

    def _listing(self, kind: str, caller: Identity) -> tuple[bytes, bytes]:
        seen = [target for target in self.targets.all if target.kind == kind and target.is_visible_to(caller.tenant)]
        return msgspec.json.encode([_describe(target) for target in seen]), JSON

    def _visible_paths(self, document: dict[str, Any], caller: Identity) -> dict[str, Any]:
        hidden = {target.name for target in self.targets.all if not target.is_visible_to(caller.tenant)}
        if not hidden:
            return document
        paths = document["paths"].items()
        return {**document, "paths": {path: about for path, about in paths if not hidden & {*path.split("/")}}}

    def _status(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(status(self._driver, self._metrics.rolling, self.targets.all, self._memory())), JSON


def _input(param: Param) -> dict[str, Any]:
    return {"name": param.name, "required": param.required} | ({"type": param.type} if param.type else {})


def _describe(target: CallTarget) -> dict[str, Any]:
    return {
        "name": target.name,
        "kind": target.kind,
        "inputs": [_input(param) for param in target.params],
        "slo_ms": target.slo.latency_us / 1000 or None,
        "doc": target.doc,
    }
