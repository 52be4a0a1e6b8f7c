"""Request handlers of an ingress process. What can be decoded becomes values here; everything else, and everything that is wrong,
is forwarded as it is, so that every response and every error is the controller's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from lamina import encoding
from lamina.access.records import Identity
from lamina.core.actions import Reject, Reply
from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway.auth import LOCAL
from lamina.gateway.ingress.controller_link import ControllerLink
from lamina.gateway.ingress.messages import (
    CallRequest,
    ForwardedRequest,
    HttpResponse,
    InferChunk,
    InferError,
    InferRequest,
    ModelInfo,
    Payload,
    ReplyMessage,
    ResponseAborted,
    ResponseChunk,
    ResponseEnd,
    ResponseStart,
    ResponseTaken,
    ResultValue,
    RouteTable,
    RpcReply,
    RpcRequest,
    SocketAccepted,
    SocketLeft,
)
from lamina.gateway.oip.grpc_methods import InferenceMethods
from lamina.gateway.oip.inference import (
    InferenceRequest,
    OnChunk,
    OnResponse,
    begin_request,
    invalid_output_problem,
    respond_joined,
)
from lamina.gateway.oip.model_catalog import ServedModel, latest_version
from lamina.gateway.oip.rest_infer import handle_infer
from lamina.gateway.oip.row_conversion import InvalidOutput, join_rows
from lamina.gateway.oip.validation import validate_request
from lamina.gateway.routes.codec_pool import (
    CodecOverloaded,
    CodecPool,
    CodecTooLarge,
    is_heavy_request,
    is_heavy_result,
)
from lamina.gateway.routes.http_codec import decode_inputs, encode_result, reply_headers
from lamina.gateway.routes.problems import answered, defect_problem, error_problem, rejection_problem, respond_problem
from lamina.gateway.routes.rejection_cache import CachedRejection
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import SocketClose, SocketMessage, SocketTaken
from lamina.sdk.binding import Param
from lamina.server.drain_watch import DrainWatch
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.grpc import OnDone, OnMessage, RpcContext, RpcError, SerializedMessage
from lamina.server.process_status import ProcessStatus
from lamina.server.websocket import MessageSocket

UNSENT_BYTES = 128 * 2**10
"""Of a stream, that its client has not taken: what follows is not reported as taken before."""

MOST_REFUSALS = 1_024
REFUSAL_HOLDS_US = 10_000
"""How long a refusal of a call over the level is repeated as it was made: to make one takes as long as to read a request."""


class KnownRoutes:
    """The routes and models the controller has announced."""

    def __init__(self) -> None:
        self.params: dict[bytes, tuple[Param, ...]] = {}
        self.goals_us: dict[bytes, int] = {}
        self.requires_token = False
        self.repeatable: frozenset[bytes] = frozenset()  #: paths of calls that may be asked again
        self.repeatable_models: frozenset[tuple[str, str]] = frozenset()
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._paths: dict[bytes, ServedModel] = {}

    def update(self, routes: RouteTable) -> None:
        self.params = {path: tuple(params) for path, params in routes.params.items()}
        self.goals_us = routes.goals_us
        self.requires_token = routes.requires_token
        self.repeatable = frozenset(routes.repeatable)
        self.repeatable_models = frozenset((info.name, info.version) for info in routes.models if info.may_repeat)
        self._models = {}
        for info in routes.models:
            self._models.setdefault(info.name, {})[info.version] = _model(info)
        self._paths = {}
        for name, versions in self._models.items():
            at = f"/v2/models/{name}"
            self._paths[f"{at}/infer".encode()] = latest_version(versions)
            self._paths |= {f"{at}/versions/{version}/infer".encode(): model for version, model in versions.items()}

    def model_at_path(self, path: bytes) -> ServedModel | None:
        return self._paths.get(path)

    def find(self, name: str, version: str) -> ServedModel:
        versions = self._models.get(name)
        model = None if versions is None else versions.get(version) if version else latest_version(versions)
        if model is None:
            raise UnknownTarget(f"no model {name[:80]!r}")
        return model


def _model(info: ModelInfo) -> ServedModel:
    ports = {port.name: port for port in info.signature.inputs}
    target = cast(Any, _NamedTarget(info.target, info.goal_us))
    return ServedModel(info.name, info.version, target, info.signature, None, info.is_batched, ports)


class _NamedTarget:
    """All that an ingress knows of a model's target."""

    def __init__(self, name: str, goal_us: int) -> None:
        self.name = name
        self.key = name.encode()
        self.goal_us = goal_us


