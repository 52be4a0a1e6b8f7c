"""Lamina as an ASGI application: `lamina.asgi(app)` under uvicorn or in another web app, with the routes of `lamina serve`.

The gateway runs on the loop of that server, without a port of its own: it starts and stops with the lifespan. Functions run in
worker processes as they always do. What our own listener does is done here: limits of bodies, the memory budget, and the check of
hosts and origins; what comes before that (slow clients, floods of connections) is the other server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lamina import policies
from lamina.access.access_control import AccessControl
from lamina.bootstrap import ServingRuntime, open_in_process, open_local
from lamina.errors import BadValue, LaminaError
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_server import open_access
from lamina.gateway.routes.problems import error_problem, make_problem, respond_problem
from lamina.gateway.routes.request_options import OWN_HEADERS
from lamina.plugins import DEFAULT_POLICY
from lamina.sdk.app import App
from lamina.sdk.app_loader import source_of
from lamina.server.compression import BodyTooLarge
from lamina.server.exchange import PAGE_POLICY, DetachedExchange, Exchange, HttpRequest
from lamina.server.http_server import HttpServer
from lamina.server.memory_budget import CONNECTION_BYTES, MemoryBudget, MemoryCharge, address_key
from lamina.server.origins import OriginPolicy, parse_origins
from lamina.server.request_parser import SINGLE_HEADERS
from lamina.server.websocket import MessageSocket, OnSocketClose, OnSocketMessage, UnreadWindow, offered_protocols
from lamina.store.open import open_store

Scope = MutableMapping[str, Any]
AsgiEvent = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiEvent]]
SendEvent = Callable[[AsgiEvent], Awaitable[None]]

GRACE_S = 5.0
_ABORT: AsgiEvent = {"type": "abort"}


class ClientCutOff(ConnectionError):
    """A response that cannot be completed: raised so that the server closes the connection, and the client knows."""


class AsgiExchange(DetachedExchange):
    """The response side of one request of another server: events, which a task sends as fast as the client takes them."""

    __slots__ = ("_address", "_client", "_events", "_limit_bytes", "_socket", "_unsent")

    def __init__(self, scope: Scope, limit_bytes: int) -> None:
        super().__init__(head_only=scope.get("method") == "HEAD")
        peer = scope.get("client")
        self._client = f"{peer[0]}:{peer[1]}" if peer else ""
        self._address = address_key(peer)
        self._events: asyncio.Queue[AsgiEvent | None] = asyncio.Queue()
        self._limit_bytes = limit_bytes
        self._unsent = 0
        self._socket: AsgiSocket | None = None

    @property
    def client(self) -> str:
        return self._client

    @property
    def address(self) -> str:
        return self._address

    @property
    def unsent_bytes(self) -> int:
        return self._unsent

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.response is not None:
            return
        self.response, self._on_disconnect = b"", None
        if self._socket is not None:  # a handshake that is refused
            self._put({"type": "websocket.close", "code": 1008, "reason": f"{status}"}, None)
            return
        if content_type[:9] == b"text/html" and not extra.startswith(b"content-security-policy"):
            extra += PAGE_POLICY
        headers = self._header_list(content_type, extra)
        if status != 204:  # RFC 9110 8.6
            headers = [(b"content-length", b"%d" % len(body)), *headers]
        shown = b"" if self.head_only else body
        self._put({"type": "http.response.start", "status": status, "headers": headers})
        self._put({"type": "http.response.body", "body": shown}, None)

    def start_stream(self, status: int, content_type: bytes, extra: bytes = b"", piece: bytes = b"") -> None:
        if self.response is not None:
            return
        self.response = b""
        self._put({"type": "http.response.start", "status": status, "headers": self._header_list(content_type, extra)})
        if self.head_only:
            self._put({"type": "http.response.body", "body": b""}, None)
        self.is_streaming = not self.head_only
        self.send_chunk(piece)

    def send_chunk(self, piece: bytes) -> None:
        if self.is_streaming and piece:
            self._put({"type": "http.response.body", "body": piece, "more_body": True})
            self.count(len(piece))

    def end_stream(self, piece: bytes = b"") -> None:
        self.send_chunk(piece)
        if self.is_streaming:
            self.is_streaming, self._on_disconnect = False, None
            self._put({"type": "http.response.body", "body": b""}, None)

    def abort(self) -> None:
        self.is_streaming, self._on_disconnect = False, None
        self._put(_ABORT)

    def open_socket(self, request: HttpRequest) -> MessageSocket:
        if self._socket is None:
            raise BadValue("this is a WebSocket", hint="open it with a WebSocket client: new WebSocket(url)")
        return self._socket

    def put_event(self, event: AsgiEvent, *others: AsgiEvent | None) -> None:
        self._put(event, *others)

    def expect_socket(self, socket: AsgiSocket) -> None:
        """The request asks for a WebSocket."""
        self._socket = socket

    def count(self, size: int) -> None:
        """Abort a client that does not take its stream: it is not buffered without bound."""
        self._unsent += size
        if self._unsent > self._limit_bytes:
            self._put(_ABORT)
            self.disconnect()

    async def send_events(self, send: SendEvent) -> None:
        """Send all events, up to the end of the response."""
        while (event := await self._events.get()) is not None:
            if event is _ABORT:
                raise ClientCutOff("the response was given up")
            await send(event)
            self._unsent -= len(event.get("body") or event.get("bytes") or event.get("text") or b"")

    def _put(self, *events: AsgiEvent | None) -> None:
        for event in events:
            self._events.put_nowait(event)

    def _header_list(self, content_type: bytes, extra: bytes) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", content_type), *header_pairs(self._headers + extra)]


def header_pairs(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Whole header lines as pairs."""
    found = []
    for line in lines.split(b"\r\n"):
        if line:
            name, _, value = line.partition(b":")
            found.append((name.strip().lower(), value.strip()))
    return found


