"""The client for asyncio: calls share a pool of open connections, one call at a time on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import httptools

from lamina.errors import DeadlineExceeded, LaminaError, UnknownTarget, Unreachable
from lamina.sdk import wire
from lamina.sdk.binding import NOTHING, Param, bind
from lamina.sdk.resources import whole
from lamina.sdk.runs import POLL_MS, AsyncRun, RunStatus, key_of, run_request, start_request, started, status_of
from lamina.sdk.wire import Answer, Request, Response
from lamina.units import parse_us


class AsyncClient:
    """`async with AsyncClient("http://127.0.0.1:8700") as client`. Belongs to the loop it is first used on."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, timeout: str = "60s", max_connections: int = 256
    ) -> None:
        self.server = wire.server_at(url, token)
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self.poll_ms = min(POLL_MS, round(500 * self._timeout_s))  #: longest time the server may keep us waiting for a result
        self._places = asyncio.Semaphore(whole(max_connections, "max_connections", 1))
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._kinds: dict[str, str] = {}  #: what a name turned out to be

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()
            await connection.closed.wait()

    # ------------------------------------------------------------------ calls

    async def call(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> Any:
        """The result of a function or workflow for named inputs. Without `kind`, either is looked for."""
        answer = await self._answer(name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    async def call_detailed(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> Answer:
        """As `call`, with latency, batch, slice and cost."""
        answer = await self._answer(name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer

    async def _answer(
        self,
        name: str,
        inputs: Mapping[str, Any] | None,
        deadline: str | None,
        priority: int,
        cost_limit: float,
        kind: str,
    ) -> Answer | LaminaError:
        """Errors are returned, and raised by the method the user called: the frames in between are nobody's business."""
        kind = kind or self._kinds.get(name, "")
        try:
            for guess in (kind,) if kind else wire.KINDS:
                request = wire.call_request(self.server, guess, name, inputs, deadline, priority, cost_limit)
                answer = wire.answer_of(await self.send(request))
                if not isinstance(answer, UnknownTarget):
                    self._kinds[name] = guess
                    return answer
        except LaminaError as error:
            return error.with_traceback(None)
        self._kinds.pop(name, None)
        return wire.unknown(self.server, name)

    async def start(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
        idempotency_key: str = "",
    ) -> AsyncRun:
        """A run that the server keeps: it survives this process, and that one. The same key starts the same run once."""
        kind, key = kind or self._kinds.get(name, ""), key_of(idempotency_key)
        for guess in (kind,) if kind else wire.KINDS:
            request = start_request(self.server, guess, name, inputs, deadline, priority, cost_limit, key)
            id = started(self.server, name, await self.send(request))
            if isinstance(id, LaminaError):
                raise id
            if id is not None:
                self._kinds[name] = guess
                return AsyncRun(self, id)
        self._kinds.pop(name, None)
        raise wire.unknown(self.server, name)

    def run(self, id: str) -> AsyncRun:
        """The run of that id, whoever started it."""
        return AsyncRun(self, id)

    async def runs(self, *, target: str = "", state: str = "") -> AsyncIterator[RunStatus]:
        """All of them, the newest first, read as they are asked for."""
        before = ""
        while True:
            page = await self.ask(run_request(self.server, "", "", query={"target": target, "state": state, "before": before}))
            for shown in page["runs"]:
                yield status_of(shown)
            before = page["next"] or ""
            if not before:
                return

    # ------------------------------------------------------------------ reads

    async def functions(self) -> Any:
        """What the server lists at /v1/functions."""
        return await self._read("/v1/functions")

    async def workflows(self) -> Any:
        return await self._read("/v1/workflows")

    async def health(self) -> Any:
        return await self._read("/healthz")

    async def bind(self, name: str, body: Any = NOTHING) -> dict[str, Any]:
        """Named inputs for a JSON body, by asking the server which parameters `name` has."""
        known = {about["name"]: about["inputs"] for about in [*await self.functions(), *await self.workflows()]}
        if name not in known:
            raise wire.unknown(self.server, name, list(known))
        return bind([Param(one["name"], one["required"]) for one in known[name]], body)

    async def _read(self, path: str) -> Any:
        return await self.ask(wire.read_request(self.server, path))

    async def ask(self, request: Request) -> Any:
        """What the server says to it; an error is raised."""
        answer = wire.answer_of(await self.send(request))
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    # ------------------------------------------------------------ connections

    async def send(self, request: Request) -> Response:
        """As in `Client._send`; a call that is cancelled closes its connection, so that the server drops it too."""
        try:
            async with self._places, asyncio.timeout(self._timeout_s):
                kept = self._idle.pop() if self._idle else None
                response = await self._exchange(kept, request) if kept is not None else None
                if response is None:
                    response = await self._exchange(await self._connect(), request)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer from {self.server.url} within {self._timeout}", hint="give the client a longer timeout="
            ) from None
        if response is None:
            raise Unreachable(f"{self.server.url} closed the connection without an answer", hint="see the server's log")
        return response

    async def _exchange(self, connection: _Connection, request: Request) -> Response | None:
        try:
            response = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        if response is not None and connection.keep:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        server = self.server
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), server.host, server.port, ssl=True if server.tls else None
            )
        except OSError as error:
            raise Unreachable(f"no server at {server.url}: {error}", hint="start it with: lamina serve app.py") from None
        return connection

    def arrived(self, connection: _Connection) -> None:
        self._open.add(connection)

    def gone(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One exchange at a time. Whatever comes while nothing was asked closes it."""

    def __init__(self, client: AsyncClient) -> None:
        self.closed = asyncio.Event()
        self.keep = True
        self._client = client
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Response | None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._begun = False
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    async def exchange(self, request: Request) -> Response | None:
        """None: the connection dropped before a byte of an answer."""
        if self._transport is None or self._transport.is_closing():
            return None
        self._reset()
        self._waiter = asyncio.get_running_loop().create_future()
        lines = [f"{request.method} {request.path} HTTP/1.1", *(f"{key}: {value}" for key, value in request.headers.items())]
        if request.method == "POST":
            lines.append(f"content-length: {len(request.body)}")
        self._transport.writelines(["\r\n".join([*lines, "", ""]).encode("latin-1"), request.body])
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._client.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.gone(self)
        self.closed.set()
        if self._begun:
            self._settle(Unreachable(f"the answer broke off: {exc or 'connection closed'}"))
        else:
            self._settle(None)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._settle(Unreachable(f"the answer is not HTTP: {error}", hint="is the address that of a Lamina server?"))
            self.close()

    def _settle(self, result: Response | Unreachable | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if isinstance(result, Unreachable):
            self._waiter.set_exception(result)
        else:
            self._waiter.set_result(result)

    # ------------------------------------------------------------- llhttp's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and its kin announce the answer
            self._headers, self._body = {}, []
            return
        self.keep = self._parser.should_keep_alive()
        self._settle(Response(status, self._headers, b"".join(self._body)))
