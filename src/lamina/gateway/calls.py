"""Calls over HTTP: a request becomes a call of the loop at once, and its outcome becomes the response."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lamina.core.actions import Refuse, Reply
from lamina.errors import LaminaError, StoreDown
from lamina.gateway import events, wire, wishes
from lamina.gateway.caller import Caller
from lamina.gateway.closed import Closed
from lamina.gateway.exchange import Exchange
from lamina.gateway.first import FirstCalls
from lamina.gateway.heads import Request
from lamina.gateway.metrics import Metrics
from lamina.gateway.runs import wants_async
from lamina.gateway.wishes import Wishes, wishes_of
from lamina.live.loop import Ending, LiveLoop
from lamina.types import Call, call_for

if TYPE_CHECKING:
    from lamina.gateway.api import Api, Target

LARGE_BYTES = 16 * 2**10
CLOSED_US = 20_000  #: a refusal is repeated for at most so long without asking again


class Calls:
    """Handler of calls: options and inputs are decoded, the call is submitted, its outcome is answered."""

    def __init__(self, api: Api, loop: LiveLoop, metrics: Metrics) -> None:
        self.api = api
        self.loop = loop
        self.metrics = metrics
        self.first = FirstCalls(loop)
        self.closed: dict[str, Closed] = {}  #: by door: a target, or a target and a tenant
        self._prefix = secrets.token_hex(4)
        self._prefix_bytes = self._prefix.encode()
        self._count = 0

    def new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count:x}"

    def take(self, target: Target, request: Request, exchange: Exchange, caller: Caller) -> None:
        call_id = self.new_id()
        asked = Asked(self, call_id, target, request, exchange, caller.tenant, self._arrived_us(request))
        if asked.is_refused_like_the_last():
            return
        try:
            if b"prefer" in request.headers and wants_async(request):
                self._later(target, request, exchange, caller)
                return
            wanted = wishes_of(request, asked.arrived_us)
            inputs = wire.inputs_of(request, target.params) if request.parsed is None else request.parsed.take()
        except LaminaError as error:
            self.api.problem(exchange, wire.error_problem(error, call_id))
            return
        asked.listen()
        call = self._call(asked, wanted)
        if len(request.body) > LARGE_BYTES:  # its values are elsewhere now, and it may wait for long
            asked.request = replace(request, body=b"")
        self.loop.submit(call, inputs, asked.ended)

    def cut_short(self, request: Request, target: Target, closed: Closed) -> None:
        """Repeat this rejection for requests with the same head, before their bodies are looked at."""
        if request.head is None:
            return

        def refuse_again(date_line: bytes) -> bytes | None:
            late = self.loop.now_us() - self.api.lag_us >= closed.until_us
            if late or closed.turn != self.loop.turn or self.api.closing:
                return None
            self._count += 1
            self.metrics.refused(target.name, closed.reason)
            return closed.whole(b"%b-%x" % (self._prefix_bytes, self._count), date_line)

        request.head.shortcut = refuse_again

    def _arrived_us(self, request: Request) -> int:
        """Arrival time. Time in a socket buffer or in another process, before any clock was read, is part of the call's time."""
        waited_us = request.parsed.waited_us if request.parsed is not None else 0
        return self.loop.now_us() - self.api.lag_us - waited_us

    def _call(self, asked: Asked, wanted: Wishes) -> Call:
        target, request = asked.target, asked.request
        deadline_us, priority, cost_limit = wanted
        return call_for(
            asked.call_id,
            target.name,
            asked.arrived_us,
            target.slo if deadline_us else self.first.slo(target.name, target.slo),
            deadline_us=deadline_us,
            tenant=asked.tenant,
            priority=priority,
            cost_limit=cost_limit,
            size_bytes=len(request.body) if request.parsed is None else request.parsed.size,
        )

    def _later(self, target: Target, request: Request, exchange: Exchange, caller: Caller) -> None:
        if self.api.runs is None:
            raise StoreDown("this server keeps no runs", hint="start it with --store, or call without Prefer: respond-async")
        wall_us = time.time_ns() // 1000
        self.api.runs.accept(target, request, exchange, caller, wishes_of(request, wall_us))


@dataclass(slots=True)
class Asked:
    """A call in flight, from its request to its response."""

    calls: Calls
    call_id: str
    target: Target
    request: Request
    exchange: Exchange
    tenant: str
    arrived_us: int

    @property
    def _door(self) -> str:
        return self.target.name if not self.tenant else f"{self.target.name}/{self.tenant}"

    @property
    def _is_like_others(self) -> bool:
        return wishes.HEADERS.isdisjoint(self.request.headers)

    def is_refused_like_the_last(self) -> bool:
        """Respond with the cached rejection, as long as nothing has happened that could change it."""
        calls = self.calls
        if not calls.closed:
            return False
        closed = calls.closed.get(self._door)
        if closed is None:
            return False
        if closed.turn != calls.loop.turn or self.arrived_us >= closed.until_us or not self._is_like_others:
            del calls.closed[self._door]
            return False
        calls.metrics.refused(self.target.name, closed.reason)
        calls.cut_short(self.request, self.target, closed)
        closed.answer(self.exchange, self.call_id)
        return True

    def listen(self) -> None:
        """Set up tracing, streaming of chunks and cancellation on disconnect, before the call is submitted."""
        loop, call_id, request = self.calls.loop, self.call_id, self.request
        traces = self.calls.api.traces
        if traces is not None:
            traces.begin(call_id, self.target.name, self.arrived_us, request.header(b"traceparent"))
        self.exchange.on_gone = lambda: loop.cancel(call_id)
        in_pieces = events.wanted(request.header(b"accept"))
        if in_pieces is not None and self.target.kind == "function":
            self.exchange = exchange = in_pieces(self.exchange)
            loop.data.pieces[call_id] = exchange.piece

    def ended(self, ending: Ending) -> None:
        calls = self.calls
        calls.metrics.ended(self.target.name, ending, self.tenant)
        if type(ending) is Reply:
            self._reply(ending)
        elif type(ending) is Refuse and ending.reason == "deadline" and self._is_like_others:
            until_us = self.arrived_us + min(ending.retry_after_us, CLOSED_US)
            closed = calls.closed[self._door] = Closed(calls.loop.turn, until_us, ending)
            calls.cut_short(self.request, self.target, closed)
            closed.answer(self.exchange, self.call_id)
        else:
            assert not isinstance(ending, Reply)
            calls.api.problem(self.exchange, calls.api.ending_problem(ending))

    def _reply(self, reply: Reply) -> None:
        data, exchange = self.calls.loop.data, self.exchange
        if exchange.takes_values:
            exchange.value(data.stored_result(self.call_id), reply)
            return
        try:
            body, kind = wire.answer_body(data.result(self.call_id), self.request.header(b"accept"))
        except LaminaError as error:
            self.calls.api.problem(exchange, wire.error_problem(error, self.call_id))
            return
        exchange.respond(200, body, kind, wire.reply_headers(reply))
