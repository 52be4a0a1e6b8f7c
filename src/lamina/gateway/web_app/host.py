"""Host of web apps: `python -m lamina.gateway.web_app.host SETUP` runs the ASGI applications that an app mounts.

One task for each request, on one event loop. What an application sends waits until the client has taken what was sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from lamina.errors import LaminaError
from lamina.gateway.observability import logs
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
    gateway_reader,
)
from lamina.ipc.framing import FrameError, SocketClose, SocketMessage, SocketTaken, StopProcess, pack
from lamina.sdk.app_loader import load_app
from lamina.server.drain_watch import piece_cost
from lamina.server.http_server import event_loop_factory

log = logging.getLogger("lamina")

WINDOW_BYTES = 512 * 2**10
"""Of a response, on its way to a client that has not taken it, as `piece_cost` counts: with more, `send` waits."""

STARTUP_S, SHUTDOWN_S = 60.0, 10.0

Message = MutableMapping[str, Any]
Send = Callable[[msgspec.Struct], None]


class Disconnected(OSError):
    """The client has left: what an application sends has no receiver."""


class RunningScope:
    """A request or WebSocket that an application is busy with: its `receive` and `send`."""

    def __init__(self, request: WebRequest, tell: Send) -> None:
        self._request = request
        self._tell = tell
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._unsent = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._has_left = self._has_started = self.is_complete = False
        if request.is_socket:
            self._incoming.put_nowait({"type": "websocket.connect"})
        else:
            self.on_body(request.body, request.more)

    async def receive(self) -> Message:
        message = await self._incoming.get()
        if message["type"] == "websocket.receive":
            self._tell(SocketTaken(self._request.number, 1))
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self._has_left:
            raise Disconnected("the client has left")
        number = self._request.number
        if kind == "http.response.start":
            self._has_started = True
            self._tell(WebStart(number, message["status"], header_list(message)))
        elif kind == "http.response.body" and self._has_started:
            await self._send_body(bytes(message.get("body", b"")), message.get("more_body", False))
        elif kind == "websocket.accept":
            self._has_started = True
            self._tell(WebAccept(number, message.get("subprotocol") or "", header_list(message)))
        elif kind == "websocket.send" and self._has_started:
            text = message.get("text")
            sent = SocketMessage.of(number, text if text is not None else bytes(message["bytes"]))
            self._tell(sent)
            await self._count(piece_cost(sent.data))
        elif kind == "websocket.close":
            self.is_complete = True
            self._tell(SocketClose(number, message.get("code", 1000), message.get("reason") or ""))
        else:
            raise RuntimeError(f"{kind} is out of turn")

    async def _send_body(self, body: bytes, more: bool) -> None:
        number = self._request.number
        for at in range(0, max(1, len(body)), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            is_last = at + PIECE_BYTES >= len(body)
            self._tell(WebBody(number, piece, more or not is_last))
            if is_last and not more:
                self.is_complete = True
            else:
                await self._count(piece_cost(piece))

    async def _count(self, size: int) -> None:
        self._unsent += size
        if self._unsent > WINDOW_BYTES:
            self._writable.clear()
            await self._writable.wait()
            if self._has_left:
                raise Disconnected("the client has left")

    def on_drained(self, size: int) -> None:
        self._unsent -= size
        if self._unsent <= WINDOW_BYTES:
            self._writable.set()

    def on_body(self, data: bytes, more: bool) -> None:
        if not self._has_left:
            self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def on_input(self, message: SocketMessage) -> None:
        self._incoming.put_nowait({"type": "websocket.receive", "text" if message.is_text else "bytes": message.message})

    def on_client_left(self, code: int) -> None:
        self._has_left = True
        self._writable.set()
        is_socket = self._request.is_socket
        while not is_socket and not self._incoming.empty():  # the rest of a body that will not be whole, or not be answered
            self._incoming.get_nowait()
        self._incoming.put_nowait(
            {"type": "websocket.disconnect", "code": code, "reason": ""} if is_socket else {"type": "http.disconnect"}
        )

    def as_scope(self, state: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        host, _, port = request.client.rpartition(":")
        scope: dict[str, Any] = {
            "type": "websocket" if request.is_socket else "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws" if request.is_socket else "http",
            "path": unquote_to_bytes(request.path).decode(errors="replace"),
            "raw_path": request.path,
            "query_string": request.query,
            "root_path": request.mount.rstrip("/"),
            "headers": request.headers,
            "client": (host, int(port)) if port.isdigit() else None,
            "server": None,
            "state": state.copy(),
        }
        return scope | ({"subprotocols": list(request.protocols)} if request.is_socket else {"method": request.method})


def header_list(message: Message) -> HeaderList:
    return [(bytes(name), bytes(value)) for name, value in message.get("headers") or ()]


class Lifespan:
    """Lifespan of one application: its startup, and its shutdown. Many have none, and say so by raising."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.state: dict[str, Any] = {}
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `RuntimeError` if the application says that it cannot start."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        self._task = asyncio.ensure_future(self._application(scope, self._incoming.get, self._answers.put))
        answer = await self._say("startup", STARTUP_S)
        if answer is None:
            self._task = None  # it has none
        elif answer["type"] == "lifespan.startup.failed":
            raise RuntimeError(answer.get("message") or "its startup failed")

    async def stop(self) -> None:
        if self._task is not None:
            await self._say("shutdown", SHUTDOWN_S)

    async def _say(self, what: str, limit_s: float) -> Message | None:
        assert self._task is not None
        self._incoming.put_nowait({"type": f"lifespan.{what}"})
        answering = asyncio.ensure_future(self._answers.get())
        await asyncio.wait([answering, self._task], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        answering.cancel()
        if not self._task.done():
            raise RuntimeError(f"its {what} took longer than {limit_s:g} s")
        if self._task.exception() is None and what == "startup":
            return None
        return None


class WebHost(asyncio.Protocol):
    """The socket to the gateway, and the tasks of requests."""

    def __init__(self, mounts: dict[str, Any]) -> None:
        self._mounts = mounts
        self._lifespans = {path: Lifespan(application) for path, application in mounts.items()}
        self._frames = gateway_reader()
        self._scopes: dict[int, RunningScope] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: Any = None
        self.stopped = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.stopped.set()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except FrameError:
            self.stopped.set()

    def _on_frame(self, frame: Any) -> None:
        if isinstance(frame, WebRequest):
            scope = self._scopes[frame.number] = RunningScope(frame, self.tell)  # at once: its next frame may be in the same read
            task = asyncio.ensure_future(self._run(frame, scope))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(frame, StopProcess):
            self.stopped.set()
        elif (known := self._scopes.get(frame.number)) is not None:
            if isinstance(frame, WebRequestBody):
                known.on_body(frame.data, frame.more)
            elif isinstance(frame, SocketMessage):
                known.on_input(frame)
            elif isinstance(frame, WebDrained):
                known.on_drained(frame.size)
            elif isinstance(frame, WebClientLeft):
                known.on_client_left(frame.code)

    async def _run(self, request: WebRequest, scope: RunningScope) -> None:
        try:
            await self._mounts[request.mount](scope.as_scope(self._lifespans[request.mount].state), scope.receive, scope.send)
        except Disconnected:
            pass
        except Exception:
            log.exception("the web app at %s failed for %s", request.mount, request.path[:200].decode("latin-1"))
        finally:
            del self._scopes[request.number]
            self.tell(WebEnded(request.number, scope.is_complete))

    def tell(self, frame: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(frame))

    async def start(self) -> None:
        for path, lifespan in self._lifespans.items():
            try:
                await lifespan.start()
            except Exception as error:
                raise RuntimeError(f"the web app at {path} did not start: {error}") from error

    async def stop(self) -> None:
        """Let requests end for a while, then shut the applications down."""
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=1.0)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        for lifespan in self._lifespans.values():
            with contextlib.suppress(Exception):
                await lifespan.stop()


async def _serve(setup: WebHostSetup) -> None:
    sock = socket.socket(fileno=setup.fd)
    sock.setblocking(False)
    try:
        host = WebHost(dict(load_app(setup.source).mounts))
        error = ""
    except LaminaError as failed:
        host, error = WebHost({}), failed.message
    await asyncio.get_running_loop().create_unix_connection(lambda: host, sock=sock)
    if not error:
        try:
            await host.start()
        except RuntimeError as failed_start:
            error = str(failed_start)
    host.tell(WebHostReady(error))
    await host.stopped.wait()
    await host.stop()


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=WebHostSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if setup.log_format:
        logs.configure(setup.log_format, calls=False)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(setup))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
