"""The routes. A call is parsed, bound and handed to the loop on the spot; its answer is written when the loop says so."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from lamina.core.actions import Fail, Refuse, Reply
from lamina.errors import BadValue, Forbidden, LaminaError, StoreDown, UnknownTarget
from lamina.gateway import wire
from lamina.gateway.caller import LOCAL, Caller, Scope
from lamina.gateway.closed import Closed
from lamina.gateway.events import KIND, Events
from lamina.gateway.heads import Request
from lamina.gateway.http import Exchange, Handler
from lamina.gateway.metrics import Metrics
from lamina.gateway.runs import Runs, wants_async
from lamina.gateway.status import status
from lamina.gateway.traces import Traces
from lamina.live.loop import Ending, LiveLoop
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.types import Slo, call_for

log = logging.getLogger("lamina")

MAX_DEADLINE_MS = 86_400_000.0
CLOSED_US = 20_000  #: a refusal is repeated for at most so long without asking again
_WISHES = {b"lamina-deadline-ms", b"lamina-priority", b"lamina-cost-limit", b"prefer"}


@dataclass(frozen=True, slots=True)
class Target:
    """Something that can be called."""

    name: str
    kind: str  #: "function" or "workflow"
    params: tuple[Param, ...]
    slo: Slo
    doc: str = ""
    tenant: str = ""  #: whose it is; "": anybody's
    signature: Signature | None = None  #: what it takes and gives as tensors, where that is known

    def seen_by(self, tenant: str) -> bool:
        return not self.tenant or not tenant or self.tenant == tenant


class Api:
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
        self._prefix = secrets.token_hex(4)
        self._count = 0
        self._closed: dict[str, Closed] = {}
        self.closing = False
        self.lag_us = 0  #: how long bytes lie unread while this process is busy; part of every call's time
        self.ready: Callable[[], bool] = lambda: True
        self.allow: Callable[[Request, Scope], Caller] = lambda request, scope: LOCAL  #: raises `LaminaError` for who may not
        self.traces: Traces | None = None  #: who wants to know what became of which call
        self.runs: Runs | None = None  #: where calls are accepted that nobody waits for
        self.on_targets: Callable[[], None] = lambda: None  #: told when they change
        self.sites: dict[bytes, Handler] = {}  #: more routes, by how their paths begin
        self.set_targets(targets)
        self._reads: dict[bytes, Callable[[Caller], tuple[bytes, bytes]]] = {
            b"/v1/functions": lambda caller: self._listing("function", caller),
            b"/v1/workflows": lambda caller: self._listing("workflow", caller),
            b"/v1/status": lambda caller: self._status(),
            b"/metrics": lambda caller: (metrics.text(), b"text/plain; version=0.0.4; charset=utf-8"),
            b"/openapi.json": lambda caller: (msgspec.json.encode(self._seen_paths(openapi(), caller)), wire.JSON),
            b"/healthz": lambda caller: (b'{"status":"ok"}', wire.JSON),
        }

    def set_targets(self, targets: list[Target]) -> None:
        """What can be called from now on."""
        self.targets = targets
        self._calls = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in targets}
        self.on_targets()

    def routes(self) -> dict[bytes, Target]:
        """Paths of everything that can be called."""
        return self._calls

    def handle(self, request: Request, exchange: Exchange) -> None:
        try:
            self._handle(request, exchange)
        except LaminaError as error:
            self.problem(exchange, wire.error_problem(error))

    def _handle(self, request: Request, exchange: Exchange) -> None:
        target = self._calls.get(request.path)
        if target is not None:
            if request.method == "POST":
                self._call(target, request, exchange)
            elif request.method in ("GET", "HEAD"):
                if not target.seen_by(self.allow(request, "read").tenant):
                    raise _unknown()
                exchange.respond(200, msgspec.json.encode(_about(target)))
            else:
                _refuse_method(exchange, b"GET, HEAD, POST")
            return
        read = self._reads.get(request.path)
        if read is not None or request.path == b"/readyz":
            if request.method not in ("GET", "HEAD"):
                _refuse_method(exchange, b"GET, HEAD")
            elif read is not None:
                caller = LOCAL if request.path == b"/healthz" else self.allow(request, "read")
                if caller.tenant and request.path in (b"/v1/status", b"/metrics"):
                    raise Forbidden("what is told of all tenants is for who runs the server", hint="this token is a tenant's")
                body, kind = read(caller)
                exchange.respond(200, body, kind)
            elif self.closing or not self.ready():
                self.problem(exchange, wire.plain_problem(503, "not ready", hint="it is starting or stopping"))
            else:
                exchange.respond(200, b'{"status":"ready"}')
            return
        for prefix, site in self.sites.items():
            if request.path.startswith(prefix):
                site(request, exchange)
                return
        self.allow(request, "read")  # what is not there is nobody else's business
        raise _unknown()

    # -------------------------------------------------------------------- calls

    def _call(self, target: Target, request: Request, exchange: Exchange) -> None:
        if self.closing:
            self.problem(exchange, wire.plain_problem(503, "shutting down", code="cancelled", hint="try another server"))
            return
        caller = self.allow(request, "invoke")
        if not target.seen_by(caller.tenant):
            raise _unknown()
        door = target.name if not caller.tenant else f"{target.name}/{caller.tenant}"
        self._count += 1
        call_id = f"{self._prefix}-{self._count:x}"
        loop = self._loop
        now_us = loop.now_us() - self.lag_us
        parsed = request.parsed
        if parsed is not None:
            now_us -= parsed.waited_us
        closed = self._closed.get(door)
        if closed is not None:
            if closed.turn == loop.turn and now_us < closed.until_us and _WISHES.isdisjoint(request.headers):
                self._metrics.refused(target.name, closed.reason)
                closed.answer(exchange, call_id)
                return
            del self._closed[door]
        try:
            if b"prefer" in request.headers and wants_async(request):
                self._call_later(target, request, exchange, caller)
                return
            deadline_us, priority, cost_limit = _wishes(request, now_us)
            inputs = wire.inputs_of(request, target.params) if parsed is None else parsed.take()
        except LaminaError as error:
            self.problem(exchange, wire.error_problem(error, call_id))
            return
        call = call_for(
            call_id,
            target.name,
            now_us,
            target.slo,
            deadline_us=deadline_us,
            tenant=caller.tenant,
            priority=priority,
            cost_limit=cost_limit,
            size_bytes=len(request.body) if parsed is None else parsed.size,
        )
        if self.traces is not None:
            self.traces.begin(call_id, target.name, now_us, request.header(b"traceparent"))
        accept = request.header(b"accept")
        exchange.on_gone = lambda: loop.cancel(call_id)
        if KIND in accept and target.kind == "function":
            exchange = events = Events(exchange)
            loop.data.pieces[call_id] = events.piece

        def on_end(ending: Ending) -> None:
            self._metrics.ended(target.name, ending, caller.tenant)
            if type(ending) is Reply:
                if exchange.takes_values:
                    exchange.value(loop.data.stored_result(call_id), wire.reply_headers(ending))
                    return
                try:
                    body, kind = wire.answer_body(loop.data.result(call_id), accept)
                except LaminaError as error:
                    self.problem(exchange, wire.error_problem(error, call_id))
                    return
                exchange.respond(200, body, kind, wire.reply_headers(ending))
            elif type(ending) is Refuse and ending.reason == "deadline" and _WISHES.isdisjoint(request.headers):
                closed = self._closed[door] = Closed(loop.turn, now_us + min(ending.retry_after_us, CLOSED_US), ending)
                closed.answer(exchange, call_id)
            else:
                assert not isinstance(ending, Reply)
                self.problem(exchange, self.ending_problem(ending))

        loop.submit(call, inputs, on_end)

    def _call_later(self, target: Target, request: Request, exchange: Exchange, caller: Caller) -> None:
        if self.runs is None:
            raise StoreDown("this server keeps no runs", hint="start it with --store, or call without Prefer: respond-async")
        wall_us = time.time_ns() // 1000
        self.runs.accept(target, request, exchange, caller, _wishes(request, wall_us))

    def ending_problem(self, ending: Fail | Refuse) -> wire.Problem:
        """What is said of a call that ended without a result; what its own code said is in the log in any case."""
        if isinstance(ending, Refuse):
            return wire.refusal_problem(ending)
        info = self._loop.error(ending)
        if ending.error != "cancelled":  # who cancels knows
            said = f": {info.type}: {info.message}\n{info.trace}" if info else ""
            log.warning("call %s failed at %s: %s%s", ending.call_id, ending.step or "?", ending.error, said)
        return wire.failure_problem(ending, info, full=self._full_errors)

    def problem(self, exchange: Exchange, problem: wire.Problem) -> None:
        exchange.respond(problem.status, problem.body(), wire.PROBLEM, problem.headers())

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


def _unknown() -> UnknownTarget:
    return UnknownTarget("nothing at this address", hint="GET /v1/functions and /v1/workflows list what is here")


def _refuse_method(exchange: Exchange, allowed: bytes) -> None:
    problem = wire.plain_problem(405, "this method is not for this address", hint=f"allowed: {allowed.decode()}")
    exchange.respond(405, problem.body(), wire.PROBLEM, b"allow: %s\r\n" % allowed)


def _about(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "kind": target.kind,
        "inputs": [{"name": param.name, "required": param.required} for param in target.params],
        "slo_ms": target.slo.latency_us / 1000 or None,
        "doc": target.doc,
    }


def _wishes(request: Request, now_us: int) -> tuple[int, int, float]:
    """Deadline, priority and cost limit from the headers; absent ones are 0."""
    headers = request.headers
    deadline_us = priority = 0
    cost_limit = 0.0
    if b"lamina-deadline-ms" in headers:
        ms = _number(headers[b"lamina-deadline-ms"], "lamina-deadline-ms", 0.001, MAX_DEADLINE_MS)
        deadline_us = now_us + max(1, int(ms * 1000))
    if b"lamina-priority" in headers:
        priority = int(_number(headers[b"lamina-priority"], "lamina-priority", -10, 10))
    if b"lamina-cost-limit" in headers:
        cost_limit = _number(headers[b"lamina-cost-limit"], "lamina-cost-limit", 0.0, 1e12)
    return deadline_us, priority, cost_limit


def _number(text: bytes, field: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        shown = text[:40].decode("latin-1")
        raise BadValue(
            f"{field}: {shown!r} is not a number from {least:g} to {most:g}",
            hint="leave the header out for the default",
        )
    return number