class AsgiSocket(MessageSocket):
    """A WebSocket of another server."""

    def __init__(self, scope: Scope, exchange: AsgiExchange, messages: int, size: int) -> None:
        super().__init__(tuple(scope.get("subprotocols") or ()))
        self._exchange = exchange
        self._window = UnreadWindow(messages, size)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.is_open = False
        exchange.when_disconnected(lambda: self.leave(1006, ""))

    def accept(
        self, on_message: OnSocketMessage, on_close: OnSocketClose, protocol: str = "", tenant: str = "", headers: bytes = b""
    ) -> None:
        super().accept(on_message, on_close)
        self.is_open = True
        given = {"subprotocol": protocol or None, "headers": header_pairs(headers)}
        self._exchange.put_event({"type": "websocket.accept", **given})

    def send(self, message: str | bytes) -> None:
        if self.is_open:
            kind = "text" if isinstance(message, str) else "bytes"
            self._exchange.put_event({"type": "websocket.send", kind: message})
            self._exchange.count(len(message))

    def close(self, code: int = 1000, reason: str = "") -> None:
        if self.is_open:
            self.is_open = False
            self._has_room.set()
            self._exchange.put_event({"type": "websocket.close", "code": code, "reason": reason}, None)

    def taken(self, count: int) -> None:
        self._window.take(count)
        if not self._window.is_full:
            self._has_room.set()

    async def read(self, receive: Receive, most_bytes: int) -> None:
        """Pass messages on, and no more of them than are taken."""
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                was_open, self.is_open = self.is_open, False
                if was_open:
                    self.leave(event.get("code") or 1006, event.get("reason") or "")
                return
            if event["type"] != "websocket.receive" or not self.is_open:
                continue
            text = event.get("text")
            message: str | bytes = text if text is not None else bytes(event.get("bytes") or b"")
            if len(message) > most_bytes:
                self.close(1009, f"message: larger than {most_bytes} bytes")
                self.leave(1009, "")
                return
            self._window.add(len(message))
            self.receive(message)
            if self._window.is_full:
                self._has_room.clear()
                await self._has_room.wait()


