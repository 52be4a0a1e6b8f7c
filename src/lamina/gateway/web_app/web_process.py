"""The gateway's side of its web apps: the host process, the requests it has, and the private socket for the calls it makes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from lamina.errors import LaminaError, LoadFailed
from lamina.gateway.observability import logs
from lamina.gateway.routes.problems import make_problem, respond_problem
from lamina.gateway.web_app.messages import (
    PIECE_BYTES,
    HeaderList,
    WebAccept,
    WebBody,
    WebClientLeft,
    WebDrained,
    WebEnded,
    WebHostReady,
    WebHostSetup,
    WebRequest,
    WebRequestBody,
    WebStart,
    web_host_reader,
)
from lamina.ipc.child_process import ChildProcess, ProcessSpec, exit_reason
from lamina.ipc.framing import FrameError, SocketClose, SocketMessage, SocketTaken, pack
from lamina.server.drain_watch import DrainWatch
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http_server import HttpServer
from lamina.server.memory_budget import MemoryBudget, MemoryCharge
from lamina.server.websocket import MessageSocket, UnreadWindow

log = logging.getLogger("lamina")

MODULE = "lamina.gateway.web_app.host"
STARTUP_S = 90.0
RESPAWN_S, MAX_RESPAWN_S = 0.1, 5.0
UNSENT_BYTES = 256 * 2**10  #: of a response that its client has not taken; what follows is waited for

_OURS = frozenset((b"content-length", b"transfer-encoding", b"connection", b"date", b"keep-alive", b"upgrade"))
"""Response headers that the gateway writes itself."""

_WITHOUT_BODY = (204, 205, 304)

_NAME, _VALUE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(rb"[^\r\n\0]*")


class HostOutbox:
    """Frames that the host has yet to take, by request. Requests have turns, so that a large body holds up no other; what is of a
    client that has left is dropped."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Iterator[Struct]]] = {}  #: in their turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, number: int, frames: Iterator[Struct]) -> None:
        self._waiting.setdefault(number, deque()).append(frames)

    def drop(self, number: int) -> None:
        self._waiting.pop(number, None)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, size: int) -> bytearray:
        """Frames of about so many bytes, a frame of each request in turn."""
        wire = bytearray()
        while self._waiting and len(wire) < size:
            number, waiting = next(iter(self._waiting.items()))
            frame = next(waiting[0], None)
            if frame is None:
                waiting.popleft()
            else:
                wire += pack(frame)
            del self._waiting[number]
            if waiting:
                self._waiting[number] = waiting
        return wire


class PendingWebRequest:
    """A request that the host is busy with, and its response so far."""

    def __init__(self, exchange: Exchange, charge: MemoryCharge | None, socket: MessageSocket | None = None) -> None:
        self.exchange = exchange
        self.socket = socket
        self.charge = charge  #: of what the client has sent
        self.sent = 0  #: of the body, to the host
        self.unread = UnreadWindow(0, 0)  #: messages that the application has not taken
        self.watch: DrainWatch | None = None  #: over the response: with the client's taking the host may send on
        self._start: WebStart | None = None
        self._is_streaming = False
        self.has_accepted = False

    def on_start(self, start: WebStart) -> None:
        self._start = start

    def on_body(self, body: WebBody) -> None:
        exchange, start = self.exchange, self._start
        if start is None:
            raise FrameError("a body without a response")
        if not self._is_streaming:
            status, kind, lines = response_head(start, exchange.has_cors)
            is_page = kind[:9].lower() == b"text/html"  # its policy is its own
            if status in _WITHOUT_BODY:  # clients take what comes behind one for the next response
                exchange.respond(status, b"", b"application/octet-stream" if is_page else kind, lines)
                return
            if not body.more and not is_page:
                exchange.respond(status, body.data, kind, lines)
                return
            self._is_streaming = True
            exchange.start_stream(status, kind, lines)
        exchange.send_chunk(body.data)
        if not body.more:
            exchange.end_stream()

    def fail(self, status: int, detail: str) -> None:
        """No whole response comes: an error, or a connection that breaks off."""
        if self.socket is not None and self.has_accepted:
            self.socket.close(1011, detail)
        elif self._is_streaming:
            self.exchange.abort()
        else:
            respond_problem(self.exchange, make_problem(status, detail, hint="the server's log says more"))


