"""Calls over HTTP: a request becomes a call of the loop at once, and its outcome becomes the response."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lamina.core.actions import Reject, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import LaminaError, StoreDown
from lamina.gateway.caller_identity import CallerIdentity
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.routes import http_codec, streaming
from lamina.gateway.routes.cold_start_grace import ColdStartGrace
from lamina.gateway.routes.rejection_cache import CachedRejection
from lamina.gateway.routes.request_options import OPTION_HEADERS, RequestOptions, request_options
from lamina.gateway.routes.runs import prefers_async
from lamina.server.exchange import Exchange
from lamina.server.request import HttpRequest
from lamina.types import Call, call_for

if TYPE_CHECKING:
    from lamina.gateway.routes.router import CallTarget, Router

LARGE_BODY_BYTES = 16 * 2**10
REJECTION_TTL_US = 20_000  #: a refusal is repeated for at most so long without asking again


class CallHandler:
    """Handler of calls: options and inputs are decoded, the call is submitted, its outcome is answered."""

    def __init__(self, api: Router, loop: RealtimeDriver, metrics: Metrics) -> None:
        self.router = api
        self.loop = loop
        self.metrics = metrics
        self.cold_start_grace = ColdStartGrace(loop)
        self.rejections: dict[str, CachedRejection] = {}  #: by door: a target, or a target and a tenant
        self._prefix = secrets.token_hex(4)
        self._prefix_bytes = self._prefix.encode()
        self._count = 0

    def next_id(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count:x}"

    def handle(self, target: CallTarget, request: HttpRequest, exchange: Exchange, caller: CallerIdentity) -> None:
        call_id = self.next_id()
        asked = PendingCall(self, call_id, target, request, exchange, caller.tenant, self._arrived_us(request))
        if asked.reject_from_cache():
            return
        try:
            if b"prefer" in request.headers and prefers_async(request):
                self._accept_run(target, request, exchange, caller)
                return
            wanted = request_options(request, asked.arrived_us)
            inputs = http_codec.decode_inputs(request, target.params) if request.decoded is None else request.decoded.claim()
        except LaminaError as error:
            self.router.respond_problem(exchange, http_codec.error_problem(error, call_id))
            return
        asked.attach()
        call = self._call(asked, wanted)
        if len(request.body) > LARGE_BODY_BYTES:  # its values are elsewhere now, and it may wait for long
            asked.request = replace(request, body=b"")
        self.loop.submit(call, inputs, asked.on_ended)

    def cache_rejection(self, request: HttpRequest, target: CallTarget, closed: CachedRejection) -> None:
        """Repeat this rejection for requests with the same head, before their bodies are looked at."""
        if request.head is None:
            return

        def refuse_again(date_line: bytes) -> bytes | None:
            late = self.loop.now_us() - self.router.lag_us >= closed.until_us
            if late or closed.generation != self.loop.capacity_generation or self.router.is_closing:
                return None
            self._count += 1
            self.metrics.on_rejected(target.name, closed.reason)
            return closed.raw_response(b"%b-%x" % (self._prefix_bytes, self._count), date_line)

        request.head.shortcut = refuse_again

    def _arrived_us(self, request: HttpRequest) -> int:
        """Arrival time. Time in a socket buffer or in another process, before any clock was read, is part of the call's time."""
        waited_us = request.decoded.queued_us if request.decoded is not None else 0
        return self.loop.now_us() - self.router.lag_us - waited_us

    def _call(self, asked: PendingCall, wanted: RequestOptions) -> Call:
        target, request = asked.target, asked.request
        deadline_us, priority, cost_limit = wanted
        return call_for(
            asked.call_id,
            target.name,
            asked.arrived_us,
            target.slo if deadline_us else self.cold_start_grace.effective_slo(target.name, target.slo),
            deadline_us=deadline_us,
            tenant=asked.tenant,
            priority=priority,
            cost_limit=cost_limit,
            size_bytes=len(request.body) if request.decoded is None else request.decoded.size,
        )

    def _accept_run(self, target: CallTarget, request: HttpRequest, exchange: Exchange, caller: CallerIdentity) -> None:
        if self.router.runs is None:
            raise StoreDown("this server keeps no runs", hint="start it with --store, or call without Prefer: respond-async")
        wall_us = time.time_ns() // 1000
        self.router.runs.accept(target, request, exchange, caller, request_options(request, wall_us))


@dataclass(slots=True)
class PendingCall:
    """A call in flight, from its request to its response."""

    handler: CallHandler
    call_id: str
    target: CallTarget
    request: HttpRequest
    exchange: Exchange
    tenant: str
    arrived_us: int

    @property
    def _rejection_key(self) -> str:
        return self.target.name if not self.tenant else f"{self.target.name}/{self.tenant}"

    @property
    def _has_no_options(self) -> bool:
        return OPTION_HEADERS.isdisjoint(self.request.headers)

    def reject_from_cache(self) -> bool:
        """Respond with the cached rejection, as long as nothing has happened that could change it."""
        calls = self.handler
        if not calls.rejections:
            return False
        closed = calls.rejections.get(self._rejection_key)
        if closed is None:
            return False
        if closed.generation != calls.loop.capacity_generation or self.arrived_us >= closed.until_us or not self._has_no_options:
            del calls.rejections[self._rejection_key]
            return False
        calls.metrics.on_rejected(self.target.name, closed.reason)
        calls.cache_rejection(self.request, self.target, closed)
        closed.respond(self.exchange, self.call_id)
        return True

    def attach(self) -> None:
        """Set up tracing, streaming of chunks and cancellation on disconnect, before the call is submitted."""
        loop, call_id, request = self.handler.loop, self.call_id, self.request
        traces = self.handler.router.tracer
        if traces is not None:
            traces.start(call_id, self.target.name, self.arrived_us, request.header(b"traceparent"))
        self.exchange.on_disconnect = lambda: loop.cancel(call_id)
        in_pieces = streaming.stream_type(request.header(b"accept"))
        if in_pieces is not None and self.target.kind == "function":
            self.exchange = exchange = in_pieces(self.exchange)
            loop.data.pieces[call_id] = exchange.send_value

    def on_ended(self, ending: Ending) -> None:
        calls = self.handler
        calls.metrics.on_call_ended(self.target.name, ending, self.tenant)
        if type(ending) is Reply:
            self._reply(ending)
        elif type(ending) is Reject and ending.reason == "deadline" and self._has_no_options:
            until_us = self.arrived_us + min(ending.retry_after_us, REJECTION_TTL_US)
            closed = calls.rejections[self._rejection_key] = CachedRejection(calls.loop.capacity_generation, until_us, ending)
            calls.cache_rejection(self.request, self.target, closed)
            closed.respond(self.exchange, self.call_id)
        else:
            assert not isinstance(ending, Reply)
            calls.router.respond_problem(self.exchange, calls.router.ending_problem(ending))

    def _reply(self, reply: Reply) -> None:
        data, exchange = self.handler.loop.data, self.exchange
        if exchange.accepts_values:
            exchange.respond_value(data.stored_result(self.call_id), reply)
            return
        try:
            body, kind = http_codec.encode_result(data.result(self.call_id), self.request.header(b"accept"))
        except LaminaError as error:
            self.handler.router.respond_problem(exchange, http_codec.error_problem(error, self.call_id))
            return
        exchange.respond(200, body, kind, http_codec.reply_headers(reply))
