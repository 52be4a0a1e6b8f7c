"""Routes of sessions, `/v1/sessions`: a call that lives on between requests, and exchanges messages with clients.

A session is a call of a function with a parameter that is an `AsyncIterator`, as over a WebSocket (`sockets.py`), without a
connection of its own: it has an id, any request of its tenant can send it a message or read what it has yielded, and it ends
when the function does, when a client ends it, or when no request has named it for its idle time.

What the function yields is numbered and kept until a client says up to which number it has read, so nothing is lost when a
response is; a function that yields more than may be kept unread is cancelled. A server that stops tells functions that there are
no more messages: sessions are in memory, and a restart ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.drivers.engine import MessageStream
from lamina.errors import BadValue, Conflict, FunctionFailed, LaminaError, NotFound, Refused
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.codec_pool import CodecTooLarge, check_light
from lamina.gateway.routes.http_codec import JSON, VALUE, DecodedBody, decode_inputs, parse_query, query_int
from lamina.gateway.routes.router import RouteHandler
from lamina.gateway.routes.streaming import NO_RESULT, piece_text
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.server.exchange import DetachedExchange, Exchange, HttpRequest
from lamina.server.memory_budget import MemoryBudget
from lamina.server.process_status import ProcessStatus
from lamina.server.websocket import UnreadWindow
from lamina.units import parse_us

MAX_SESSIONS = 1_024
MAX_PER_TENANT = 256
MAX_UNREAD = 1_000
"""Values that a function has yielded and no client has read."""

MAX_UNREAD_BYTES = 8 * 2**20
MAX_PROBLEM_BYTES = 16 * 2**10
"""Of what a session has failed with: a function may make a response of any size its own."""

MAX_UNTAKEN = 32
MAX_UNTAKEN_BYTES = MAX_MESSAGE_BYTES = 2**20
"""Messages that the function has not taken, and what each may have."""

MAX_WAIT_MS = 60_000
LASTS_US = 24 * 3_600_000_000
"""Time limit of a session, however much is said in it."""

IDLE_US = 600_000_000
MAX_IDLE_US = 3_600_000_000
KEPT_S = 60.0
"""How long a session that has ended can still be read."""

_READ = ("after", "wait_ms")


class CallSession(DetachedExchange):
    """A session: stands in for the exchange of its call. `sink` takes what the function yields."""

    __slots__ = (
        "_budget_charge", "_bytes", "_idle", "_idle_s", "_untaken", "_waiting", "ended", "first", "function", "id", "is_closing",
        "sink", "tenant", "values",
    )  # fmt: skip

    def __init__(self, function: str, tenant: str, idle_us: int, budget: MemoryBudget) -> None:
        super().__init__()
        self.id = secrets.token_urlsafe(18)
        self.function = function
        self.tenant = tenant
        self.values: deque[bytes] = deque()  #: yielded and not read, as JSON
        self.first = 1  #: number of the first of them
        self.ended: dict[str, Any] | None = None  #: how it ended
        self.is_closing = False
        self.sink = MessageStream(self._on_value, self._on_taken)
        self._untaken = UnreadWindow(MAX_UNTAKEN, MAX_UNTAKEN_BYTES)
        self._bytes = 0
        self._budget_charge = budget.charge("sessions", 0, tenant=tenant)
        self._idle_s = idle_us / 1e6
        self._idle: asyncio.TimerHandle | None = None
        self._waiting: dict[object, Callable[[], None]] = {}
        self.touch()

    @property
    def last(self) -> int:
        """Number of the last value."""
        return self.first + len(self.values) - 1

    def touch(self) -> None:
        """A request has named it: its idle time begins anew."""
        if self._idle is not None:
            self._idle.cancel()
        if self.ended is None:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_by, "idle", "no request has named it")

    def put(self, message: bytes | None) -> None:
        """A message for the function; None: there are no more."""
        if self.ended is not None or self.is_closing:
            raise Conflict("session: it takes no more messages", hint="it has ended, or is about to: read what is left")
        if message is not None and self._untaken.is_full:
            raise Refused("session: the function has not taken its messages", hint="wait", reason="messages", retry_after_s=1.0)
        if message is not None:
            self._budget_charge.grow(self._bytes + self._untaken.size + len(message))
        self.is_closing = message is None
        if not self.sink.put(message):
            self._set_charge()
            raise Conflict("session: too many messages before its call has begun", hint="send fewer, or wait")
        if message is not None:
            self._untaken.add(len(message))

    def _on_taken(self, count: int) -> None:
        self._untaken.take(count)
        self._set_charge()

    def _set_charge(self) -> None:
        self._budget_charge.set(self._bytes + self._untaken.size)

    def acknowledge(self, number: int) -> None:
        """A client has read everything up to this number."""
        while self.values and self.first <= number:
            self._bytes -= len(self.values.popleft())
            self.first += 1
        self._set_charge()

    def when_changed(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call it once, with the next value or the end; the returned function takes that back."""
        number = object()
        self._waiting[number] = act
        return lambda: self._waiting.pop(number, None) and None

    def cancel(self) -> None:
        self._end_by("cancelled", "a client has ended it")

    def _on_value(self, blob: bytes) -> None:
        if self.ended is not None:
            return
        try:
            self._keep(piece_text(blob))
        except LaminaError as error:
            self._end_by(error.code, error.message)

    def _keep(self, value: bytes) -> None:
        if len(self.values) >= MAX_UNREAD or self._bytes + len(value) > MAX_UNREAD_BYTES:
            raise BadValue("the function has yielded more than may be kept unread", hint="read it more often")
        self._bytes += len(value)
        self._budget_charge.grow(self._bytes + self._untaken.size)
        self.values.append(value)
        self._notify()

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """The end of the call: by itself, or by a failure."""
        if self.ended is not None:
            return
        if status == 200:
            if content_type == JSON and body not in NO_RESULT and not self.last:  # it has returned, not yielded
                try:
                    self._keep(_checked_json(body))
                except LaminaError as error:
                    self._end({"status": error.status, "problem": {"code": error.code, "detail": error.message}})
                    return
            self._end({"status": 200})
        else:
            self._end({"status": status, "problem": _read_problem(body, content_type)})

    def _end_by(self, code: str, detail: str) -> None:
        if self.ended is None:
            self._end({"status": 499, "problem": {"code": code, "detail": detail}})
            self.disconnect()  # its call is cancelled

    def _end(self, ended: dict[str, Any]) -> None:
        self.ended = ended
        self.response = b""
        if self._idle is not None:
            self._idle.cancel()
        self._notify()

    def forget(self) -> None:
        """No more of it is read; what it still yields finds no one."""
        self.values.clear()
        self._bytes = 0
        self._untaken = UnreadWindow(MAX_UNTAKEN, MAX_UNTAKEN_BYTES)
        self._budget_charge.release()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for act in waiting.values():
            act()

    def about(self) -> dict[str, Any]:
        return {"id": self.id, "function": self.function, "last": self.last, "unread": len(self.values), "ended": self.ended}