class WebProcess:
    """The host process of the mounted applications, restarted when it dies."""

    def __init__(
        self,
        source: str,
        mounts: Mapping[str, Any],
        environment: Mapping[str, str],
        budget: MemoryBudget,
        call_server: HttpServer,
    ) -> None:
        """`call_server` answers the calls of the applications: on a private socket, as the operator's own."""
        self._source = source
        self._paths = sorted((path.rstrip("/") or "/" for path in mounts), key=len, reverse=True)
        self._mounted = {path.rstrip("/") or "/": path for path in mounts}
        self._environment = dict(environment)
        self._budget = budget
        self._call_server = call_server
        self._folder = ""
        self._loop = asyncio.get_running_loop()
        self._process: ChildProcess | None = None
        self._ready: asyncio.Future[WebHostReady] = self._loop.create_future()
        self._pending: dict[int, PendingWebRequest] = {}
        self._charges: dict[int, MemoryCharge | None] = {}  #: of what the host has and is not done with, client or no client
        self._outbox = HostOutbox()
        self._is_sending = False
        self._count = 0
        self._respawn_s = RESPAWN_S
        self._is_stopping = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            WebHostReady: self._on_ready,
            WebStart: lambda frame: self._pending[frame.number].on_start(frame),
            WebBody: self._on_body,
            WebEnded: self._on_ended,
            WebAccept: self._on_accept,
            SocketMessage: self._on_output,
            SocketTaken: self._on_taken,
            SocketClose: self._on_close,
        }

    @property
    def has_root(self) -> bool:
        return "/" in self._mounted

    def mount_of(self, path: bytes) -> str | None:
        """The mount that a path belongs to."""
        text = path.decode("latin-1")
        for prefix in self._paths:
            if prefix == "/" or text == prefix or text.startswith(f"{prefix}/"):
                return self._mounted[prefix]
        return None

    async def start(self) -> None:
        """Start the host; raises `LoadFailed` if an application does not start."""
        self._folder = tempfile.mkdtemp(prefix="lamina-web-")  # of this user alone
        path = os.path.join(self._folder, "lamina.sock")
        await self._call_server.start_unix(path)
        self._environment |= {"LAMINA_URL": f"unix://{path}", "LAMINA_TOKEN": ""}
        self._spawn()
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), STARTUP_S)
        except TimeoutError:
            raise LoadFailed(
                f"web app: it has not started within {STARTUP_S:g} s", hint="what does its startup wait for?"
            ) from None
        if ready.error:
            raise LoadFailed(f"web app: {ready.error}", hint="the log has its traceback")

    def _spawn(self) -> None:
        setup = WebHostSetup(source=self._source, log_format=logs.current_format())
        spec = ProcessSpec(MODULE, web_host_reader, self._environment)
        self._process = ChildProcess(self._loop, setup, self._on_frame, self._on_end, spec)

    def _on_end(self) -> None:
        """The host is gone, and the requests that it had."""
        why = exit_reason(self._process)
        self._process = None
        lost, self._pending = list(self._pending.values()), {}
        self._outbox.clear()
        self._is_sending = False
        charges, self._charges = self._charges, {}
        for charge in charges.values():
            _release(charge)
        for pending in lost:
            _release(pending.charge)
            pending.fail(502, "the web app has ended")
        if not self._ready.done():
            self._ready.set_result(WebHostReady(f"its process {why}"))
        elif not self._is_stopping:
            log.warning("the process of the web apps %s; another one is started", why)
            self._loop.call_later(self._respawn_s, self._respawn)
            self._respawn_s = min(2 * self._respawn_s, MAX_RESPAWN_S)

    def _respawn(self) -> None:
        if not self._is_stopping:
            try:
                self._spawn()
            except OSError:
                self._loop.call_later(MAX_RESPAWN_S, self._respawn)

    async def stop(self) -> None:
        self._is_stopping = True
        if self._process is not None:
            process = self._process
            process.stop(15.0)
            await process.finished
        await self._call_server.stop()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------ requests

    def handle(self, mount: str, request: HttpRequest, exchange: Exchange) -> None:
        """Pass a request on. Its body stays in the memory budget until the application is done with it: one that is slow holds
        what clients have sent it also when they have left."""
        if self._process is None or not self._ready.done():
            respond_problem(exchange, make_problem(503, "the web app is being started", hint="try again in a moment"))
            return
        self._count += 1
        number, head = self._count, (request.method, request.path, request.query, list(request.headers.items()), exchange.client)
        if b"sec-websocket-key" in request.headers:
            socket = exchange.open_socket(request)
            pending = PendingWebRequest(exchange, self._budget.charge("mounted", 0, exchange.address), socket)
            socket.when_left(lambda code, reason: self._on_client_left(number, code))
            first = WebRequest(number, mount, *head, is_socket=True, protocols=socket.protocols)
        else:
            charge, exchange.charge = exchange.charge, None
            if charge is None and request.body:
                charge = self._budget.charge("mounted", len(request.body), exchange.address)
            pending = PendingWebRequest(exchange, charge)
            exchange.when_disconnected(lambda: self._on_client_left(number, 1006))
            body = request.body
            first = WebRequest(number, mount, *head, body[:PIECE_BYTES], more=len(body) > PIECE_BYTES)
        self._pending[number] = pending
        self._tell(number, self._request_frames(first, pending, request.body))

    def _request_frames(self, first: WebRequest, pending: PendingWebRequest, body: bytes) -> Iterator[Struct]:
        """A request with its body in pieces. Once the first is on its way, the host has it."""
        self._charges[first.number] = pending.charge
        pending.sent = len(first.body)
        yield first
        for at in range(PIECE_BYTES, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            pending.sent += len(piece)
            yield WebRequestBody(first.number, piece, pending.sent < len(body))

    def _tell(self, number: int, frames: Iterator[Struct]) -> None:
        """Send frames about a request, in its turn, and as fast as the host takes them."""
        self._outbox.add(number, frames)
        if not self._is_sending and self._process is not None:
            self._is_sending = True
            self._process.send_paced(self._wires())

    def _wires(self) -> Iterator[bytearray]:
        while self._outbox:
            yield self._outbox.take(PIECE_BYTES)
        self._is_sending = False

    def _on_client_left(self, number: int, code: int) -> None:
        """The rest of its body is of no use any more. Messages that it sent are, as far as there is room for them."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        if number not in self._charges:
            self._outbox.drop(number)
            _release(pending.charge)
            return
        if pending.charge is not None and pending.socket is not None:
            try:
                pending.charge.grow(pending.unread.size)
            except LaminaError:
                self._outbox.drop(number)
        else:
            self._outbox.drop(number)
            if pending.charge is not None:
                pending.charge.set(pending.sent)
        self._tell(number, iter((WebClientLeft(number, code),)))

    def _of(self, number: int) -> MessageSocket:
        socket = self._pending[number].socket
        if socket is None:
            raise FrameError(f"{number} is no WebSocket")
        return socket

    # -------------------------------------------------------------------------- frames

    def _on_frame(self, frame: Any) -> None:
        number = getattr(frame, "number", 0)
        if isinstance(frame, WebEnded):
            self._outbox.drop(number)
            _release(self._charges.pop(number, None))
        pending = self._pending.get(number)
        if number and pending is None:
            return  # its client has left
        try:
            self._handlers[type(frame)](frame)
        except LaminaError as error:  # a response that cannot be sent: the application's fault, and of this request alone
            if pending is not None:
                self._on_client_left(number, 1011)
                pending.fail(500, error.message)

    def _on_ready(self, ready: WebHostReady) -> None:
        if not self._ready.done():
            self._ready.set_result(ready)
        elif ready.error:
            log.error("web app: %s", ready.error)
        else:
            self._respawn_s = RESPAWN_S

    def _on_body(self, body: WebBody) -> None:
        pending = self._pending[body.number] if body.more else self._pending.pop(body.number)
        pending.on_body(body)
        if body.more:
            self._acknowledge(body.number, pending, body.data)

    def _acknowledge(self, number: int, pending: PendingWebRequest, data: bytes) -> None:
        """Note a piece of a response; the host may send on for it when the client has taken enough."""
        if pending.watch is None:
            pending.watch = DrainWatch(
                *(pending.exchange, UNSENT_BYTES, lambda size: self._tell(number, iter((WebDrained(number, size),)))),
                is_over=lambda: self._pending.get(number) is not pending,
            )
        pending.watch.note(data)

    def _on_ended(self, frame: WebEnded) -> None:
        if not frame.is_complete:
            self._pending.pop(frame.number).fail(500, "the web app failed")

    def _on_accept(self, frame: WebAccept) -> None:
        number, pending, socket = frame.number, self._pending[frame.number], self._of(frame.number)
        pending.has_accepted = True
        socket.accept(
            lambda message: self._on_message(number, message),
            lambda code, reason: self._on_client_left(number, code),
            *(frame.protocol, "", header_lines(frame.headers)),
        )

    def _on_message(self, number: int, message: str | bytes) -> None:
        self._pending[number].unread.add(len(message))
        self._tell(number, iter((SocketMessage.of(number, message),)))

    def _on_taken(self, frame: SocketTaken) -> None:
        self._pending[frame.number].unread.take(frame.count)
        self._of(frame.number).taken(frame.count)

    def _on_output(self, frame: SocketMessage) -> None:
        self._of(frame.number).send(frame.message)
        self._acknowledge(frame.number, self._pending[frame.number], frame.data)

    def _on_close(self, frame: SocketClose) -> None:
        pending = self._pending.pop(frame.number)
        if pending.socket is not None and pending.has_accepted:
            pending.socket.close(frame.code, frame.reason)
        else:
            respond_problem(pending.exchange, make_problem(403, "the web app refuses this WebSocket"))


def _release(charge: MemoryCharge | None) -> None:
    if charge is not None:
        charge.release()


def response_head(start: WebStart, has_cors: bool) -> tuple[int, bytes, bytes]:
    """Status, content type and header lines. `has_cors`: the gateway has answered for the origin, and a second answer is none."""
    kind, kept = b"application/octet-stream", []
    for name, value in start.headers:
        lower = name.lower()
        if lower == b"content-type":
            kind = value
        elif lower not in _OURS and not (has_cors and lower.startswith(b"access-control-")):
            kept.append((name, value))
    if not 200 <= start.status <= 599 or not _VALUE.fullmatch(kind):
        raise FrameError(f"a response with status {start.status}")
    return start.status, kind, header_lines(kept)


def header_lines(headers: HeaderList) -> bytes:
    """Whole header lines; raises `FrameError` for what would be more than a line."""
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise FrameError(f"web app: the header {name[:40]!r} cannot be sent")
    return b"".join(b"%s: %s\r\n" % (name, value) for name, value in headers)
