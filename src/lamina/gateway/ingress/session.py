"""Session with one ingress process, on the controller's side: its requests, their replies, its shared-memory slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lamina.core.actions import Reply
from lamina.drivers.timer import clock_us
from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway.ingress.messages import (
    MAX_HEADS,
    CallRequest,
    ClientGone,
    ForwardedRequest,
    InferError,
    InferRequest,
    IngressMessages,
    IngressPayload,
    IngressReady,
    ReplyConsumed,
    RequestHead,
    ResultValue,
    RpcRequest,
    SlotPayload,
    pack_messages,
)
from lamina.gateway.ingress.remote_replies import RemoteCall, RemoteExchange, RemoteInference, RemoteRpc
from lamina.gateway.oip.grpc_methods import RpcContext
from lamina.gateway.oip.inference import InferenceRequest
from lamina.gateway.routes import http_codec, request_options, streaming
from lamina.ipc.protocol import FrameError, ShmRef, Stored
from lamina.server.request import DecodedBody, HttpRequest
from lamina.types import call_for
from lamina.values.slot_refs import SlotReferences, WorkerSlots

if TYPE_CHECKING:
    from lamina.gateway.ingress.supervisor import IngressSupervisor
    from lamina.ipc.child_process import ChildProcess


class _KnownHead:
    """A request head this ingress has sent."""

    __slots__ = ("has_options", "request")

    def __init__(self, head: RequestHead) -> None:
        self.request = HttpRequest(head.method, head.path, head.query, head.headers, b"", head.keep_alive)
        in_pieces = streaming.stream_type(head.headers.get(b"accept", b""))
        self.has_options = in_pieces is not None or not request_options.OPTION_HEADERS.isdisjoint(head.headers)


class IngressSession:
    """Messages from and to one ingress process."""

    def __init__(self, hub: IngressSupervisor, ledger: SlotReferences | None) -> None:
        self._supervisor = hub
        self._router = hub.router
        self.call_handler = hub.router.call_handler
        self._ledger = ledger
        self.slots: WorkerSlots | None = ledger.add_worker() if ledger is not None else None
        self._sizes: dict[int, int] = {}  #: of its slots, which never change
        self._heads: dict[int, _KnownHead] = {}
        self._pinned: dict[int, list[ShmRef]] = {}  #: answers it is looking at
        self._out: list[Struct] = []
        self.pending: dict[int, RemoteExchange | RemoteCall | RemoteInference | RemoteRpc] = {}
        self.ready: asyncio.Future[IngressReady] = hub.loop.create_future()
        self.process: ChildProcess | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            CallRequest: self._on_call,
            InferRequest: self._on_infer,
            RequestHead: self._on_head,
            ReplyConsumed: self._on_reply_consumed,
            ClientGone: self._on_client_gone,
            ForwardedRequest: self._on_forwarded,
            RpcRequest: self._on_rpc,
            IngressReady: self._on_ready,
        }

    def on_messages(self, frame: IngressMessages) -> None:
        handlers = self._handlers
        for said in frame.messages:
            handlers[type(said)](said)

    # ----------------------------------------------------------------------- asked

    def _on_call(self, ask: CallRequest) -> None:
        known, api = self._known_head(ask.head), self._router
        inputs = self._resolve_inputs(ask.inputs)
        target = api.targets_by_path().get(known.request.path)
        if target is None or known.has_options or api.is_closing or self.call_handler.rejections or api.tracer is not None:
            self._on_special_call(ask, inputs, known.request)
            return
        try:
            caller = api.authorize(known.request, "invoke")
            if not target.is_visible_to(caller.tenant):
                raise UnknownTarget("nothing at this address")
        except LaminaError:
            self._on_special_call(ask, inputs, known.request)
            return
        calls = self.call_handler
        loop = calls.loop
        arrived_us = loop.from_clock_us(ask.at_us)
        slo = calls.cold_start_grace.effective_slo(target.name, target.slo)
        call = call_for(calls.next_id(), target.name, arrived_us, slo, tenant=caller.tenant, size_bytes=ask.size)
        waiting = RemoteCall(self, ask.number, call.id, target, caller.tenant, known.request, arrived_us)
        self.pending[ask.number] = waiting
        loop.submit(call, inputs, waiting.on_ended)

    def _on_special_call(self, ask: CallRequest, inputs: dict[str, Any], head: HttpRequest) -> None:
        """Handle as any other request, but for its body, which has been decoded."""
        # what lies here unread counts from when it came there; so the lag of this process is not to be counted again
        parsed = DecodedBody(inputs, ask.size, clock_us() - ask.at_us - self._router.lag_us)
        exchange = RemoteExchange(self, ask.number, head.keep_alive)
        self.pending[ask.number] = exchange
        try:
            self._router.handle(HttpRequest("POST", head.path, head.query, head.headers, b"", head.keep_alive, parsed), exchange)
        finally:
            if parsed.inputs is not None:  # it did not come to that
                self._release(inputs)

    def _on_infer(self, ask: InferRequest) -> None:
        head = self._known_head(ask.head).request
        rows = [self._resolve_inputs(row) for row in ask.rows]
        serving = self._supervisor.inference
        taken = 0
        try:
            caller = self._router.authorize(head, "invoke")
            model = serving.catalogue.find(ask.model, ask.version, caller.tenant)
            serving.check_available(model)
            asked = RemoteInference(self, ask.number, serving, model, len(rows), caller.tenant, in_pieces=ask.is_streamed)
            self.pending[ask.number] = asked
            trace = head.headers.get(b"traceparent", b"")
            question = InferenceRequest(model, (), (), ask.timeout_us, ask.priority, caller, trace)
            arrived_us = serving.loop.from_clock_us(ask.at_us)
            serving.submit(question, rows, ask.size, arrived_us, asked, asked.send_chunk if ask.is_streamed else None)
            taken = len(asked.call_ids)
        except LaminaError as error:
            self.pending.pop(ask.number, None)
            self.send(InferError(ask.number, http_codec.error_problem(error)))
        for row in rows[taken:]:
            self._release(row)

    def _on_forwarded(self, ask: ForwardedRequest) -> None:
        head = self._known_head(ask.head).request
        exchange = RemoteExchange(self, ask.number, head.keep_alive)
        self.pending[ask.number] = exchange
        request = HttpRequest(head.method, head.path, head.query, head.headers, self._read_payload(ask.body), head.keep_alive)
        self._router.handle(request, exchange)

    def _on_rpc(self, ask: RpcRequest) -> None:
        rpc = self._supervisor.grpc_methods
        kind = rpc.request_types.get(ask.method) if rpc is not None else None
        if rpc is None or kind is None:
            raise FrameError(f"no method {ask.method[:80]!r}")
        message = kind.FromString(self._read_payload(ask.message))
        context = RpcContext(self._known_head(ask.head).request.headers, ask.timeout_us)
        streams = ask.method == "ModelStreamInfer"
        waiting = RemoteRpc(self, ask.number, streams=streams)
        self.pending[ask.number] = waiting
        if streams:
            waiting.cancel = rpc.stream(message, context, waiting.send_reply, waiting.end_stream)
        else:
            waiting.cancel = rpc.unary(ask.method, message, context, waiting.send_reply)

    def _on_head(self, head: RequestHead) -> None:
        if head.number >= MAX_HEADS:
            raise FrameError(f"head {head.number}: at most {MAX_HEADS} are kept")
        self._heads[head.number] = _KnownHead(head)

    def _known_head(self, number: int) -> _KnownHead:
        known = self._heads.get(number)
        if known is None:
            raise FrameError(f"head {number} was never told")
        return known

    def _on_client_gone(self, gone: ClientGone) -> None:
        waiting = self.pending.pop(gone.number, None)
        if waiting is not None:
            waiting.on_client_gone()

    def _on_ready(self, up: IngressReady) -> None:
        self.send(self._supervisor.route_table())
        if not self.ready.done():
            self.ready.set_result(up)

    # --------------------------------------------------------------- shared memory

    def _resolve_inputs(self, given: dict[str, IngressPayload]) -> dict[str, Any]:
        """Inputs by reference where they are in shared memory; the receiver releases them."""
        for name, one in given.items():
            if type(one) is SlotPayload:
                given[name] = self._checked_ref(one)  # type: ignore[assignment]
        return given

    def _checked_ref(self, slot: SlotPayload) -> ShmRef:
        """A checked reference: slot number and size are not trusted. A slot's number never means another file, so that its size
        needs to be looked up only once."""
        slots, number = self.slots, slot.number
        if slots is None or self._ledger is None or number in slots.held:
            raise FrameError("a slot that was given away before")
        ref = ShmRef(slots.owner, number, slot.size)
        if slot.size > self._sizes.get(number, -1):
            if not self._ledger.directory.has_slot(ref):
                raise FrameError("a slot that is not there, or not that large")
            self._sizes[number] = slot.size
        slots.held.add(number)
        return ref

    def _read_payload(self, given: IngressPayload) -> bytes:
        """Copy a payload out of its slot, for receivers that want it whole."""
        if not isinstance(given, SlotPayload):
            return given
        ref = self._checked_ref(given)
        assert self._ledger is not None
        with self._ledger.reader.view(ref) as view:
            body = bytes(view)
        self._ledger.release(ref)
        return body

    def _release(self, accepted: dict[str, Any]) -> None:
        for ref in accepted.values():
            if type(ref) is ShmRef and self._ledger is not None:
                self._ledger.release(ref)

    def _on_reply_consumed(self, read: ReplyConsumed) -> None:
        reads = self._pinned.pop(read.number, None)
        if reads and self._ledger is not None:
            self._ledger.unpin(reads)

    # ------------------------------------------------------------------------ said

    def send_value(self, number: int, row: int, stored: Stored, reply: Reply) -> None:
        if not isinstance(stored, bytes) and self._ledger is not None:
            stored = self._ledger.pin(stored, self._pinned.setdefault(number, []))
        self.send(ResultValue(number, row, stored, reply))

    def send(self, frame: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._supervisor.loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.slots is not None:
            out += self.slots.take_releases()
        if self.process is not None:
            self.process.send(pack_messages(out, to_ingress=True))

    def on_lost(self) -> None:
        """The process died and its clients with it: cancel their calls, release their slots."""
        for waiting in list(self.pending.values()):
            waiting.on_client_gone()
        self.pending.clear()
        for number in list(self._pinned):
            self._on_reply_consumed(ReplyConsumed(number))
        if self.slots is not None and self._ledger is not None:
            self._ledger.on_worker_lost(self.slots)
