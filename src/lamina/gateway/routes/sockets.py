"""Calls from web pages by GET: WebSockets, both ways, and the server-sent events of an `EventSource`. Inputs are in the query.

A page can send neither headers nor a body with them. So inputs are fields of the query, read as those of a form are; a token may
be a subprotocol of a WebSocket. A WebSocket without a query has its inputs in the first message, if its function needs any.

Over a WebSocket each value that the function yields is a message: JSON as text, bytes as they are. Messages of the client are
read the same way and go to the parameter that is an `AsyncIterator`; an empty text says that there are no more. The close code
says how it ended: 1000, or 4000 and the status that a response would have had, with the problem in the reason.

An `EventSource` connects again when its stream has ended. It is told to stop by 204: what a function has yielded is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from urllib.parse import parse_qsl
from weakref import WeakSet

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.drivers.engine import MessageStream
from lamina.errors import BadValue, LaminaError, Unauthorized
from lamina.gateway.observability import logs
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.codec_pool import CodecTooLarge, is_heavy_json
from lamina.gateway.routes.http_codec import JSON, MAX_PARTS, DecodedBody, FormField, form_values
from lamina.gateway.routes.problems import HttpProblem, error_problem
from lamina.gateway.routes.request_options import OPTION_HEADERS
from lamina.gateway.routes.streaming import NO_RESULT, ServerSentEvents, piece_value
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.sdk.binding import Param, bind, bind_named
from lamina.server.exchange import DetachedExchange, Exchange, HttpRequest
from lamina.server.process_status import ProcessStatus
from lamina.server.websocket import (
    GOING_AWAY,
    INTERNAL_ERROR,
    INVALID_DATA,
    MAX_REASON_BYTES,
    NORMAL,
    POLICY_VIOLATION,
    UNSUPPORTED_DATA,
    MessageSocket,
    offered_protocols,
)

PROTOCOL = "lamina"
BEARER = "lamina.bearer."
"""A page cannot send an Authorization header with a WebSocket: `new WebSocket(url, ["lamina", "lamina.bearer.TOKEN"])`."""

SESSION_US = 24 * 3_600_000_000
"""Time limit of a call that takes messages: it lasts as long as its client wants, a day at most."""

CALL_FAILED = 4_000
"""Close codes are this and the HTTP status."""

MAX_PROBLEM_BYTES = 64 * 2**10
"""Of what is read to tell what a call has failed with."""

_KEPT_HEADERS = OPTION_HEADERS | {b"traceparent"}


class SocketSession(DetachedExchange):
    """Answer to a call over a WebSocket: stands in for an exchange. `sink` takes what the function yields."""

    __slots__ = ("__weakref__", "_has_sent", "_is_draining", "_socket", "sink")

    def __init__(self, socket: MessageSocket, *, takes_messages: bool) -> None:
        super().__init__()
        self._socket = socket
        self._has_sent = self._is_draining = False
        self.sink = MessageStream(self._send_value, socket.taken) if takes_messages else self._send_value

    def _send_value(self, blob: encoding.Blob) -> None:
        if self.response is not None:
            return
        try:
            value = piece_value(blob)
            message = value if isinstance(value, bytes) else encoding.to_json(value).decode()
        except LaminaError as error:
            self._close(INTERNAL_ERROR, reason_of(error_problem(error)))
            return
        self._has_sent = True
        self._socket.send(message)

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.response is not None:
            return
        if status != 200:
            self._close(CALL_FAILED + status, _reason_of_body(body))
            return
        if not self._has_sent and body not in NO_RESULT:  # it has returned, not yielded
            is_text = content_type == JSON or content_type.startswith(b"text/")
            self._socket.send(_text_of(body) if is_text else body)
        self._close(GOING_AWAY if self._is_draining else NORMAL, "")

    def drain(self) -> None:
        """The server stops: the function gets no more messages, and may end in its own way."""
        self._is_draining = True
        if isinstance(self.sink, MessageStream) and self.response is None:
            self.sink.put(None)

    def put(self, message: str | bytes) -> None:
        """A message of the client for the function."""
        if self._is_draining:
            return
        if isinstance(self.sink, MessageStream) and self.response is None:
            try:
                value = _from_text(message) if isinstance(message, str) and message else message
            except (BadValue, CodecTooLarge) as error:
                self._fail(INVALID_DATA, f"message: text is to be JSON: {error.message}")
                return
            if not self.sink.put(None if message == "" else encoding.encode(value)):
                self._fail(POLICY_VIOLATION, "too many messages before the call began")
        elif message != "":
            self._fail(UNSUPPORTED_DATA, "this function takes no messages: it has no parameter that is an AsyncIterator")

    def on_client_left(self, code: int, reason: str) -> None:
        self.response = b""
        self.disconnect()

    def _fail(self, code: int, reason: str) -> None:
        """End the session for what the client did: its call is cancelled."""
        self.response = b""
        self._socket.close(code, reason)
        self.disconnect()

    def _close(self, code: int, reason: str) -> None:
        self.response = b""
        self._on_disconnect = None
        self._socket.close(code, reason)


class EventSourceStream(ServerSentEvents):
    """Server-sent events whose client connects again: each has a number, by which it is known then."""

    __slots__ = ("_count", "sink")

    def __init__(self, real: Exchange) -> None:
        super().__init__(real)
        self._count = 0
        self.sink = self.send_value

    def when_disconnected(self, callback: Callable[[], None]) -> None:
        self._exchange.when_disconnected(callback)

    def _encode_event(self, event: bytes, data: bytes) -> bytes:
        self._count += 1
        return b"id: %d\n%s" % (self._count, super()._encode_event(event, data))


class SocketRoutes:
    """Routes of functions that pages call by GET."""

    def __init__(self, targets: TargetRegistry, calls: CallHandler, process: ProcessStatus) -> None:
        self._targets = targets
        self._calls = calls
        self._sessions: WeakSet[SocketSession] = WeakSet()  #: that take messages
        self._process = process
        self.routes = {
            "GET /v1/functions/{function}/ws": self._open_socket,
            "GET /v1/functions/{function}/events": self._stream_events,
        }

    def drain(self) -> None:
        """End what ends only when a client says so."""
        for session in list(self._sessions):
            session.drain()

    def _stream_events(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> None:
        target = self._target(request, grant, name)
        if request.headers.get(b"sec-fetch-mode") == b"navigate" or b"text/html" in request.headers.get(b"accept", b""):
            raise BadValue(
                "this address starts a call: a link to it does not", hint="read it with an EventSource, or POST the inputs"
            )
        if b"last-event-id" in request.headers:
            exchange.respond(204, b"", b"text/event-stream")
            return
        inputs, size = encode_inputs(query_inputs(request.query, target.params)), len(request.query)
        call = replace(target, shadow=None)
        self._submit(call, request, EventSourceStream(exchange), grant, inputs, size)

    def _open_socket(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> None:
        target = self._target(request, grant, name)
        params = tuple(param for param in target.params if not param.is_incoming)
        takes_messages = len(params) < len(target.params)
        if takes_messages:
            timeout_us = max(SESSION_US, target.slo.timeout_us)
            target = replace(target, slo=msgspec.structs.replace(target.slo, timeout_us=timeout_us))
        target = replace(target, shadow=None)
        awaits_inputs = not request.query and any(param.required for param in params)
        socket = exchange.open_socket(request)
        if socket.protocols and PROTOCOL not in socket.protocols:
            raise BadValue("sec-websocket-protocol: none that is spoken here", hint=f"offer {PROTOCOL!r}, or none")
        session = SocketSession(socket, takes_messages=takes_messages)
        if takes_messages:
            self._sessions.add(session)

        def begin(inputs: Callable[[], dict[str, bytes]], size: int) -> None:
            """Submit the call. A page is told nothing about a handshake that fails, so what is wrong is told by closing."""
            try:
                self._submit(target, request, session, grant, inputs(), size)
            except LaminaError as error:
                problem = error_problem(error)
                logs.log_rejection(problem)
                session.respond(problem.status, problem.body())

        def on_message(message: str | bytes) -> None:
            nonlocal awaits_inputs
            if not awaits_inputs:
                session.put(message)
                return
            awaits_inputs = False
            socket.taken(1)
            begin(lambda: message_inputs(params, message), len(message))

        socket.accept(on_message, session.on_client_left, PROTOCOL if socket.protocols else "", grant.tenant)
        if not awaits_inputs:
            begin(lambda: encode_inputs(query_inputs(request.query, params)), len(request.query))

    def _target(self, request: HttpRequest, grant: Grant, name: str) -> CallTarget:
        target = self._targets.function_for(grant, name)
        if self._process.refusal is not None:
            raise self._process.refusal()
        if b"prefer" in request.headers:
            raise BadValue("prefer: a stream is no run that is waited for later", hint="POST it, or leave the header out")
        return target.split.choose(request.headers) if target.split is not None else target

    def _submit(
        self,
        target: CallTarget,
        request: HttpRequest,
        answer: Exchange,
        grant: Grant,
        inputs: dict[str, bytes],
        size: int,
    ) -> None:
        kept = {name: value for name, value in request.headers.items() if name in _KEPT_HEADERS}
        head = HttpRequest("POST", request.path, b"", kept, b"", request.keep_alive)
        decoded = DecodedBody(inputs, size, self._calls.driver.now_us() - self._process.lag_us)
        self._calls.handle(target, head, answer, grant.caller, decoded)


def with_bearer(request: HttpRequest) -> HttpRequest:
    """A request whose token is a subprotocol, with the header that it stands for."""
    offered = offered_protocols(request.headers.get(b"sec-websocket-protocol", b""))
    tokens = [one[len(BEARER) :] for one in offered if one.startswith(BEARER)]
    if not tokens:
        return request
    if len(tokens) > 1 or b"authorization" in request.headers:
        raise Unauthorized("more than one token", hint=f"send one, in Authorization or as a subprotocol {BEARER}TOKEN")
    others = ", ".join(one for one in offered if not one.startswith(BEARER)).encode("latin-1")
    changed = {b"authorization": b"Bearer " + tokens[0].encode("latin-1"), b"sec-websocket-protocol": others or BEARER.encode()}
    return msgspec.structs.replace(request, headers={**request.headers, **changed})


def query_inputs(query: bytes, params: tuple[Param, ...]) -> dict[str, object]:
    """Named inputs from a query: fields as those of a form."""
    fields: dict[str, list[FormField]] = {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PARTS, errors="strict")
    except ValueError:
        hint = f"NAME=VALUE&NAME=VALUE, percent-encoded UTF-8, up to {MAX_PARTS} of them"
        raise BadValue("query: it cannot be read", hint=hint) from None
    for name, text in pairs:
        fields.setdefault(name, []).append(text)
    return bind_named(params, form_values(params, fields))


def message_inputs(params: tuple[Param, ...], message: str | bytes) -> dict[str, bytes]:
    """Named inputs from the first message: what the body of a POST would be."""
    if isinstance(message, str):
        return encode_inputs(bind(params, _from_text(message)))
    return encode_inputs(bind(params, message))


def _from_text(message: str) -> object:
    """JSON that is decoded in place; a message of a megabyte may have half a million parts."""
    text = message.encode()
    if is_heavy_json(text):
        raise CodecTooLarge(f"message: {len(text)} bytes with many parts", hint="send fewer at a time, or bytes")
    return encoding.from_json(text)


def encode_inputs(named: dict[str, object]) -> dict[str, bytes]:
    return {name: encoding.encode(value) for name, value in named.items()}


def reason_of(problem: HttpProblem) -> str:
    """A problem as JSON that fits into a close frame: its code first, then what there is room for."""
    fields = (
        ("code", problem.code),
        ("reason", problem.reason),
        ("offer_ms", round(problem.offer_ms, 1)),
        ("retry_after_s", round(problem.retry_after_s, 2)),
        ("detail", problem.detail),
        ("id", problem.id),
    )
    shown: dict[str, object] = {}
    for name, value in fields:
        if not value:
            continue
        room = MAX_REASON_BYTES - len(msgspec.json.encode({**shown, name: ""}))
        if isinstance(value, str) and len(msgspec.json.encode(value)) - 2 > room:
            if name != "detail" or room < 8:
                continue
            value = _cut(value, room)
        if len(msgspec.json.encode({**shown, name: value})) <= MAX_REASON_BYTES:
            shown[name] = value
    return msgspec.json.encode(shown).decode()


def _cut(text: str, room: int) -> str:
    """As much of a text as takes so many bytes in JSON."""
    while len(msgspec.json.encode(text)) - 2 > room:
        text = text[: max(0, len(text) - max(1, (len(text) - room) // 2))]
    return text


def _text_of(body: bytes) -> str | bytes:
    """A result as a message. What a function calls JSON or text need be none."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def _reason_of_body(body: bytes) -> str:
    if len(body) > MAX_PROBLEM_BYTES:  # a response of the function's own
        return body[:MAX_REASON_BYTES].decode(errors="ignore")
    try:
        return reason_of(msgspec.json.decode(body, type=HttpProblem))
    except msgspec.MsgspecError:  # a response of the function's own
        return body[:MAX_REASON_BYTES].decode(errors="ignore")