class SessionRoutes:
    """Routes of sessions, and the owner of those in flight."""

    def __init__(self, targets: TargetRegistry, calls: CallHandler, process: ProcessStatus, budget: MemoryBudget) -> None:
        self._targets = targets
        self._calls = calls
        self._process = process
        self._budget = budget
        self._sessions: dict[str, CallSession] = {}
        self.routes: dict[str, RouteHandler] = {
            "GET /v1/sessions": self._list,
            "POST /v1/functions/{function}/sessions": self._open,
            "GET /v1/sessions/{session}": self._show,
            "DELETE /v1/sessions/{session}": self._delete,
            "POST /v1/sessions/{session}/messages": self._send,
            "GET /v1/sessions/{session}/messages": self._read,
        }

    def drain(self) -> None:
        """The server stops: functions get no more messages, and may end in their own way."""
        for session in list(self._sessions.values()):
            if session.ended is None and not session.is_closing:
                session.put(None)

    def _open(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> None:
        target = self._target(grant, name)
        query = parse_query(request, ("idle",))
        idle_us = parse_us(query["idle"], "idle") if "idle" in query else IDLE_US
        if not 1_000_000 <= idle_us <= MAX_IDLE_US:
            raise BadValue(f"idle: {query.get('idle')!r} is out of range", hint="write idle=1s to idle=60m")
        params = tuple(param for param in target.params if not param.is_incoming)
        if len(params) == len(target.params):
            raise BadValue(
                f"{name!r} takes no messages: it has no parameter that is an AsyncIterator", hint="call it, or give it one"
            )
        mine = [one for one in self._sessions.values() if one.tenant == grant.tenant and one.ended is None]
        if len(mine) >= MAX_PER_TENANT or not self._make_room():
            raise Refused(f"{len(mine)} sessions are open", hint="end some of them", reason="sessions", retry_after_s=1.0)
        check_light(request)
        inputs = decode_inputs(replace_query(request), params)
        session = CallSession(target.name, grant.tenant, idle_us, self._budget)
        self._sessions[session.id] = session
        session.when_changed(lambda: self._on_changed(session))
        slo = msgspec.structs.replace(target.slo, latency_us=0, timeout_us=max(LASTS_US, target.slo.timeout_us))
        head = HttpRequest("POST", request.path, b"", {}, b"", True)
        decoded = DecodedBody(inputs, len(request.body), self._calls.driver.now_us())
        self._calls.handle(replace(target, slo=slo, shadow=None, cache_us=0), head, session, grant.caller, decoded)
        place = f"location: /v1/sessions/{session.id}\r\n".encode()
        exchange.respond(201, msgspec.json.encode(session.about()), JSON, place)

    def _make_room(self) -> bool:
        """Whether one more may be opened. Those that have ended are kept as long as there is room for them: of the tenant that
        has most of them the oldest one goes, so that one tenant keeps no other out."""
        if len(self._sessions) < MAX_SESSIONS:
            return True
        ended = [one for one in self._sessions.values() if one.ended is not None]
        counts = Counter(one.tenant for one in ended)
        if ended:
            self._remove(max(ended, key=lambda one: counts[one.tenant]))
        return bool(ended)

    def _on_changed(self, session: CallSession) -> None:
        """Keep a session that has ended for a while, so that its end can be read."""
        if session.ended is None:
            session.when_changed(lambda: self._on_changed(session))
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._remove, session)

    def _remove(self, session: CallSession) -> None:
        if self._sessions.pop(session.id, None) is not None:
            session.forget()

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        seen = [one.about() for one in self._sessions.values() if grant.sees(one.tenant)]
        exchange.respond(200, msgspec.json.encode(seen))

    def _show(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        exchange.respond(200, msgspec.json.encode(self._find(grant, id).about()))

    def _delete(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        """End it: at first by saying that there are no more messages, again by cancelling its call."""
        session = self._find(grant, id)
        if session.ended is None:
            if session.is_closing:
                session.cancel()
            else:
                session.put(None)
        exchange.respond(200, msgspec.json.encode(session.about()))

    def _send(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        session = self._find(grant, id)
        if len(request.body) > MAX_MESSAGE_BYTES:
            raise CodecTooLarge(f"message: {len(request.body)} bytes", hint=f"at most {MAX_MESSAGE_BYTES}")
        check_light(request)
        kind = request.header(b"content-type").partition(b";")[0].strip().lower()
        if kind == VALUE:
            value = encoding.decode_input(request.body)
        elif kind in (b"", JSON):
            value = encoding.from_json(request.body)
        else:
            value = request.body
        session.put(encoding.encode(value))
        exchange.respond(202, msgspec.json.encode(session.about()))

    def _read(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        session = self._find(grant, id)
        query = parse_query(request, _READ)
        after, wait_ms = query_int(query, "after", 0, 2**53), query_int(query, "wait_ms", 0, MAX_WAIT_MS)
        session.acknowledge(after)
        undo: list[Callable[[], None]] = []

        def stop() -> None:
            while undo:
                undo.pop()()

        def answer(*, is_late: bool = False) -> None:
            stop()
            if session.last <= after and session.ended is None and wait_ms and not is_late:
                undo.append(session.when_changed(answer))
                undo.append(asyncio.get_running_loop().call_later(wait_ms / 1000, lambda: answer(is_late=True)).cancel)
                return
            values = b",".join(session.values)
            body = b'{"first":%d,"values":[%s],"ended":%s}' % (session.first, values, msgspec.json.encode(session.ended))
            exchange.respond(200, body)

        exchange.when_disconnected(stop)
        answer()

    def _find(self, grant: Grant, id: str) -> CallSession:
        missing = NotFound("no session of this id", hint="it has ended, or is another tenant's; GET /v1/sessions lists them")
        session = self._sessions.get(id)
        if session is None:
            raise missing
        grant.check_owner(session.tenant, missing)
        session.touch()
        return session

    def _target(self, grant: Grant, name: str) -> CallTarget:
        target = self._targets.function_for(grant, name)
        if self._process.refusal is not None:
            raise self._process.refusal()
        return target if target.split is None else target.split.stable


def _checked_json(body: bytes) -> bytes:
    """A result as it is put between the values of others. What a function calls JSON need be none."""
    try:
        if len(body) <= MAX_UNREAD_BYTES:
            msgspec.json.decode(body, type=msgspec.Raw)
            body.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise FunctionFailed("its result has the type of JSON, and is none", error="BadValue") from None
    return body


def _read_problem(body: bytes, content_type: bytes) -> Any:
    """What a session has failed with: a problem of ours, or a response that a function has made, of whatever size and kind."""
    if content_type.endswith(b"json") and len(body) <= MAX_PROBLEM_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body)
    return {"detail": body[:MAX_PROBLEM_BYTES].decode(errors="replace")}


def replace_query(request: HttpRequest) -> HttpRequest:
    """The request without its query, which is not about the inputs."""
    return msgspec.structs.replace(request, query=b"")
