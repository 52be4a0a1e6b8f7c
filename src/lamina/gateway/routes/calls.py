"""Calls over HTTP: a request becomes a call of the driver at once, and its outcome becomes the response."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lamina import encoding
from lamina.access.records import Identity
from lamina.core.actions import FailCall, Reject, Reply
from lamina.core.refusal_explanation import LIKE
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import OVERLOADED, LaminaError, StoreDown
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.tracer import Tracer
from lamina.gateway.routes.codec_pool import FLAT_BYTES, INLINE_BYTES, CodecPool, is_heavy_request, is_heavy_result
from lamina.gateway.routes.cold_start_grace import ColdStartGrace
from lamina.gateway.routes.explain import SampledRefusals
from lamina.gateway.routes.http_codec import (
    DecodedBody,
    decode_inputs,
    decode_parts,
    encode_result,
    large_body,
    reply_headers,
    response_parts,
)
from lamina.gateway.routes.prediction_cache import PredictionCache
from lamina.gateway.routes.problems import HttpProblem, answered, error_problem, raised_response, respond_problem
from lamina.gateway.routes.rejection_cache import RejectionCache
from lamina.gateway.routes.request_options import MIN_PRIORITY, NO_OPTIONS, OPTION_HEADERS, request_options
from lamina.gateway.routes.runs import RunRoutes, prefers_async
from lamina.gateway.routes.streaming import stream_type
from lamina.gateway.routes.targets import CallTarget
from lamina.ipc.sliced_copies import Parts
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.process_status import ProcessStatus
from lamina.types import call_for
from lamina.values.references import Stored

Explain = Callable[[FailCall | Reject, str, Identity], HttpProblem]
"""The problem for a call of a target that ended without a result, as its caller is told it."""


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
        codecs: CodecPool | None = None,
        cache: PredictionCache,
    ) -> None:
        self.cache = cache
        self.driver = driver
        self.metrics = metrics
        self.explain = explain
        self.rejections = RejectionCache(driver)
        self._process = process
        self._grace = cold_start_grace
        self._observed_loads = cold_start_grace.observed
        self._tracer = tracer
        self._runs = runs
        self._codecs = codecs
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
        if decoded is None and len(request.body) > INLINE_BYTES and self._codecs is not None:
            is_heavy = is_heavy_request(request)
            if is_heavy or len(request.body) > FLAT_BYTES:
                self._decode_apart(self._codecs if is_heavy else None, target, request, exchange, caller)
                return
        self._count += 1
        call_id = f"{self._prefix}-{self._count:x}"
        driver, headers = self.driver, request.headers
        arrived_us = driver.now_us() - self._process.lag_us if decoded is None else decoded.arrived_us
        has_options = not OPTION_HEADERS.isdisjoint(headers)
        if self.rejections.cached and not has_options and not target.cache_us:  # a result that is kept is no matter of capacity
            rejection = self.rejections.find(target.name, caller.tenant, arrived_us)
            if rejection is not None:
                self.metrics.on_rejected(target.name, rejection.reason, caller.tenant)
                rejection.respond(exchange, call_id)
                why = f"{LIKE}{rejection.call_id} a moment before, and nothing has ended since (rejection cache)"
                self._refusals.record(call_id, target.name, caller.tenant, rejection.reason, why, rejection.offer_us)
                return
        try:
            if has_options and prefers_async(request):
                self._accept_run(target, request, exchange, caller, decoded)
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
        exchange.when_disconnected(partial(self.cache.cancel if target.cache_us else driver.cancel, call_id))
        accept = headers.get(b"accept", b"")
        stream = stream_type(accept) if accept and target.kind == "function" else None
        if exchange.sink is not None:
            driver.data.pieces[call_id] = exchange.sink
        elif stream is not None:
            exchange = stream(exchange)
            driver.data.pieces[call_id] = exchange.send_value
        call = call_for(
            call_id,
            target.name,
            arrived_us,
            target.slo
            if deadline_us or target.name in self._observed_loads
            else self._grace.effective_slo(target.name, target.slo),
            deadline_us=deadline_us,
            tenant=caller.tenant,
            priority=priority,
            cost_limit=cost_limit,
            objective=objective,
            size_bytes=len(request.body) if decoded is None else decoded.size,
        )
        pending = PendingCall(self, call_id, target.name, exchange, caller, arrived_us, accept, has_options)
        if target.shadow is not None:
            inputs = driver.data.copied(inputs)  # a slot of another process belongs to one call
        if decoded is not None and decoded.on_call is not None:
            decoded.on_call(call_id)
        if target.cache_us:
            self.cache.submit(target, call, inputs, pending.on_ended, headers)
        else:
            driver.submit(call, inputs, pending.on_ended)
        if target.shadow is not None:
            submit_shadow(driver, self.metrics, target.shadow, f"{call_id}s", inputs, call.size_bytes)

    def on_shed(self, target: str, count: int, call_id: str) -> None:
        """An ingress process has refused so many calls of a target, one of them under this id."""
        self.metrics.on_rejected(target, OVERLOADED, count=count)
        why = "the server's process had more calls than it can handle; an ingress process refused this one"
        self._refusals.record(call_id, target, "", OVERLOADED, why)

    def _decode_apart(
        self, codecs: CodecPool | None, target: CallTarget, request: HttpRequest, exchange: Exchange, caller: Identity
    ) -> None:
        """Have a body decoded by another process, or in a turn of its own, and submit the call in the next one: each copy of a
        large body takes many milliseconds, and others are served between them."""
        arrived_us, size = self.driver.now_us() - self._process.lag_us, len(request.body)
        head = HttpRequest(request.method, request.path, request.query, request.headers, b"", request.keep_alive)
        gone: list[bool] = []
        exchange.when_disconnected(lambda: gone.append(True))
        call_soon = asyncio.get_running_loop().call_soon

        def submit(inputs: Mapping[str, Any]) -> None:
            if not gone:
                self.handle(target, head, exchange, caller, DecodedBody(dict(inputs), size, arrived_us))

        def submit_stored(calls: list[dict[str, Stored]]) -> None:
            decoded = DecodedBody(calls[0], size, arrived_us)
            try:
                if not gone:
                    self.handle(target, head, exchange, caller, decoded)
            finally:
                if decoded.inputs is not None:
                    self.driver.data.free_inputs(decoded.inputs)

        def then(inputs: Mapping[str, Parts]) -> None:
            if gone:
                return
            if prefers_async(request):  # its inputs go to the store
                call_soon(answered(exchange, submit), inputs)
            else:
                self.driver.data.store_inputs([inputs], answered(exchange, submit_stored))

        def decoded_apart(inputs: dict[str, bytes] | LaminaError) -> None:
            if isinstance(inputs, LaminaError):
                raise inputs
            then({name: (blob,) for name, blob in inputs.items()})

        if codecs is not None:
            codecs.decode_call(request, target.params, answered(exchange, decoded_apart))
        else:
            call_soon(answered(exchange, lambda whole: then(decode_parts(whole, target.params))), request)

    def encodes_apart(self, exchange: Exchange, blob: encoding.Blob, accept: bytes, id: str, extra: bytes) -> bool:
        """Respond with a large result: text is made of it by another process. False: it is to be made here."""
        if self._codecs is None or not is_heavy_result(blob, accept):
            return False

        release = self.driver.data.keep(id)

        def then(found: dict[str, bytes] | LaminaError) -> None:
            release()
            if isinstance(found, LaminaError):
                respond_problem(exchange, error_problem(found, id))
            else:
                exchange.respond(int(found["status"]), found["body"], found["kind"], extra + found["extra"])

        self._codecs.encode_result(blob, accept, answered(exchange, then))
        return True

    def _accept_run(
        self, target: CallTarget, request: HttpRequest, exchange: Exchange, caller: Identity, decoded: DecodedBody | None
    ) -> None:
        if self._runs is None:
            raise StoreDown("this server keeps no runs", hint="start it with --store, or call without Prefer: respond-async")
        self._runs.accept(target, request, exchange, caller, request_options(request, self._runs.wall_us()), decoded)


def submit_shadow(
    driver: RealtimeDriver, metrics: Metrics, target: CallTarget, call_id: str, inputs: dict[str, bytes], size_bytes: int
) -> None:
    """Shadow traffic: a copy of a call for a version under test. It is counted and billed to the owner of the app, has the
    lowest priority, and no client sees what becomes of it."""
    call = call_for(
        *(call_id, target.name, driver.now_us(), target.slo),
        tenant=target.tenant,
        priority=MIN_PRIORITY,
        size_bytes=size_bytes,
    )
    with contextlib.suppress(LaminaError):
        driver.submit(call, inputs, lambda ending: metrics.on_call_ended(target.name, ending, target.tenant))


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
            extra = reply_headers(ending)
            try:
                blob = handler.driver.data.result(self.call_id)
                if len(blob) > INLINE_BYTES and handler.encodes_apart(exchange, blob, self.accept, self.call_id, extra):
                    return
                large = large_body(blob, self.accept) if len(blob) > FLAT_BYTES else None
                if large is not None:
                    self._respond_copied(*large, extra)
                    return
                status, body, kind, own = encode_result(blob, self.accept)
            except LaminaError as error:
                respond_problem(exchange, error_problem(error, self.call_id))
                return
            if own:
                extra += own
            if len(body) > FLAT_BYTES:  # to put it together and send it is work for another turn
                asyncio.get_running_loop().call_soon(exchange.respond, status, body, kind, extra)
                return
            exchange.respond(status, body, kind, extra)
        elif isinstance(ending, Reject) and ending.reason == "deadline" and not self.has_options:
            handler.rejections.store(self.target, self.caller.tenant, self.arrived_us, ending).respond(exchange, self.call_id)
        elif (raised := raised_response(handler.driver, ending)) is not None:
            status, body, kind, own = response_parts(raised)
            exchange.respond(status, body, kind, b"lamina-call-id: %s\r\n%s" % (self.call_id.encode(), own))
        else:
            respond_problem(exchange, handler.explain(ending, self.target, self.caller))

    def _respond_copied(self, body: memoryview, kind: bytes, extra: bytes) -> None:
        """Respond with what is sent as it is, and large: copied out of the run's values in several turns of the loop."""
        data, exchange = self.handler.driver.data, self.exchange
        release = data.keep(self.call_id)

        def respond(copied: bytes) -> None:
            release()
            exchange.respond(200, copied, kind, extra)

        data.copies.join([body], answered(exchange, respond))