class AsgiServer:
    """The ASGI application of an app. Without a lifespan protocol, `async with server.lifespan()` starts and stops it."""

    def __init__(
        self,
        app: App,
        *,
        policy: str | None = None,
        token: str = "",
        cors_origins: Sequence[str] = (),
        allow_hosts: Sequence[str] = (),
        store: str = "",
        in_process: bool | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._app = app
        self._policy = policy or DEFAULT_POLICY
        self._token = token
        origins = parse_origins(("*",) if token else allow_hosts, cors_origins)
        self._listen = ListenConfig(host="0.0.0.0" if token else "127.0.0.1", is_embedded=True, origins=origins)
        self._origins = OriginPolicy(self._listen.host, origins)
        self._store = store
        self._source = app.source or source_of(app)
        self._in_process = not self._source if in_process is None else in_process
        self._environment = dict(environment or {})
        self._gateway: Gateway | None = None
        self._calls: HttpServer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        if self._gateway is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lamina-asgi-")  # of this user alone
            try:
                await self._open(self._folder.name)
            except BaseException:
                await self.stop()
                raise

    async def _open(self, folder: str) -> None:
        socket = str(Path(folder) / "calls.sock")
        store = open_store(self._store) if self._store else None
        access = await self._access(folder)
        self._gateway = await open_gateway(self._runtime(f"unix://{socket}"), self._listen, store=store, access=access)
        self._calls = self._gateway.private_server()
        await self._calls.start_unix(socket)
        self._app.connect(f"unix://{socket}", asyncio.get_running_loop())

    async def _access(self, folder: str) -> AccessControl | None:
        if not self._token:
            return None
        return await open_access(open_store(self._store or str(Path(folder) / "none.db")), self._token)

    def _runtime(self, url: str) -> ServingRuntime:
        policy = policies.build(self._policy)
        if self._in_process:
            return open_in_process(self._app, policy=policy)
        environment = {"LAMINA_URL": url, "LAMINA_TOKEN": "", **self._environment}
        return open_local(self._source, app=self._app, policy=policy, probe=True, gpu="auto", environment=environment)

    async def stop(self) -> None:
        gateway, self._gateway = self._gateway, None
        calls, self._calls = self._calls, None
        if gateway is not None:
            await gateway.stop(GRACE_S)
        if calls is not None:
            self._app.connect("")
            await calls.stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _web: Any = None) -> AsyncIterator[None]:
        """Started and stopped around a block; also as the `lifespan=` of a FastAPI that mounts this."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    @property
    def gateway(self) -> Gateway:
        if self._gateway is None:
            hint = "run it with its lifespan: uvicorn --lifespan on, or FastAPI(lifespan=server.lifespan) where it is mounted"
            raise BadValue("lamina.asgi: it was not started", hint=hint)
        return self._gateway

    async def __call__(self, scope: Scope, receive: Receive, send: SendEvent) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] in ("http", "websocket"):
            await self._handle(scope, receive, send)
        else:
            raise BadValue(f"scope: {scope['type']!r} is not served", hint="http, websocket and lifespan are")

    async def _run_lifespan(self, receive: Receive, send: SendEvent) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                try:
                    await self.start()
                except LaminaError as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _handle(self, scope: Scope, receive: Receive, send: SendEvent) -> None:
        gateway = self.gateway
        limits, is_socket = self._listen.limits, scope["type"] == "websocket"
        exchange = AsgiExchange(scope, limits.body_bytes)
        charge: MemoryCharge | None = None
        if is_socket:
            exchange.expect_socket(AsgiSocket(scope, exchange, limits.unread_messages, limits.unread_bytes))
        try:
            request = parse_scope(scope)
            refusal = self._origins.refusal(request.method, request.headers)
            if refusal is not None:
                raise_problem(exchange, 403, *refusal)
            elif b"origin" not in request.headers or not self._origins.answer(request, exchange):
                if not is_socket:
                    charge, body = await read_body(receive, gateway.budget, scope, limits.body_bytes)
                    request = HttpRequest(request.method, request.path, request.query, request.headers, body, True)
                gateway.router.handle(request, exchange)
        except LaminaError as error:
            respond_problem(exchange, error_problem(error))
        socket = exchange.open_socket(HttpRequest("GET", b"", b"", {}, b"", True)) if is_socket else None
        reading = asyncio.ensure_future(
            socket.read(receive, limits.message_bytes) if isinstance(socket, AsgiSocket) else wait_for_disconnect(receive)
        )
        sending = asyncio.ensure_future(exchange.send_events(send))
        try:
            await asyncio.wait([reading, sending], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and is_socket and exchange.response is None:
                await asyncio.wait([sending], timeout=0)  # what is on its way; its client has left
            if sending.done():
                sending.result()
        finally:
            for task in (reading, sending):
                task.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)
            exchange.disconnect()
            if charge is not None:
                charge.release()


def raise_problem(exchange: Exchange, status: int, detail: str, hint: str) -> None:
    respond_problem(exchange, make_problem(status, detail, hint=hint))


def parse_scope(scope: Scope) -> HttpRequest:
    """A request out of a scope, its path below the mount; raises `BadValue` for headers that must not be given twice."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers:
            if name in SINGLE_HEADERS:
                raise BadValue(f"{name.decode('latin-1')}: header given twice", hint="send it once")
            headers[name] += b", " + value
        else:
            headers[name] = value
        if name.startswith(OWN_HEADERS.prefix) and name not in OWN_HEADERS.names:
            what, hint = OWN_HEADERS.explain(name)
            raise BadValue(what, hint=hint)
    path: bytes = scope.get("raw_path") or quote(scope["path"], safe="/:@!$&'()*+,;=~-._").encode("ascii")
    path = path.partition(b"?")[0]
    root = quote(scope.get("root_path") or "", safe="/").encode("ascii").rstrip(b"/")
    if root and (path == root or path.startswith(root + b"/")):
        path = path[len(root) :] or b"/"
    if scope["type"] == "websocket":
        headers.setdefault(b"sec-websocket-protocol", ", ".join(scope.get("subprotocols") or ()).encode())
        if not offered_protocols(headers[b"sec-websocket-protocol"]):
            del headers[b"sec-websocket-protocol"]
    return HttpRequest(scope.get("method", "GET"), path, scope.get("query_string") or b"", headers, b"", True)


