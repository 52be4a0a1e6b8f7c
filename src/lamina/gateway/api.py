"""The routes. A call is parsed, bound and handed to the loop on the spot; its answer is written when the loop says so."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from lamina.core.actions import Fail, Refuse, Reply
from lamina.errors import BadValue, LaminaError
from lamina.gateway import wire
from lamina.gateway.caller import LOCAL, Caller, Scope
from lamina.gateway.closed import Closed
from lamina.gateway.heads import Request
from lamina.gateway.http import Exchange, Handler
from lamina.gateway.metrics import Metrics
from lamina.live.loop import Ending, LiveLoop
from lamina.sdk.binding import Param
from lamina.types import Slo, call_for

log = logging.getLogger("lamina")

MAX_DEADLINE_MS = 86_400_000.0
CLOSED_US = 1_000
_WISHES = {b"lamina-deadline-ms", b"lamina-priority", b"lamina-cost-limit"}


@dataclass(frozen=True, slots=True)
class Target:
    """Something that can be called."""

    name: str
    kind: str  #: "function" or "workflow"
    params: tuple[Param, ...]
    slo: Slo
    doc: str = ""


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
        self.sites: dict[bytes, Handler] = {}  #: more routes, by how their paths begin
        self.targets = targets
        self._calls = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in targets}
        self._reads: dict[bytes, Callable[[], tuple[bytes, bytes]]] = {
            b"/v1/functions": lambda: self._listing("function"),
            b"/v1/workflows": lambda: self._listing("workflow"),
            b"/v1/status": self._status,
            b"/metrics": lambda: (metrics.text(), b"text/plain; version=0.0.4; charset=utf-8"),
            b"/openapi.json": lambda: (msgspec.json.encode(openapi()), wire.JSON),
            b"/healthz": lambda: (b'{"status":"ok"}', wire.JSON),
        }

    def handle(self, request: Request, exchange: Exchange) -> None:
        target = self._calls.get(request.path)
        if target is not None:
            if request.method == "POST":
                self._call(target, request, exchange)
            elif request.method in ("GET", "HEAD"):
                exchange.respond(200, msgspec.json.encode(_about(target)))
            else:
                _refuse_method(exchange, b"GET, HEAD, POST")
            return
        read = self._reads.get(request.path)
        if read is not None or request.path == b"/readyz":
            if request.method not in ("GET", "HEAD"):
                _refuse_method(exchange, b"GET, HEAD")
            elif read is not None:
                body, kind = read()
                exchange.respond(200, body, kind)
            elif self.closing or not self.ready():
                self.problem(exchange, wire.plain_problem(503, "not ready", hint="it is starting or stopping"))
            else:
                exchange.respond(200, b'{"status":"ready"}')
            return
        for prefix, site in self.sites.items():
            if request.path.startswith(prefix):
                try:
                    site(request, exchange)
                except LaminaError as error:
                    self.problem(exchange, wire.error_problem(error))
                return
        self.problem(
            exchange,
            wire.plain_problem(
                404,
                "nothing at this address",
                code="unknown-target",
                hint="GET /v1/functions and /v1/workflows list what is here",
            ),
        )

    # -------------------------------------------------------------------- calls

    def _call(self, target: Target, request: Request, exchange: Exchange) -> None:
        if self.closing:
            self.problem(exchange, wire.plain_problem(503, "shutting down", code="cancelled", hint="try another server"))
            return
        self._count += 1
        call_id = f"{self._prefix}-{self._count:x}"
        loop = self._loop
        now_us = loop.now_us() - self.lag_us
        closed = self._closed.get(target.name)
        if closed is not None:
            if closed.turn == loop.turn and now_us < closed.until_us and not _WISHES & request.headers.keys():
                self._metrics.refused(target.name, closed.reason)
                closed.answer(exchange, call_id)
                return
            del self._closed[target.name]
        try:
            inputs = wire.inputs_of(request, target.params)
            deadline_us, priority, cost_limit = _wishes(request, now_us)
        except LaminaError as error:
            self.problem(exchange, wire.error_problem(error, call_id))
            return
        call = call_for(
            call_id,
            target.name,
            now_us,
            target.slo,
            deadline_us=deadline_us,
            priority=priority,
            cost_limit=cost_limit,
            size_bytes=len(request.body),
        )
        accept = request.header(b"accept")
        exchange.on_gone = lambda: loop.cancel(call_id)

        def on_end(ending: Ending) -> None:
            self._metrics.ended(target.name, ending)
            if type(ending) is Reply:
                try:
                    body, kind = wire.answer_body(loop.data.result(call_id), accept)
                except LaminaError as error:
                    self.problem(exchange, wire.error_problem(error, call_id))
                    return
                exchange.respond(200, body, kind, wire.reply_headers(ending))
            else:
                self._no_answer(exchange, ending)
                if type(ending) is Refuse and ending.reason == "deadline" and not _WISHES & request.headers.keys():
                    self._closed[target.name] = Closed(loop.turn, now_us + CLOSED_US, ending)

        loop.submit(call, inputs, on_end)

    def _no_answer(self, exchange: Exchange, ending: Ending) -> None:
        if isinstance(ending, Refuse):
            problem = wire.refusal_problem(ending)
        else:
            assert isinstance(ending, Fail)
            info = self._loop.error(ending)
            problem = wire.failure_problem(ending, info, full=self._full_errors)
            if ending.error != "cancelled":  # who cancels knows
                said = f": {info.type}: {info.message}\n{info.trace}" if info else ""
                log.warning("call %s failed at %s: %s%s", ending.call_id, ending.step or "?", ending.error, said)
        self.problem(exchange, problem)

    def problem(self, exchange: Exchange, problem: wire.Problem) -> None:
        exchange.respond(problem.status, problem.body(), wire.PROBLEM, problem.headers())

    # -------------------------------------------------------------------- reads

    def _listing(self, kind: str) -> tuple[bytes, bytes]:
        return msgspec.json.encode([_about(target) for target in self._calls.values() if target.kind == kind]), wire.JSON

    def _status(self) -> tuple[bytes, bytes]:
        """Devices, instances and queues: what the status line and `top` show."""
        state = self._loop.controller.state
        status = {
            "calls": len(state.runs),
            "devices": [
                {
                    "id": name,
                    "kind": device.spec.kind,
                    "units": device.spec.units,
                    "leased": device.busy.bit_count(),
                    "memory_mib": device.spec.memory_mib,
                    "memory_used_mib": device.memory_used_mib,
                }
                for name, device in state.devices.items()
            ],
            "functions": [
                {
                    "name": name,
                    "queue": len(function.queue),
                    "instances": [
                        {"id": i.id, "device": i.device, "phase": i.phase.value, "batches": len(i.batches)}
                        for i in function.instances.values()
                    ],
                }
                for name, function in state.functions.items()
            ],
        }
        return msgspec.json.encode(status), wire.JSON


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
