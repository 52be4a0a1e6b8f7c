"""Calls over HTTP: a request becomes a call of the driver at once, and its outcome becomes the response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lamina.access.records import Identity
from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import LaminaError, StoreDown
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.tracer import Tracer
from lamina.gateway.routes.cold_start_grace import ColdStartGrace
from lamina.gateway.routes.explain import SampledRefusals
from lamina.gateway.routes.http_codec import decode_inputs, encode_result, reply_headers
from lamina.gateway.routes.problems import HttpProblem, error_problem, respond_problem
from lamina.gateway.routes.rejection_cache import RejectionCache
from lamina.gateway.routes.request_options import NO_OPTIONS, OPTION_HEADERS, request_options
from lamina.gateway.routes.runs import RunRoutes, prefers_async
from lamina.gateway.routes.streaming import stream_type
from lamina.gateway.routes.targets import CallTarget
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.process_status import ProcessStatus
from lamina.types import call_for

Explain = Callable[[FailCall | Reject, str, Identity], HttpProblem]
"""The problem for a call of a target that ended without a result, as its caller is told it."""


class DecodedBody:
    """A request body that an ingress process has decoded already."""

    __slots__ = ("arrived_us", "inputs", "size")

    def __init__(self, inputs: dict[str, Any], size: int, arrived_us: int) -> None:
        self.inputs: dict[str, Any] | None = inputs  #: None once they have been claimed
        self.size = size
        self.arrived_us = arrived_us

    def claim(self) -> dict[str, Any]:
        assert self.inputs is not None
        inputs, self.inputs = self.inputs, None
        return inputs


class CallHandler:
    """Handler of calls: options and inputs are decoded, the call is submitted, its outcome is answered."""

    def __init__(
        self,
        driver: RealtimeDriver,
        metrics: Metrics,
        process: ProcessStatus,
        explain: Explain,
        cold_start_grace: ColdStartGrace,
        *,
        refusals: SampledRefusals,
        tracer: Tracer | None = None,
        runs: RunRoutes | None = None,
    ) -> None:
        self.driver = driver
        self.metrics = metrics
        self.explain = explain
        self.rejections = RejectionCache(driver)
        self._process = process
        self._cold_start_grace = cold_start_grace
        self._tracer = tracer
        self._runs = runs
        self._refusals = refusals
        self._prefix = secrets.token_hex(4)
        self._count = 0

    def handle(
        self,
        target: CallTarget,
        request: HttpRequest,
        exchange: Exchange,
        caller: Identity,
        decoded: DecodedBody | None = None,
    ) -> None:
        """Submit a call. Its time begins when its bytes arrive: time unread in a buffer, or in another process, is part of it."""
        self._count += 1
        call_id = f"{self._prefix}-{self._count:x}"
        driver, headers = self.driver, request.headers
        arrived_us = driver.now_us() - self._process.lag_us if decoded is None else decoded.arrived_us
        has_options = not OPTION_HEADERS.isdisjoint(headers)
        if self.rejections.cached and not has_options:
            rejection = self.rejections.find(target.name, caller.tenant, arrived_us)
            if rejection is not None:
                self.metrics.on_rejected(target.name, rejection.reason)
                rejection.respond(exchange, call_id)
                why = f"like call {rejection.call_id} a moment before, and nothing has ended since (rejection cache)"
                self._refusals.record(call_id, target.name, caller.tenant, rejection.reason, why, rejection.offer_us)
                return
        try:
            if has_options and prefers_async(request):
                self._accept_run(target, request, exchange, caller)
                return
            options = request_options(request, arrived_us) if has_options else NO_OPTIONS
            deadline_us, priority, cost_limit, objective = options
            inputs = decode_inputs(request, target.params) if decoded is None else decoded.claim()
        except LaminaError as error:
            problem = error_problem(error, call_id)
            respond_problem(exchange, problem)
            self._refusals.record_problem(problem, target.name, caller.tenant)
            return
        if self._tracer is not None:
            self._tracer.start(call_id, target.name, arrived_us, headers.get(b"traceparent", b""))
        exchange.on_disconnect = partial(driver.cancel, call_id)
        accept = headers.get(b"accept", b"")
        stream = stream_type(accept) if accept and target.kind == "function" else None
        if stream is not None:
            exchange = stream(exchange)
            driver.data.pieces[call_id] = exchange.send_value
        call = call_for(
            call_id,
            target.name,
            arrived_us,
            target.slo if deadline_us else self._cold_start_grace.effective_slo(target.name, target.slo),
            deadline_us=deadline_us,
            tenant=caller.tenant,
            priority=priority,
            cost_limit=cost_limit,
            objective=objective,
            size_bytes=len(request.body) if decoded is None else decoded.size,
        )
        pending = PendingCall(self, call_id, target.name, exchange, caller, arrived_us, accept, has_options)
        driver.submit(call, inputs, pending.on_ended)

    def _accept_run(self, target: CallTarget, request: HttpRequest, exchange: Exchange, caller: Identity) -> None:
        if self._runs is None:
            raise StoreDown("this server keeps no runs", hint="start it with --store, or call without Prefer: respond-async")
        wall_us = time.time_ns() // 1000
        self._runs.accept(target, request, exchange, caller, request_options(request, wall_us))


@dataclass(slots=True)
class PendingCall:
    """A call in flight: what its response needs."""

    handler: CallHandler
    call_id: str
    target: str
    exchange: Exchange
    caller: Identity
    arrived_us: int
    accept: bytes
    has_options: bool

    def on_ended(self, ending: Ending) -> None:
        handler, exchange = self.handler, self.exchange
        handler.metrics.on_call_ended(self.target, ending, self.caller.tenant)
        if isinstance(ending, Reply):
            if exchange.accepts_values:
                exchange.respond_value(handler.driver.data.stored_result(self.call_id), ending)
                return
            try:
                body, kind = encode_result(handler.driver.data.result(self.call_id), self.accept)
            except LaminaError as error:
                respond_problem(exchange, error_problem(error, self.call_id))
                return
            exchange.respond(200, body, kind, reply_headers(ending))
        elif isinstance(ending, Reject) and ending.reason == "deadline" and not self.has_options:
            handler.rejections.store(self.target, self.caller.tenant, self.arrived_us, ending).respond(exchange, self.call_id)
        else:
            respond_problem(exchange, handler.explain(ending, self.target, self.caller))