class IngressHttpHandler:
    """Handler of HTTP requests."""

    def __init__(self, link: ControllerLink, routes: KnownRoutes, process: ProcessStatus, codecs: CodecPool) -> None:
        self._link = link
        self._routes = routes
        self._process = process
        self._codecs = codecs
        self._refusals: dict[tuple[str, bytes], CachedRejection] = {}  #: for calls over the level, by tenant and path

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        routes, headers = self._routes, request.headers
        if request.method == "POST" and not (routes.requires_token and b"authorization" not in headers):
            try:
                params = routes.params.get(request.path)
                if params is not None:
                    if b"prefer" not in headers:
                        if self._link.pacer.level:
                            self._call_at_level(request, exchange, params)
                        else:
                            self._call(request, exchange, params, clock_us() - self._process.lag_us)
                        return
                elif headers.get(b"content-encoding", b"identity") == b"identity":
                    model = routes.model_at_path(request.path)
                    if model is not None:
                        head = self._link.call_head(request.path, headers)
                        at_us, token = clock_us() - self._process.lag_us, headers.get(b"authorization")
                        backend = RemoteBackend(self._link, head, at_us, self._codecs, token)
                        handle_infer(backend, model, LOCAL, request, exchange, self._codecs)
                        return
            except LaminaError:
                pass
        self._forward(request, exchange)

    def _call_at_level(self, request: HttpRequest, exchange: Exchange, params: tuple[Param, ...]) -> None:
        """The controller has more to do than it can: hand in the call when it is its turn, or refuse it."""
        link, path = self._link, request.path
        now_us, told = clock_us(), request.header(b"lamina-deadline-ms")
        goal_us = int(told) * 1000 if told.isdigit() and len(told) < 12 else self._routes.goals_us.get(path, 0)
        at_us = now_us - self._process.lag_us
        share = link.share_of(request.headers.get(b"authorization"))
        wait_us = link.pace(now_us, share, path, goal_us)
        if not wait_us:
            self._call(request, exchange, params, at_us)
            return
        if isinstance(wait_us, Reject):
            key = (share.tenant, path)
            cached = self._refusals.get(key)
            if cached is None or now_us >= cached.until_us:
                if len(self._refusals) >= MOST_REFUSALS:
                    self._refusals.clear()
                cached = self._refusals[key] = CachedRejection(0, now_us + REFUSAL_HOLDS_US, wait_us)
            cached.respond(exchange, wait_us.call_id)
            return
        gone: list[bool] = []
        exchange.when_disconnected(lambda: gone.append(True))

        def hand_in(_: None) -> None:
            if not gone:
                try:
                    self._call(request, exchange, params, at_us)
                except LaminaError:
                    self._forward(request, exchange)

        asyncio.get_running_loop().call_later(wait_us / 1e6, answered(exchange, hand_in), None)

    def _call(self, request: HttpRequest, exchange: Exchange, params: tuple[Param, ...], at_us: int) -> None:
        """Hand in a call that came at `at_us`."""
        if not is_heavy_request(request):
            self._send_call(request, exchange, at_us, decode_inputs(request, params))
            return
        gone: list[bool] = []
        exchange.when_disconnected(lambda: gone.append(True))

        def then(inputs: dict[str, bytes] | LaminaError) -> None:
            if gone:
                return
            if isinstance(inputs, CodecOverloaded | CodecTooLarge):
                raise inputs
            if isinstance(inputs, LaminaError):
                self._forward(request, exchange)
            else:
                self._send_call(request, exchange, at_us, inputs)

        self._codecs.decode_call(request, params, answered(exchange, then))

    def _send_call(self, request: HttpRequest, exchange: Exchange, at_us: int, blobs: dict[str, bytes]) -> None:
        link = self._link
        inputs = {name: link.store_payload(blob) for name, blob in blobs.items()}
        head = link.call_head(request.path, request.headers)
        number = link.register(HttpReply(link, exchange, request.header(b"accept"), self._codecs).on_message)
        exchange.when_disconnected(link.canceller(number))
        link.send(CallRequest(number, head, at_us, len(request.body), inputs))

    def _forward(self, request: HttpRequest, exchange: Exchange) -> None:
        link = self._link
        head = link.full_head(request)
        is_upgrade = b"sec-websocket-key" in request.headers
        made: SocketReply | HttpReply = HttpReply(link, exchange, request.header(b"accept"), self._codecs)
        if is_upgrade:
            made = SocketReply(link, request, exchange)
        number = link.register(made.on_message)
        exchange.when_disconnected(link.canceller(number))
        link.send(ForwardedRequest(number, head, link.store_payload(request.body)))


def _watch(link: ControllerLink, number: int, exchange: Exchange) -> DrainWatch:
    """Watch over a stream, until all of it has come or its client has left."""
    return DrainWatch(
        exchange, UNSENT_BYTES, lambda size: link.send(ResponseTaken(number, size)), lambda: not link.is_pending(number)
    )


