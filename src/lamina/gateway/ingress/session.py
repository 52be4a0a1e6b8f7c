"""Session with one ingress process, on the controller's side: its requests, their replies, its shared-memory slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import thread_time_ns
from typing import Any

from msgspec import Struct

from lamina.access.authorization import Grant, rule_of
from lamina.core.actions import Reply
from lamina.errors import LaminaError
from lamina.gateway.ingress.messages import (
    MAX_HEADS,
    CallLevel,
    CallRequest,
    ClientGone,
    ForwardedRequest,
    HeadCheckReply,
    HeadCheckRequest,
    HeldBack,
    HttpResponse,
    InferChunk,
    InferError,
    InferRequest,
    IngressMessages,
    IngressPayload,
    IngressReady,
    IngressSetup,
    ReplyConsumed,
    RequestHead,
    ResponseAborted,
    ResponseChunk,
    ResponseEnd,
    ResponseStart,
    ResponseTaken,
    ResultValue,
    RouteTable,
    RpcReply,
    RpcRequest,
    SlotPayload,
    SocketAccepted,
    SocketLeft,
    TenantFound,
    TenantLookup,
    ingress_reader,
    pack_messages,
)
from lamina.gateway.ingress.throttle import UNKNOWN_TENANT, HostThrottle
from lamina.gateway.oip.grpc_service import GrpcMethods
from lamina.gateway.oip.inference import InferenceRequest
from lamina.gateway.oip.inference_service import InferenceService, PendingInference
from lamina.gateway.routes.http_codec import DecodedBody
from lamina.gateway.routes.problems import PROBLEM, HttpProblem, defect_problem, error_problem
from lamina.gateway.routes.router import Router
from lamina.ipc.child_process import ChildProcess, ProcessSpec
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError, SocketClose, SocketMessage, SocketTaken
from lamina.server.drain_watch import piece_cost
from lamina.server.exchange import DetachedExchange, HttpRequest
from lamina.server.grpc import RpcContext, RpcError
from lamina.server.http_server import HeadCheck
from lamina.server.websocket import ABNORMAL, NORMAL, MessageSocket, OnSocketClose, OnSocketMessage, check_handshake
from lamina.values.references import ShmRef, Stored
from lamina.values.slot_refs import SlotReferences, WorkerSlots

INFER = rule_of("grpc", "ModelInfer")
"""An ingress sends inferences of both protocols alike, and their rows in the table are alike."""

PROCESS_SPEC = ProcessSpec("lamina.gateway.ingress.main", ingress_reader)


class RemoteReply(DetachedExchange):
    """The reply to one request of an ingress process, by any protocol: an HTTP response, rows of an inference, gRPC messages.

    Text is made of results where they leave: here they go out as they are, and what is in shared memory stays there until the
    other side has read it.
    """

    __slots__ = ("_number", "_session", "_unsent")

    accepts_values = True

    def __init__(self, session: IngressSession, number: int, keep_alive: bool = True, *, is_streaming: bool = False) -> None:
        """`is_streaming`: chunks of an inference or messages of a gRPC stream will follow."""
        super().__init__(keep_alive=keep_alive, is_streaming=is_streaming)
        self._number = number
        self._session = session
        self._unsent = 0
        session.pending[number] = self

    @property
    def has_cors(self) -> bool:
        return True  # an ingress answers for origins

    @property
    def client(self) -> str:
        return ""

    @property
    def address(self) -> str:
        return ""  # it is the ingress that counts shares of addresses

    @property
    def unsent_bytes(self) -> int:
        return self._unsent

    def on_sent(self, piece: bytes) -> None:
        self._unsent += piece_cost(piece)

    def on_taken(self, size: int) -> None:
        self._unsent = max(0, self._unsent - size)

    # ------------------------------------------------------------------------- HTTP

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.response is None:
            self._finish()
            self._session.send(HttpResponse(self._number, status, body, content_type, extra))

    def respond_value(self, stored: Stored, reply: Reply) -> None:
        if self.response is None:
            self._finish()
            self._session.send_value(self._number, 0, stored, reply)

    def start_stream(self, status: int, content_type: bytes, extra: bytes = b"", piece: bytes = b"") -> None:
        if self.response is None:
            self.response = b""
            self.is_streaming = True
            self._session.send(ResponseStart(self._number, status, content_type, extra))
            self.send_chunk(piece)

    def send_chunk(self, piece: bytes) -> None:
        if self.is_streaming and piece:
            self.on_sent(piece)
            self._session.send(ResponseChunk(self._number, piece))

    def end_stream(self, piece: bytes = b"", *, failed: bool = False) -> None:
        """The end of a streamed response, or of the messages of a gRPC stream."""
        self.send_chunk(piece)
        if self.is_streaming:
            self._finish()
            self._session.send(ResponseEnd(self._number, failed))

    def abort(self) -> None:
        """Give up a streamed response."""
        if self.is_streaming:
            self._finish()
            self._session.send(ResponseAborted(self._number))

    # -------------------------------------------------------------------- inference

    def on_row(self, row: int, reply: Reply, *, is_last: bool) -> None:
        session = self._session
        stored = b"" if self.is_streaming else session.stored_result(reply.call_id)
        if is_last:
            self._finish()
        session.send_value(self._number, row, stored, reply)

    def on_chunk(self, blob: Any) -> None:
        self._session.send(InferChunk(self._number, bytes(blob)))

    def on_error(self, problem: HttpProblem) -> None:
        self._finish()
        self._session.send(InferError(self._number, problem))

    # ------------------------------------------------------------------------- gRPC

    def send_message(self, message: Any) -> None:
        """A message or an error; of a stream there may be more."""
        if self.response is not None and not self.is_streaming:
            return
        if not self.is_streaming:
            self._finish()
        if isinstance(message, RpcError):
            self._session.send(RpcReply(self._number, b"", message.code, message.text))
        else:
            self._session.send(RpcReply(self._number, message.SerializeToString()))

    # ------------------------------------------------------------------- WebSockets

    def open_socket(self, request: HttpRequest) -> MessageSocket:
        socket = RemoteSocket(self._session, self._number, check_handshake(request)[1], self.on_sent)
        self.when_disconnected(lambda: socket.leave(ABNORMAL, ""))
        self._session.sockets[self._number] = socket
        return socket

    # ---------------------------------------------------------------------- the end

    def on_client_gone(self) -> None:
        left, self._on_disconnect = self._on_disconnect, None
        self.response = b""
        self.is_streaming = False
        if left is not None:
            left()

    def _finish(self) -> None:
        self.response = b""
        self.is_streaming = False
        self._on_disconnect = None
        self._session.forget(self._number)


class RemoteSocket(MessageSocket):
    """A WebSocket whose client is connected to an ingress process."""

    def __init__(
        self, session: IngressSession, number: int, protocols: tuple[str, ...], on_sent: Callable[[bytes], None]
    ) -> None:
        super().__init__(protocols)
        self._on_sent = on_sent
        self._session = session
        self._number = number

    @property
    def _is_open(self) -> bool:
        return self._number in self._session.sockets

    def accept(
        self, on_message: OnSocketMessage, on_close: OnSocketClose, protocol: str = "", tenant: str = "", headers: bytes = b""
    ) -> None:
        super().accept(on_message, on_close)
        if self._is_open:
            self._session.send(SocketAccepted(self._number, protocol, tenant, headers))

    def send(self, message: str | bytes) -> None:
        if self._is_open:
            sent = SocketMessage.of(self._number, message)
            self._on_sent(sent.data)
            self._session.send(sent)

    def taken(self, count: int) -> None:
        if self._is_open:
            self._session.send(SocketTaken(self._number, count))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        if self._is_open:
            self._session.send(SocketClose(self._number, code, reason))
            self._session.forget(self._number)


class IngressSession:
    """Messages from and to one ingress process. `route_table` makes what it is told of routes and models."""

    def __init__(
        self,
        router: Router,
        inference: InferenceService,
        grpc_methods: GrpcMethods | None,
        slot_refs: SlotReferences | None,
        route_table: Callable[[], RouteTable],
        check_head: HeadCheck,
        throttle: HostThrottle,
        slots: WorkerSlots | None = None,
    ) -> None:
        """`slots` are those of its shared memory, if it is on this machine."""
        self._router = router
        self._inference = inference
        self._grpc_methods = grpc_methods
        self._slot_refs = slot_refs
        self._route_table = route_table
        self._check_head = check_head
        self._throttle = throttle
        self._unread_us = 0  #: how long the messages at hand lay unread
        self._driver = router.call_handler.driver
        self._loop = asyncio.get_running_loop()
        self.slots = slots
        self._sizes: dict[int, int] = {}  #: of its slots, which never change
        self._heads: dict[int, HttpRequest] = {}
        self._tenants: dict[int, str] = {}  #: by head
        self._pinned: dict[int, list[ShmRef]] = {}  #: results it is reading
        self._out: list[Struct] = []
        self.pending: dict[int, RemoteReply] = {}
        self.sockets: dict[int, RemoteSocket] = {}
        self.ready: asyncio.Future[IngressReady] = self._loop.create_future()
        self.process: ChildProcess | None = None
        throttle.listeners.append(self._send_level)
        self._handlers: dict[type, Callable[[Any], None]] = {
            CallRequest: self._on_call,
            InferRequest: self._on_infer,
            RequestHead: self._on_head,
            ReplyConsumed: self._on_reply_consumed,
            ClientGone: self._on_client_gone,
            SocketMessage: self._on_socket_input,
            SocketLeft: self._on_socket_left,
            ForwardedRequest: self._on_forwarded,
            RpcRequest: self._on_rpc,
            IngressReady: self._on_ready,
            HeadCheckRequest: self._on_head_check,
            HeldBack: self._on_held_back,
            TenantLookup: self._on_tenant_lookup,
            ResponseTaken: self._on_response_taken,
        }

    def spawn(self, setup: IngressSetup, on_lost: Callable[[], None]) -> None:
        self.process = ChildProcess(self._loop, setup, self.on_messages, on_lost, PROCESS_SPEC)

    def on_messages(self, frame: IngressMessages) -> None:
        handlers = self._handlers
        self._unread_us = max(0, clock_us() - frame.sent_us) if frame.sent_us else 0
        for message in frame.messages:
            try:
                handlers[type(message)](message)
            except FrameError:
                raise
            except Exception as error:  # the frame has messages of other clients
                number = getattr(message, "number", 0)
                problem = defect_problem(f"{type(message).__name__} could not be handled", error)
                reply = self.pending.get(number)
                if reply is not None:
                    reply.respond(500, problem.body(), PROBLEM)
        if self._throttle.is_window_over(now_us := clock_us()):
            self._throttle.end_window(now_us, thread_time_ns() // 1000)

    # -------------------------------------------------------------------- requests

    def _on_call(self, message: CallRequest) -> None:
        """As any other request, but for its body, which has been decoded. Its time counts from its arrival there."""
        head = self._known_head(message.head)
        target = self._router.targets.by_path.get(head.path)
        if target is not None:
            self._throttle.on_call(self, self._tenant_of(message.head), target.slo.latency_us, self._unread_us)
        inputs = self._resolve_inputs(message.inputs)
        arrived_us = self._arrived_us(message.at_us) - self._unread_us  # the way back will be as long
        decoded = DecodedBody(inputs, message.size, arrived_us, self._noter(message.number))
        try:
            self._router.handle(head, RemoteReply(self, message.number, head.keep_alive), decoded)
        finally:
            if decoded.inputs is not None:  # it did not come to that
                self._release(inputs)

    def _on_infer(self, message: InferRequest) -> None:
        head = self._known_head(message.head)
        rows = [self._resolve_inputs(row) for row in message.rows]
        inference = self._inference
        submitted = 0
        try:
            caller = self._router.authorize(head, INFER)
            model = inference.catalogue.find(message.model, message.version, Grant(caller, INFER))
            inference.check_available(model)
            self._throttle.on_call(self, caller.tenant, model.call_target.slo.latency_us, self._unread_us)
            trace = head.headers.get(b"traceparent", b"")
            request = InferenceRequest(model, (), (), message.timeout_us, message.priority, caller, trace)
            pending = PendingInference(inference, request, len(rows), is_streamed=message.is_streamed)
            reply = RemoteReply(self, message.number, is_streaming=message.is_streamed)
            reply.when_disconnected(pending.cancel)
            arrived_us = self._arrived_us(message.at_us) - self._unread_us
            inference.submit(pending, reply, rows, message.size, arrived_us, self._noter(message.number))
            submitted = len(pending.call_ids)
        except LaminaError as error:
            self.pending.pop(message.number, None)
            self.send(InferError(message.number, error_problem(error)))
        for row in rows[submitted:]:
            self._release(row)

    def _arrived_us(self, at_us: int) -> int:
        """When a request came, as the driver counts."""
        return self._driver.from_clock_us(at_us)

    def _noter(self, number: int) -> Callable[[str], None] | None:
        """Receiver of the ids of the calls that are made of a request, before they are submitted."""
        return None

    def _on_forwarded(self, message: ForwardedRequest) -> None:
        head = self._known_head(message.head)
        body = self._read_payload(message.body)
        request = HttpRequest(head.method, head.path, head.query, head.headers, body, head.keep_alive)
        self._router.handle(request, RemoteReply(self, message.number, head.keep_alive))

    def _on_rpc(self, message: RpcRequest) -> None:
        methods = self._grpc_methods
        kind = methods.request_types.get(message.method) if methods is not None else None
        if methods is None or kind is None:
            raise FrameError(f"no method {message.method[:80]!r}")
        request = kind.FromString(self._read_payload(message.message))
        context = RpcContext(self._known_head(message.head).headers, message.timeout_us)
        is_stream = message.method == "ModelStreamInfer"
        reply = RemoteReply(self, message.number, is_streaming=is_stream)
        if is_stream:
            cancel = methods.stream(request, context, reply.send_message, reply.end_stream)
        else:
            cancel = methods.unary(message.method, request, context, reply.send_message)
        if cancel is not None and message.number in self.pending:
            reply.when_disconnected(cancel)

    def _on_head_check(self, message: HeadCheckRequest) -> None:
        def then(found: str | LaminaError) -> None:
            if isinstance(found, LaminaError):
                self.send(HeadCheckReply(message.number, "", found.message, found.hint))
            else:
                self.send(HeadCheckReply(message.number, found))

        self._check_head({} if message.authorization is None else {b"authorization": message.authorization}, then)

    def _on_held_back(self, message: HeldBack) -> None:
        self._throttle.on_held_back()
        target = self._router.targets.by_path.get(message.target)
        name = target.name if target is not None else message.target.decode("utf-8", "replace")
        if message.refused and (target is not None or name in self._driver.controller.flows):
            self._router.call_handler.on_shed(name, message.refused, message.call_id)

    def _on_tenant_lookup(self, message: TenantLookup) -> None:
        tenant = self._authenticated_tenant(message.authorization)
        if tenant != UNKNOWN_TENANT.tenant:
            self.send(TenantFound(message.authorization, tenant, self._throttle.weight_of(tenant)))

    def _tenant_of(self, number: int) -> str:
        """The tenant of calls with this head: they are many, and a token is checked with each of them anyway."""
        tenant = self._tenants.get(number)
        if tenant is None:
            headers = self._known_head(number).headers
            tenant = self._tenants[number] = self._authenticated_tenant(headers.get(b"authorization"))
        return tenant

    def _authenticated_tenant(self, authorization: bytes | None) -> str:
        headers = {} if authorization is None else {b"authorization": authorization}
        try:
            return self._router.authorize(HttpRequest("POST", b"", b"", headers, b"", True), INFER).tenant
        except LaminaError:
            return UNKNOWN_TENANT.tenant

    def _on_head(self, head: RequestHead) -> None:
        if head.number >= MAX_HEADS:
            raise FrameError(f"head {head.number}: at most {MAX_HEADS} are kept")
        self._tenants.pop(head.number, None)
        self._heads[head.number] = HttpRequest(head.method, head.path, head.query, head.headers, b"", head.keep_alive)

    def _known_head(self, number: int) -> HttpRequest:
        head = self._heads.get(number)
        if head is None:
            raise FrameError(f"head {number} was never sent")
        return head

    def _on_socket_input(self, message: SocketMessage) -> None:
        socket = self.sockets.get(message.number)
        if socket is not None:
            socket.receive(message.message)

    def _on_socket_left(self, message: SocketLeft) -> None:
        socket = self.sockets.get(message.number)
        if socket is not None:
            self.forget(message.number)
            socket.leave(message.code, message.reason)

    def _on_response_taken(self, message: ResponseTaken) -> None:
        reply = self.pending.get(message.number)
        if reply is not None:
            reply.on_taken(message.size)

    def forget(self, number: int) -> None:
        self.sockets.pop(number, None)
        self.pending.pop(number, None)

    def _on_client_gone(self, gone: ClientGone) -> None:
        self.sockets.pop(gone.number, None)
        reply = self.pending.pop(gone.number, None)
        if reply is not None:
            reply.on_client_gone()

    def _on_ready(self, ready: IngressReady) -> None:
        self.send(self._route_table())
        if not self.ready.done():
            self.ready.set_result(ready)

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
        if slots is None or self._slot_refs is None or number in slots.held:
            raise FrameError("a slot that was given away before")
        ref = ShmRef(slots.owner, number, slot.size)
        if slot.size > self._sizes.get(number, -1):
            if not self._slot_refs.directory.has_slot(ref):
                raise FrameError("a slot that is not there, or not that large")
            self._sizes[number] = slot.size
        slots.held.add(number)
        return ref

    def _read_payload(self, given: IngressPayload) -> bytes:
        """Copy a payload out of its slot, for receivers that want it whole."""
        if not isinstance(given, SlotPayload):
            return given
        ref = self._checked_ref(given)
        assert self._slot_refs is not None
        with self._slot_refs.reader.view(ref) as view:
            body = bytes(view)
        self._slot_refs.release(ref)
        return body

    def _release(self, accepted: dict[str, Any]) -> None:
        for ref in accepted.values():
            if isinstance(ref, ShmRef) and self._slot_refs is not None:
                self._slot_refs.release(ref)

    def _on_reply_consumed(self, read: ReplyConsumed) -> None:
        reads = self._pinned.pop(read.number, None)
        if reads and self._slot_refs is not None:
            self._slot_refs.unpin(reads)

    # -------------------------------------------------------------------- messages

    def stored_result(self, call_id: str) -> Stored:
        return self._driver.data.stored_result(call_id)

    def _send_level(self, per_s: float) -> None:
        self.send(CallLevel(per_s))

    def send_value(self, number: int, row: int, stored: Stored, reply: Reply) -> None:
        if not isinstance(stored, bytes) and self._slot_refs is not None:
            stored = self._slot_refs.pin(stored, self._pinned.setdefault(number, []))
        self.send(ResultValue(number, row, stored, reply))

    def send(self, frame: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.slots is not None:
            out += self.slots.take_releases()
        if self.process is not None:
            self.process.send(pack_messages(out, to_ingress=True))

    def on_lost(self) -> None:
        """The process died and its clients with it: cancel their calls, release their slots."""
        if self._send_level in self._throttle.listeners:
            self._throttle.listeners.remove(self._send_level)
        for reply in list(self.pending.values()):
            reply.on_client_gone()
        self.pending.clear()
        self.sockets.clear()
        for number in list(self._pinned):
            self._on_reply_consumed(ReplyConsumed(number))
        if self.slots is not None and self._slot_refs is not None:
            self._slot_refs.on_worker_lost(self.slots)
