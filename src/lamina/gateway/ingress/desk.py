"""Session with one ingress process, on the controller's side: its requests, their replies, its shared-memory slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lamina.core.actions import Reply
from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway import events, wire, wishes
from lamina.gateway.heads import Parsed, Request
from lamina.gateway.ingress.frames import (
    HEADS,
    Ask,
    FromOne,
    Given,
    Gone,
    Head,
    Infer,
    Raw,
    Read,
    Rpc,
    Slot,
    Trouble,
    Up,
    Value,
    packed,
)
from lamina.gateway.ingress.remote import Remote, RemoteCall, RemoteMessage, RemoteRows
from lamina.gateway.oip.inferring import Context
from lamina.gateway.oip.question import Question
from lamina.live.frames import FrameError, ShmRef, Stored
from lamina.live.ledger import Ledger, WorkerSlots
from lamina.live.timer import clock_us
from lamina.types import call_for

if TYPE_CHECKING:
    from lamina.gateway.ingress.hub import Hub
    from lamina.live.process import WorkerProcess


class _Known:
    """A request head this ingress has sent."""

    __slots__ = ("has_wishes", "request")

    def __init__(self, head: Head) -> None:
        self.request = Request(head.method, head.path, head.query, head.headers, b"", head.keep_alive)
        in_pieces = events.wanted(head.headers.get(b"accept", b""))
        self.has_wishes = in_pieces is not None or not wishes.HEADERS.isdisjoint(head.headers)


class Desk:
    """Messages from and to one ingress process."""

    def __init__(self, hub: Hub, ledger: Ledger | None) -> None:
        self._hub = hub
        self._api = hub.api
        self.calls = hub.api.calls
        self._ledger = ledger
        self.slots: WorkerSlots | None = ledger.open_worker() if ledger is not None else None
        self._sizes: dict[int, int] = {}  #: of its slots, which never change
        self._heads: dict[int, _Known] = {}
        self._reads: dict[int, list[ShmRef]] = {}  #: answers it is looking at
        self._out: list[Struct] = []
        self.open: dict[int, Remote | RemoteCall | RemoteRows | RemoteMessage] = {}
        self.up: asyncio.Future[Up] = hub.loop.create_future()
        self.process: WorkerProcess | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Ask: self._ask,
            Infer: self._infer,
            Head: self._head,
            Read: self._read,
            Gone: self._gone,
            Raw: self._raw,
            Rpc: self._rpc,
            Up: self._up,
        }

    def hear(self, frame: FromOne) -> None:
        handlers = self._handlers
        for said in frame.said:
            handlers[type(said)](said)

    # ----------------------------------------------------------------------- asked

    def _ask(self, ask: Ask) -> None:
        known, api = self._head_of(ask.head), self._api
        inputs = self._accept(ask.inputs)
        target = api.routes().get(known.request.path)
        if target is None or known.has_wishes or api.closing or self.calls.closed or api.traces is not None:
            self._ask_at_length(ask, inputs, known.request)
            return
        try:
            caller = api.allow(known.request, "invoke")
            if not target.seen_by(caller.tenant):
                raise UnknownTarget("nothing at this address")
        except LaminaError:
            self._ask_at_length(ask, inputs, known.request)
            return
        calls = self.calls
        loop = calls.loop
        arrived_us = loop.at_us(ask.at_us)
        slo = calls.first.slo(target.name, target.slo)
        call = call_for(calls.new_id(), target.name, arrived_us, slo, tenant=caller.tenant, size_bytes=ask.size)
        waiting = RemoteCall(self, ask.number, call.id, target, caller.tenant, known.request, arrived_us)
        self.open[ask.number] = waiting
        loop.submit(call, inputs, waiting.ended)

    def _ask_at_length(self, ask: Ask, inputs: dict[str, Any], head: Request) -> None:
        """Handle as any other request, but for its body, which has been decoded."""
        # what lies here unread counts from when it came there; so the lag of this process is not to be counted again
        parsed = Parsed(inputs, ask.size, clock_us() - ask.at_us - self._api.lag_us)
        exchange = Remote(self, ask.number, head.keep_alive)
        self.open[ask.number] = exchange
        try:
            self._api.handle(Request("POST", head.path, head.query, head.headers, b"", head.keep_alive, parsed), exchange)
        finally:
            if parsed.inputs is not None:  # it did not come to that
                self._release(inputs)

    def _infer(self, ask: Infer) -> None:
        head = self._head_of(ask.head).request
        rows = [self._accept(row) for row in ask.rows]
        serving = self._hub.serving
        taken = 0
        try:
            caller = self._api.allow(head, "invoke")
            model = serving.catalogue.find(ask.model, ask.version, caller.tenant)
            serving.check(model)
            asked = RemoteRows(self, ask.number, serving, model, len(rows), caller.tenant, in_pieces=ask.in_pieces)
            self.open[ask.number] = asked
            trace = head.headers.get(b"traceparent", b"")
            question = Question(model, (), (), ask.timeout_us, ask.priority, caller, trace)
            arrived_us = serving.loop.at_us(ask.at_us)
            serving.submit(question, rows, ask.size, arrived_us, asked, asked.take if ask.in_pieces else None)
            taken = len(asked.ids)
        except LaminaError as error:
            self.open.pop(ask.number, None)
            self.say(Trouble(ask.number, wire.error_problem(error)))
        for row in rows[taken:]:
            self._release(row)

    def _raw(self, ask: Raw) -> None:
        head = self._head_of(ask.head).request
        exchange = Remote(self, ask.number, head.keep_alive)
        self.open[ask.number] = exchange
        request = Request(head.method, head.path, head.query, head.headers, self._take(ask.body), head.keep_alive)
        self._api.handle(request, exchange)

    def _rpc(self, ask: Rpc) -> None:
        rpc = self._hub.rpc
        kind = rpc.asked_with.get(ask.method) if rpc is not None else None
        if rpc is None or kind is None:
            raise FrameError(f"no method {ask.method[:80]!r}")
        message = kind.FromString(self._take(ask.message))
        context = Context(self._head_of(ask.head).request.headers, ask.timeout_us)
        streams = ask.method == "ModelStreamInfer"
        waiting = RemoteMessage(self, ask.number, streams=streams)
        self.open[ask.number] = waiting
        if streams:
            waiting.cancel = rpc.stream(message, context, waiting.said, waiting.done)
        else:
            waiting.cancel = rpc.unary(ask.method, message, context, waiting.said)

    def _head(self, head: Head) -> None:
        if head.number >= HEADS:
            raise FrameError(f"head {head.number}: at most {HEADS} are kept")
        self._heads[head.number] = _Known(head)

    def _head_of(self, number: int) -> _Known:
        known = self._heads.get(number)
        if known is None:
            raise FrameError(f"head {number} was never told")
        return known

    def _gone(self, gone: Gone) -> None:
        waiting = self.open.pop(gone.number, None)
        if waiting is not None:
            waiting.gone()

    def _up(self, up: Up) -> None:
        self.say(self._hub.routes())
        if not self.up.done():
            self.up.set_result(up)

    # --------------------------------------------------------------- shared memory

    def _accept(self, given: dict[str, Given]) -> dict[str, Any]:
        """Inputs by reference where they are in shared memory; the receiver releases them."""
        for name, one in given.items():
            if type(one) is Slot:
                given[name] = self._ref(one)  # type: ignore[assignment]
        return given

    def _ref(self, slot: Slot) -> ShmRef:
        """A checked reference: slot number and size are not trusted. A slot's number never means another file, so that its size
        needs to be looked up only once."""
        slots, number = self.slots, slot.number
        if slots is None or self._ledger is None or number in slots.held:
            raise FrameError("a slot that was given away before")
        ref = ShmRef(slots.owner, number, slot.size)
        if slot.size > self._sizes.get(number, -1):
            if not self._ledger.folder.holds(ref):
                raise FrameError("a slot that is not there, or not that large")
            self._sizes[number] = slot.size
        slots.held.add(number)
        return ref

    def _take(self, given: Given) -> bytes:
        """Copy a payload out of its slot, for receivers that want it whole."""
        if not isinstance(given, Slot):
            return given
        ref = self._ref(given)
        assert self._ledger is not None
        with self._ledger.reader.view(ref) as view:
            body = bytes(view)
        self._ledger.release(ref)
        return body

    def _release(self, accepted: dict[str, Any]) -> None:
        for ref in accepted.values():
            if type(ref) is ShmRef and self._ledger is not None:
                self._ledger.release(ref)

    def _read(self, read: Read) -> None:
        reads = self._reads.pop(read.number, None)
        if reads and self._ledger is not None:
            self._ledger.unpin(reads)

    # ------------------------------------------------------------------------ said

    def value(self, number: int, row: int, stored: Stored, reply: Reply) -> None:
        if not isinstance(stored, bytes) and self._ledger is not None:
            stored = self._ledger.pin(stored, self._reads.setdefault(number, []))
        self.say(Value(number, row, stored, reply))

    def say(self, frame: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._hub.loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.slots is not None:
            out += self.slots.released()
        if self.process is not None:
            self.process.send(packed(out, to_ingress=True))

    def lost(self) -> None:
        """The process died and its clients with it: cancel their calls, release their slots."""
        for waiting in list(self.open.values()):
            waiting.gone()
        self.open.clear()
        for number in list(self._reads):
            self._read(Read(number))
        if self.slots is not None and self._ledger is not None:
            self._ledger.orphan(self.slots)
