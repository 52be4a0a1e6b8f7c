"""HTTP router of `/v1`: paths to handlers, authorization and error responses. Calls themselves are handled by `CallHandler`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

import lamina
from lamina.core.actions import Fail, Refuse
from lamina.errors import Forbidden, LaminaError, UnknownTarget
from lamina.gateway import logs, wire
from lamina.gateway.caller import LOCAL, Caller, Scope
from lamina.gateway.calls import Calls
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.http import Handler
from lamina.gateway.metrics import Metrics
from lamina.gateway.runs import Runs
from lamina.gateway.sparing import Sparing
from lamina.gateway.status import status
from lamina.gateway.traces import Traces
from lamina.live.loop import LiveLoop
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
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

Read = Callable[[Caller], tuple[bytes, bytes]]
"""Makes a body for a client, and its content type."""


@dataclass(frozen=True, slots=True)
class Target:
    """A callable target: a function or a workflow, with its parameters and SLO."""

    name: str
    kind: str  #: "function" or "workflow"
    params: tuple[Param, ...]
    slo: Slo
    doc: str = ""
    tenant: str = ""  #: its owner; "": all tenants may call it
    signature: Signature | None = None  #: what it takes and gives as tensors, where that is known

    def seen_by(self, tenant: str) -> bool:
        """Visible to this tenant: its own, or a target that belongs to no tenant."""
        return not self.tenant or not tenant or self.tenant == tenant


class Api:
    """Routes of a gateway. More can be mounted by prefix (`mounts`)."""

    def __init__(
        self,
        loop: LiveLoop,
        targets: list[Target],
        metrics: Metrics,
        openapi: Callable[[], dict[str, Any]],
        *,
        full_errors: bool = True,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._full_errors = full_errors
        self.calls = Calls(self, loop, metrics)
        self.closing = False
        self.lag_us = 0  #: how long bytes lie unread while this process is busy; part of every call's time
        self.ready: Callable[[], bool] = lambda: True
        self.needless: Callable[[], set[str]] = set  #: functions whose instances belong to a rollout
        self.allow: Callable[[Request, Scope], Caller] = lambda request, scope: LOCAL  #: raises `LaminaError` if not allowed
        self.traces: Traces | None = None  #: spans of calls, where they are wanted
        self.runs: Runs | None = None  #: durable runs, where there is a store
        self.on_targets: Callable[[], None] = lambda: None  #: told when they change
        self._advice = Sparing()  #: to look for a name that is like a wrong one takes long
        self.sites: dict[bytes, Handler] = {}  #: more routes, by how their paths begin
        self.set_targets(targets)
        self._reads: dict[bytes, Read] = {
            b"/": lambda caller: (msgspec.json.encode(_INDEX), wire.JSON),
            b"/v1/functions": lambda caller: self._listing("function", caller),
            b"/v1/workflows": lambda caller: self._listing("workflow", caller),
            b"/v1/status": lambda caller: self._status(),
            b"/metrics": lambda caller: (metrics.text(), b"text/plain; version=0.0.4; charset=utf-8"),
            b"/openapi.json": lambda caller: (msgspec.json.encode(self._seen_paths(openapi(), caller)), wire.JSON),
            b"/healthz": lambda caller: (b'{"status":"ok"}', wire.JSON),
        }

    def set_targets(self, targets: list[Target]) -> None:
        """Replace the list of what can be called."""
        self.targets = targets
        self._calls = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in targets}
        self.on_targets()

    def routes(self) -> dict[bytes, Target]:
        """Targets by the path that calls them."""
        return self._calls

    def handle(self, request: Request, exchange: Exchange) -> None:
        try:
            self._handle(request, exchange)
        except LaminaError as error:
            self.problem(exchange, wire.error_problem(error))

    def _handle(self, request: Request, exchange: Exchange) -> None:
        target = self._calls.get(request.path)
        if target is not None:
            self._at_target(target, request, exchange)
            return
        read = self._reads.get(request.path)
        if read is not None:
            self._read(read, request, exchange)
            return
        if request.path == b"/readyz":
            self._ready(request, exchange)
            return
        for prefix, site in self.sites.items():
            if request.path.startswith(prefix) and request.path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                site(request, exchange)
                return
        raise self._unknown(request, self.allow(request, "read"))  # only identities that may read learn what is not there

    def _at_target(self, target: Target, request: Request, exchange: Exchange) -> None:
        if request.method == "POST":
            self.call(target, request, exchange)
        elif request.method in ("GET", "HEAD"):
            caller = self.allow(request, "read")
            if not target.seen_by(caller.tenant):
                raise self._unknown(request, caller)
            exchange.respond(200, msgspec.json.encode(_about(target)))
        else:
            self.refuse_method(request, exchange, "GET, HEAD, POST")

    def _read(self, read: Read, request: Request, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            self.refuse_method(request, exchange, "GET, HEAD")
            return
        caller = LOCAL if request.path == b"/healthz" else self.allow(request, "read")
        if caller.tenant and request.path in (b"/v1/status", b"/metrics"):
            raise Forbidden("what is told of all tenants is for who runs the server", hint="this token is a tenant's")
        body, kind = read(caller)
        exchange.respond(200, body, kind)

    def _ready(self, request: Request, exchange: Exchange) -> None:
        if request.method not in ("GET", "HEAD"):
            self.refuse_method(request, exchange, "GET, HEAD")
        elif self.closing or not self.ready():
            self.problem(exchange, wire.plain_problem(503, "not ready", hint="it is starting or stopping"))
        else:
            exchange.respond(200, b'{"status":"ready"}')

    def call(self, target: Target, request: Request, exchange: Exchange) -> None:
        if self.closing:
            self.problem(exchange, wire.plain_problem(503, "shutting down", code="cancelled", hint="try another server"))
            return
        caller = self.allow(request, "invoke")
        if not target.seen_by(caller.tenant):
            raise self._unknown(request, caller)
        self.calls.take(target, request, exchange, caller)

    def ending_problem(self, ending: Fail | Refuse) -> wire.Problem:
        """The problem for a call that ended without a result; what its own code said is in the log in any case."""
        if isinstance(ending, Refuse):
            return wire.refusal_problem(ending)
        info = self._loop.error(ending)
        if ending.error not in ("cancelled", "bad-value", "cost"):  # the client's doing, and `respond_problem` logs it
            said = f": {info.type}: {info.message}\n{info.trace}" if info else ""
            log.warning("call %s failed at %s: %s%s", ending.call_id, ending.step or "?", ending.error, said)
        return wire.failure_problem(ending, info, full=self._full_errors)

    def problem(self, exchange: Exchange, problem: wire.Problem) -> None:
        logs.refused(problem)
        exchange.respond(problem.status, problem.body(), wire.PROBLEM, problem.headers())

    def refuse_method(self, request: Request, exchange: Exchange, allowed: str) -> None:
        problem = wire.method_problem(request, allowed)
        logs.refused(problem)
        exchange.respond(405, problem.body(), wire.PROBLEM, problem.headers() + b"allow: %s\r\n" % allowed.encode())

    def _unknown(self, request: Request, caller: Caller) -> UnknownTarget:
        """404, with the nearest name this client may see as a hint."""
        where = request.path[:80].decode("latin-1")
        hint = "GET /v1/functions and /v1/workflows list what can be called, /openapi.json all there is"
        if self._advice.may():
            path, name = where.rstrip("/"), where.rstrip("/").rpartition("/")[2]
            seen = {one.name: f"/v1/{one.kind}s/{one.name}" for one in self.targets if one.seen_by(caller.tenant)}
            others = [known.decode() for known in self._reads if len(known) > 1]
            names = [name, *(difflib.get_close_matches(name, seen, n=1) if path.count("/") > 1 else [])]
            found = [seen[one] for one in names if one in seen] or difflib.get_close_matches(path, others, n=1, cutoff=0.8)
            hint = f"did you mean {found[0]}?" if found else hint
        return UnknownTarget(f"nothing at {where!r}", hint=hint)

    # -------------------------------------------------------------------- reads

    def _listing(self, kind: str, caller: Caller) -> tuple[bytes, bytes]:
        seen = [target for target in self._calls.values() if target.kind == kind and target.seen_by(caller.tenant)]
        return msgspec.json.encode([_about(target) for target in seen]), wire.JSON

    def _seen_paths(self, document: dict[str, Any], caller: Caller) -> dict[str, Any]:
        hidden = {target.name for target in self.targets if not target.seen_by(caller.tenant)}
        if not hidden:
            return document
        paths = document["paths"].items()
        return {**document, "paths": {path: about for path, about in paths if not hidden & {*path.split("/")}}}

    def _status(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(status(self._loop, self._metrics.recent, self._calls.values())), wire.JSON


def _input(param: Param) -> dict[str, Any]:
    return {"name": param.name, "required": param.required} | ({"type": param.type} if param.type else {})


def _about(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "kind": target.kind,
        "inputs": [_input(param) for param in target.params],
        "slo_ms": target.slo.latency_us / 1000 or None,
        "doc": target.doc,
    }