class HttpReply:
    """Reply to a call, or to a forwarded request. What has come of a stream is reported as its client takes it: a web app is
    held up by a client that does not, and the others behind this process are not."""

    __slots__ = ("_accept", "_codecs", "_exchange", "_link", "_watch")

    def __init__(self, link: ControllerLink, exchange: Exchange, accept: bytes, codecs: CodecPool) -> None:
        self._link = link
        self._exchange = exchange
        self._accept = accept
        self._codecs = codecs
        self._watch: DrainWatch | None = None

    def on_message(self, message: ReplyMessage) -> bool:
        exchange = self._exchange
        match message:
            case ResultValue():
                self._respond_value(self._link.view(message.value), message.reply)
            case HttpResponse():
                exchange.respond(message.status, message.body, message.content_type, message.extra)
            case ResponseStart():
                exchange.start_stream(message.status, message.content_type, message.extra)
                return False
            case ResponseChunk():
                exchange.send_chunk(message.chunk)
                self._watch = self._watch or _watch(self._link, message.number, exchange)
                self._watch.note(message.chunk)
                return False
            case ResponseEnd():
                exchange.end_stream()
            case ResponseAborted():
                exchange.abort()
        return True

    def _respond_value(self, blob: encoding.Blob, reply: Reply) -> None:
        """Respond with a result; it can be read until this returns."""
        exchange, accept, extra = self._exchange, self._accept, reply_headers(reply)

        def then(found: dict[str, bytes] | LaminaError) -> None:
            if isinstance(found, LaminaError):
                respond_problem(exchange, error_problem(found, reply.call_id))
            else:
                exchange.respond(int(found["status"]), found["body"], found["kind"], extra + found["extra"])

        if is_heavy_result(blob, accept):
            self._codecs.encode_result(bytes(blob), accept, answered(exchange, then))
            return
        try:
            status, body, kind, own = encode_result(blob, accept)
        except LaminaError as error:
            then(error)
        else:
            exchange.respond(status, body, kind, extra + own)


class SocketReply:
    """Reply to a request for a WebSocket: the handshake, messages, and the end; or a response that is none."""

    __slots__ = ("_exchange", "_link", "_request", "_socket", "_watch")

    def __init__(self, link: ControllerLink, request: HttpRequest, exchange: Exchange) -> None:
        self._link = link
        self._request = request
        self._exchange = exchange
        self._socket: MessageSocket | None = None
        self._watch: DrainWatch | None = None

    def on_message(self, message: ReplyMessage) -> bool:
        match message:
            case SocketAccepted():
                self._accept(message)
                return False
            case SocketMessage() if self._socket is not None:
                self._socket.send(message.message)
                self._watch = self._watch or _watch(self._link, message.number, self._exchange)
                self._watch.note(message.data)
                return False
            case SocketTaken() if self._socket is not None:
                self._socket.taken(message.count)
                return False
            case SocketClose() if self._socket is not None:
                self._socket.close(message.code, message.reason)
            case HttpResponse():
                self._exchange.respond(message.status, message.body, message.content_type, message.extra)
        return True

    def _accept(self, accepted: SocketAccepted) -> None:
        link, number = self._link, accepted.number
        try:
            self._socket = socket = self._exchange.open_socket(self._request)
        except LaminaError as error:  # the controller has checked the handshake; the library may be missing here
            respond_problem(self._exchange, error_problem(error))
            link.cancel(number)
            return
        socket.accept(
            lambda message: link.send(SocketMessage.of(number, message)),
            lambda code, reason: link.leave(SocketLeft(number, code, reason)),
            *(accepted.protocol, accepted.tenant, accepted.headers),
        )


class RemoteBackend:
    """Inference backend that asks the controller. `head` names the client's headers, `at_us` is the arrival time,
    `authorization` a header of them."""

    __slots__ = ("_at_us", "_authorization", "_codecs", "_head", "_link")

    def __init__(self, link: ControllerLink, head: int, at_us: int, codecs: CodecPool, authorization: bytes | None) -> None:
        self._authorization = authorization
        self._link = link
        self._head = head
        self._at_us = at_us
        self._codecs = codecs

    def infer(self, request: InferenceRequest, on_response: OnResponse, on_chunk: OnChunk | None = None) -> Callable[[], None]:
        link, model = self._link, request.model
        target: _NamedTarget = cast(Any, model.call_target)
        rows = validate_request(model, request.inputs, request.requested_outputs)
        wait_us: int | Reject = 0
        if link.pacer.level:
            share = link.share_of(self._authorization)
            wait_us = link.pace(clock_us(), share, target.key, request.timeout_us or target.goal_us)
        if isinstance(wait_us, Reject):
            on_response(rejection_problem(wait_us))
            return lambda: None

        def begin(calls: list[dict[str, bytes]]) -> Callable[[], None]:
            size = sum([len(given.data) for given in request.inputs])
            stored = [{name: link.store_payload(blob) for name, blob in call.items()} for call in calls]
            number = link.register(_InferReply(link, self._codecs, request, len(calls), on_response, on_chunk).on_message)
            options = (request.timeout_us, request.priority, on_chunk is not None)
            link.send(InferRequest(number, self._head, self._at_us, size, model.name, model.version, stored, *options))
            return link.canceller(number)

        if not wait_us:
            return begin_request(self._codecs, request, rows, begin, on_response)
        cancels: list[Callable[[], None]] = []

        def hand_in() -> None:
            try:
                cancels.append(begin_request(self._codecs, request, rows, begin, on_response))
            except LaminaError as error:
                on_response(error_problem(error))
            except Exception as error:
                on_response(defect_problem("an inference request could not be handed in", error))

        waiting = asyncio.get_running_loop().call_later(wait_us / 1e6, hand_in)

        def cancel() -> None:
            waiting.cancel()
            for one in cancels:
                one()

        return cancel