async def read_body(receive: Receive, budget: MemoryBudget, scope: Scope, most_bytes: int) -> tuple[MemoryCharge | None, bytes]:
    """The body of a request, charged to the memory budget; raises `LaminaError` if there is no room for it."""
    parts, size = [], 0
    charge: MemoryCharge | None = None
    try:
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ClientCutOff("the client has left in the middle of its request")
            parts.append(bytes(event.get("body") or b""))
            size += len(parts[-1])
            if size > most_bytes:
                raise BodyTooLarge(f"body larger than {most_bytes} bytes", hint="send less at a time")
            if charge is not None:
                charge.grow(size)
            elif size > CONNECTION_BYTES:
                charge = budget.charge("bodies", size, address_key(scope.get("client")))
            if not event.get("more_body"):
                return charge, b"".join(parts)
    except BaseException:
        if charge is not None:
            charge.release()
        raise


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def asgi(app: App, **options: Any) -> AsgiServer:
    """An ASGI application that serves an app: `web = lamina.asgi(app)`, then `uvicorn module:web`.

    `token`: what clients must send; without one, only requests for this machine's own names are answered, unless `allow_hosts`
    names others. `cors_origins`: pages that may call it. `store`: path of a store for durable runs. `policy`: as elsewhere.
    """
    return AsgiServer(app, **options)
