"""HTTP router of `/v1`: paths to handlers, authorization and error responses. Calls themselves are handled by `CallHandler`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

import lamina
from lamina.core.actions import FailCall, Reject
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import Forbidden, LaminaError, UnknownTarget
from lamina.gateway.caller_identity import LOCAL_CALLER, CallerIdentity, Scope
from lamina.gateway.observability import logs
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.gateway.observability.tracer import Tracer
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.runs import RunRoutes
from lamina.gateway.routes.status import status
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.server.exchange import Exchange
from lamina.server.http1 import Handler
from lamina.server.request import HttpRequest
from lamina.types import Slo

log = logging.getLogger("lamina")

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

Document = Callable[[CallerIdentity], tuple[bytes, bytes]]
"""Makes a body for a client, and its content type."""


@dataclass(frozen=True, slots=True)
class CallTarget:
    """A callable target: a function or a workflow, with its parameters and SLO."""

    name: str
    kind: str  #: "function" or "workflow"
    params: tuple[Param, ...]
    slo: Slo
    doc: str = ""
    tenant: str = ""  #: its owner; "": all tenants may call it
    signature: Signature | None = None  #: what it takes and gives as tensors, where that is known

    def is_visible_to(self, tenant: str) -> bool:
        """Visible to this tenant: its own, or a target that belongs to no tenant."""
        return not self.tenant or not tenant or self.tenant == tenant


class Router:
    """Routes of a gateway. More can be mounted by prefix (`mounts`)."""

    def __init__(
        self,
        loop: RealtimeDriver,
        targets: list[CallTarget],
        metrics: Metrics,
        openapi: Callable[[], dict[str, Any]],
        *,
        full_errors: bool = True,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._full_errors = full_errors
        self.call_handler = CallHandler(self, loop, metrics)
        self.is_closing = False
        self.lag_us = 0  #: how long bytes lie unread while this process is busy; part of every call's time
        self.is_ready: Callable[[], bool] = lambda: True
        self.not_required_for_ready: Callable[[], set[str]] = set  #: functions whose instances belong to a rollout
        self.authorize: Callable[[HttpRequest, Scope], CallerIdentity] = lambda request, scope: (
            LOCAL_CALLER
        )  #: raises `LaminaError` if not allowed
        self.tracer: Tracer | None = None  #: spans of calls, where they are wanted
        self.runs: RunRoutes | None = None  #: durable runs, where there is a store
        self.on_targets_changed: Callable[[], None] = lambda: None  #: told when they change
        self._suggestion_limiter = RateLimiter()  #: to look for a name that is like a wrong one takes long
        self.mounts: dict[bytes, Handler] = {}  #: more routes, by how their paths begin
        self.set_targets(targets)
        self._documents: dict[bytes, Document] = {
            b"/": lambda caller: (msgspec.json.encode(_INDEX), http_codec.JSON),
            b"/v1/functions": lambda caller: self._listing("function", caller),
            b"/v1/workflows": lambda caller: self._listing("workflow", caller),
            b"/v1/status": lambda caller: self._status(),
            b"/metrics": lambda caller: (metrics.exposition(), b"text/plain; version=0.0.4; charset=utf-8"),
            b"/openapi.json": lambda caller: (msgspec.json.encode(self._visible_paths(openapi(), caller)), http_codec.JSON),
            b"/healthz": lambda caller: (b'{"status":"ok"}', http_codec.JSON),
        }

    def set_targets(self, targets: list[CallTarget]) -> None:
        """Replace the list of what can be called."""
        self.targets = targets
        self._targets_by_path = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in targets}
        self.on_targets_changed()

    def targets_by_path(self) -> dict[bytes, CallTarget]:
        """Targets by the path that calls them."""
        return self._targets_by_path

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        try:
            self._handle(request, exchange)
        except LaminaError as error:
            self.respond_problem(exchange, http_codec.error_problem(error))

    def _handle(self, request: HttpRequest, exchange: Exchange) -> None:
        target = self._targets_by_path.get(request.path)
        if target is not None:
            self._handle_target(target, request, exchange)
            return
        read = self._documents.get(request.path)
        if read is not None:
            self._respond_document(read, request, exchange)
            return
        if request.path == b"/readyz":
            self._respond_ready(request, exchange)
            return
        for prefix, site in self.mounts.items():
            if request.path.startswith(prefix) and request.path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                site(request, exchange)
                return
        raise self._not_found(request, self.authorize(request, "read"))  # only identities that may read learn what is not there

    def _handle_target(self, target: CallTarget, request: HttpRequest, exchange: Exchange) -> None:
        if request.method == "POST":
            self.call(target, request, exchange)
        elif request.method in ("GET", "HEAD"):
            caller = self.authorize(request, "read")
            if not target.is_visible_to(caller.tenant):
                raise self._not_found(request, caller)
            exchange.respond(200, msgspec.json.encode(_describe(target)))
        else:
            self.reject_method(request, exchange, "GET, HEAD, POST")

    def _respond_document(self, read: Document, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            self.reject_method(request, exchange, "GET, HEAD")
            return
        caller = LOCAL_CALLER if request.path == b"/healthz" else self.authorize(request, "read")
        if caller.tenant and request.path in (b"/v1/status", b"/metrics"):
            raise Forbidden("what is told of all tenants is for who runs the server", hint="this token is a tenant's")
        body, kind = read(caller)
        exchange.respond(200, body, kind)

    def _respond_ready(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            self.reject_method(request, exchange, "GET, HEAD")
        elif self.is_closing or not self.is_ready():
            self.respond_problem(exchange, http_codec.make_problem(503, "not ready", hint="it is starting or stopping"))
        else:
            exchange.respond(200, b'{"status":"ready"}')

    def call(self, target: CallTarget, request: HttpRequest, exchange: Exchange) -> None:
        if self.is_closing:
            self.respond_problem(
                exchange, http_codec.make_problem(503, "shutting down", code="cancelled", hint="try another server")
            )
            return
        caller = self.authorize(request, "invoke")
        if not target.is_visible_to(caller.tenant):
            raise self._not_found(request, caller)
        self.call_handler.handle(target, request, exchange, caller)

    def ending_problem(self, ending: FailCall | Reject) -> http_codec.HttpProblem:
        """The problem for a call that ended without a result; what its own code said is in the log in any case."""
        if isinstance(ending, Reject):
            return http_codec.rejection_problem(ending)
        info = self._loop.error_info(ending)
        if ending.error not in ("cancelled", "bad-value", "cost"):  # the client's doing, and `respond_problem` logs it
            said = f": {info.type}: {info.message}\n{info.trace}" if info else ""
            log.warning("call %s failed at %s: %s%s", ending.call_id, ending.step or "?", ending.error, said)
        return http_codec.failure_problem(ending, info, full=self._full_errors)

    def respond_problem(self, exchange: Exchange, problem: http_codec.HttpProblem) -> None:
        logs.log_rejection(problem)
        exchange.respond(problem.status, problem.body(), http_codec.PROBLEM, problem.headers())

    def reject_method(self, request: HttpRequest, exchange: Exchange, allowed: str) -> None:
        problem = http_codec.method_problem(request, allowed)
        logs.log_rejection(problem)
        exchange.respond(405, problem.body(), http_codec.PROBLEM, problem.headers() + b"allow: %s\r\n" % allowed.encode())

    def _not_found(self, request: HttpRequest, caller: CallerIdentity) -> UnknownTarget:
        """404, with the nearest name this client may see as a hint."""
        where = request.path[:80].decode("latin-1")
        hint = "GET /v1/functions and /v1/workflows list what can be called, /openapi.json all there is"
        if self._suggestion_limiter.try_acquire():
            path, name = where.rstrip("/"), where.rstrip("/").rpartition("/")[2]
            seen = {one.name: f"/v1/{one.kind}s/{one.name}" for one in self.targets if one.is_visible_to(caller.tenant)}
            others = [known.decode() for known in self._documents if len(known) > 1]
            names = [name, *(difflib.get_close_matches(name, seen, n=1) if path.count("/") > 1 else [])]
            found = [seen[one] for one in names if one in seen] or difflib.get_close_matches(path, others, n=1, cutoff=0.8)
            hint = f"did you mean {found[0]}?" if found else hint
        return UnknownTarget(f"nothing at {where!r}", hint=hint)

    # -------------------------------------------------------------------- reads

    def _listing(self, kind: str, caller: CallerIdentity) -> tuple[bytes, bytes]:
        seen = [
            target for target in self._targets_by_path.values() if target.kind == kind and target.is_visible_to(caller.tenant)
        ]
        return msgspec.json.encode([_describe(target) for target in seen]), http_codec.JSON

    def _visible_paths(self, document: dict[str, Any], caller: CallerIdentity) -> dict[str, Any]:
        hidden = {target.name for target in self.targets if not target.is_visible_to(caller.tenant)}
        if not hidden:
            return document
        paths = document["paths"].items()
        return {**document, "paths": {path: about for path, about in paths if not hidden & {*path.split("/")}}}

    def _status(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(status(self._loop, self._metrics.rolling, self._targets_by_path.values())), http_codec.JSON


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