class _InferReply:
    """Reply to an inference request: a value for each row, in any order, or chunks."""

    __slots__ = ("_codecs", "_link", "_on_chunk", "_on_response", "_request", "_rows_left", "_values")

    def __init__(
        self,
        link: ControllerLink,
        codecs: CodecPool,
        request: InferenceRequest,
        rows: int,
        on_response: OnResponse,
        on_chunk: OnChunk | None,
    ) -> None:
        self._link = link
        self._codecs = codecs
        self._request = request
        self._rows_left = rows
        self._values: list[Payload] = [b""] * rows
        self._on_response = on_response
        self._on_chunk = on_chunk

    def on_message(self, message: ReplyMessage) -> bool:
        match message:
            case ResultValue():
                return self._on_value(message)
            case InferChunk():
                return self._on_infer_chunk(message)
            case InferError():
                self._on_response(message.problem)
        return True

    def _on_value(self, message: ResultValue) -> bool:
        self._values[message.row] = message.value
        self._rows_left -= 1
        if self._rows_left:
            return False
        views = [] if self._on_chunk is not None else [self._link.view(value) for value in self._values]
        respond_joined(self._codecs, self._request, views, message.reply, self._on_response)
        return True

    def _on_infer_chunk(self, message: InferChunk) -> bool:
        request = self._request
        try:
            outputs = join_rows(request.model, [message.value], request.requested_outputs)
        except (InvalidOutput, LaminaError) as error:
            self._on_response(invalid_output_problem(request.model, error, ""))
            self._link.cancel(message.number)
            return False
        if self._on_chunk is not None:
            self._on_chunk(outputs)
        return False


class IngressGrpcMethods(InferenceMethods):
    """Handler of gRPC calls."""

    def __init__(self, link: ControllerLink, routes: KnownRoutes, process: ProcessStatus, codecs: CodecPool) -> None:
        super().__init__()
        self._codecs = codecs
        self._link = link
        self._routes = routes
        self._process = process

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer" and self._has_token(context):
            try:
                return self.infer(message, context, then)
            except LaminaError:
                pass
        return self._forward(name, message, context, then, None)

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: OnDone) -> Callable[[], None] | None:
        if self.reflection.is_request(message):
            return self.reflection.answer(message, then, done)
        if self._has_token(context):
            try:
                return self.infer_stream(message, context, then, done)
            except LaminaError:
                pass
        return self._forward("ModelStreamInfer", message, context, then, done)

    def backend(self, context: RpcContext) -> RemoteBackend:
        head = self._link.call_head(b"", dict(context.headers))
        at_us, token = clock_us() - self._process.lag_us, context.headers.get(b"authorization")
        return RemoteBackend(self._link, head, at_us, self._codecs, token)

    def find(self, name: str, version: str, context: RpcContext) -> tuple[ServedModel, Identity]:
        return self._routes.find(name, version), LOCAL

    def _has_token(self, context: RpcContext) -> bool:
        return not self._routes.requires_token or b"authorization" in context.headers

    def _forward(self, name: str, message: Any, context: RpcContext, then: OnMessage, done: OnDone | None) -> Callable[[], None]:
        """Pass a message on as it is; with `done` it is one of a stream, and may have several replies."""

        def on_message(reply: ReplyMessage) -> bool:
            if isinstance(reply, RpcReply):
                then(RpcError(reply.code, reply.text) if reply.code else SerializedMessage([reply.message]))
                return done is None
            if done is not None:
                done(failed=isinstance(reply, ResponseEnd) and reply.failed)
            return True

        link = self._link
        head = link.full_head(HttpRequest("POST", b"/", b"", dict(context.headers), b"", True))
        number = link.register(on_message)
        link.send(RpcRequest(number, head, name, link.store_payload(message.SerializeToString()), context.timeout_us))
        return link.canceller(number)
