"""The asyncio client: calls share a pool of open connections, one call at a time on each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, Unpack, cast
from urllib.parse import quote

from lamina.errors import LaminaError, Unreachable
from lamina.sdk.binding import NOTHING
from lamina.sdk.client_codec import (
    FOLLOW_PAUSE_S,
    CallKeywords,
    CallResult,
    ClientRequest,
    ClientResponse,
    Inputs,
    LeaderRoute,
    ServerAddress,
    TriggerTerms,
    broken_off,
    call_options,
    connect_error,
    no_response,
    servers_at,
    timed_out,
)
from lamina.sdk.client_protocol import ClientProtocol, Exchange, ResponseReader, RunStatus, checked_run_id, resume, value_of
from lamina.sdk.resources import checked_int
from lamina.sdk.stream_codec import StreamDecoder
from lamina.units import parse_us

T = TypeVar("T")


class AsyncClient:
    """Asyncio client: `async with AsyncClient("http://127.0.0.1:8700") as client`. Belongs to the loop it is first used on. Takes
    several addresses as `Client` does."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, timeout: str = "60s", max_connections: int = 256
    ) -> None:
        servers = servers_at(url, token)
        self.server = servers[0]
        self._timeout = timeout
        self._most = checked_int(max_connections, "max_connections", 1)
        self._protocol = ClientProtocol(self.server, timeout)
        self._route = LeaderRoute(servers, timeout)
        self._pools: dict[ServerAddress, AsyncConnectionPool] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    # ------------------------------------------------------------------ calls

    async def call(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> Any:
        """The result of a function or workflow for inputs by name, or for the value of its only parameter. Options are those of
        `CallOptions`: `deadline`, `priority`, `cost_limit`, and `kind`, without which either is looked for."""
        result = await self._outcome(self._protocol.call(name, inputs, call_options(options)))
        if isinstance(result, LaminaError):
            raise result
        return result.value

    async def call_detailed(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> CallResult:
        """As `call`, with latency, batch, slice and cost of the call."""
        result = await self._outcome(self._protocol.call(name, inputs, call_options(options)))
        if isinstance(result, LaminaError):
            raise result
        return result

    async def stream(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> AsyncIterator[Any]:
        """What a function yields, item by item as it comes; of anything else the result is the only item. The request is sent
        when the first item is asked for. Closing the iterator cancels the call: the function is closed at its next `yield`."""
        exchange = self._protocol.call(name, inputs, call_options(options), stream=True)
        step = resume(exchange, None)
        while isinstance(step, ClientRequest):
            async with self._open_stream(step) as (response, items):
                step = resume(exchange, response)
                if isinstance(step, CallResult) and items is None:
                    yield step.value
                elif isinstance(step, CallResult) and items is not None:
                    async for item in items:
                        yield item
        if isinstance(step, LaminaError):
            raise step

    async def bind(self, name: str, body: Any = NOTHING) -> dict[str, Any]:
        """Named inputs for a JSON body, by asking the server which parameters `name` has."""
        return await self.drive(self._protocol.bind(name, body))

    # ------------------------------------------------------------------- runs

    async def start(
        self, name: str, inputs: Inputs = None, *, idempotency_key: str = "", **options: Unpack[CallKeywords]
    ) -> AsyncRunHandle:
        """Start a durable run: it survives this process, and the server's. The same key starts the same run once."""
        return self.run(await self.drive(self._protocol.start(name, inputs, call_options(options), idempotency_key)))

    def run(self, id: str) -> AsyncRunHandle:
        """The durable run of that id, started by any client."""
        return AsyncRunHandle(self, self._protocol, id)

    async def runs(self, *, target: str = "", state: str = "") -> AsyncIterator[RunStatus]:
        """All durable runs, the newest first, read page by page as they are asked for."""
        page = await self.drive(self._protocol.runs_page(target, state, ""))
        while True:
            for run in page.runs:
                yield run
            if not page.next:
                return
            page = await self.drive(self._protocol.runs_page(target, state, page.next))

    # ------------------------------------------------------------------ reads

    async def functions(self) -> Any:
        """The list at /v1/functions."""
        return await self.drive(self._protocol.read("/v1/functions"))

    async def workflows(self) -> Any:
        """The list at /v1/workflows."""
        return await self.drive(self._protocol.read("/v1/workflows"))

    async def kernels(self) -> Any:
        """The list at /v1/kernels: kernel graphs by content hash."""
        return await self.drive(self._protocol.read("/v1/kernels"))

    async def triggers(self) -> Any:
        """Triggers that start targets by themselves: those of apps, and those that were added."""
        return (await self.drive(self._protocol.read("/v1/triggers")))["triggers"]

    async def trigger(self, id: str) -> Any:
        """One trigger, with the messages that it has set aside."""
        return await self.drive(self._protocol.trigger("GET", id))

    async def add_trigger(self, id: str, target: str, **terms: Unpack[TriggerTerms]) -> Any:
        """Add a trigger to the server, or change the one of that id: `every`, `cron`, `on_change`, or `broker` with `topic` say
        when it starts its target. It needs the scope `deploy`, and is kept until it is removed."""
        return await self.drive(self._protocol.trigger("PUT", id, {"target": target, **terms}))

    async def remove_trigger(self, id: str) -> None:
        """Remove a trigger that was added; runs that it has started go on."""
        await self.drive(self._protocol.trigger("DELETE", id))

    async def buffers(self, prefix: str = "") -> Any:
        """Buffers of this tenant whose keys begin so: the list at /v1/buffers."""
        return await self.drive(self._protocol.read(f"/v1/buffers?prefix={quote(prefix, safe='')}"))

    async def put_buffer(self, key: str, array: Any) -> Any:
        """Keep an array under a key, for kernel graphs to read."""
        return await self.drive(self._protocol.buffer("PUT", key, array))

    async def get_buffer(self, key: str) -> Any:
        """The array under a key."""
        return await self.drive(self._protocol.buffer("GET", key))

    async def delete_buffer(self, key: str) -> None:
        await self.drive(self._protocol.buffer("DELETE", key))

    async def put_object(self, bucket: str, key: str, data: bytes) -> Any:
        """Keep bytes in a bucket of this tenant, under a key such as "photos/1.png"."""
        return await self.drive(self._protocol.object("PUT", bucket, key, data))

    async def get_object(self, bucket: str, key: str) -> bytes:
        found: bytes = await self.drive(self._protocol.object("GET", bucket, key))
        return found

    async def delete_object(self, bucket: str, key: str) -> None:
        await self.drive(self._protocol.object("DELETE", bucket, key))

    async def objects(self, bucket: str, prefix: str = "") -> Any:
        """Objects of a bucket whose keys begin so, with their sizes: the list at /v1/buckets/NAME."""
        path = f"/v1/buckets/{quote(bucket, safe='')}?prefix={quote(prefix, safe='')}"
        return (await self.drive(self._protocol.read(path)))["objects"]

    async def complete_task(self, token: str, value: Any = None) -> None:
        """Report the result of a step that waits (`lamina.callback`, `.waitForTaskToken`)."""
        await self.drive(self._protocol.report(token, "success", value))

    async def fail_task(self, token: str, error: str = "States.TaskFailed", cause: str = "") -> None:
        """Report the failure of a step that waits, with the name that `except` or `Catch` know it by."""
        await self.drive(self._protocol.report(token, "failure", {"error": error, "cause": cause}))

    async def heartbeat_task(self, token: str) -> None:
        """Report that a step that waits is being worked on."""
        await self.drive(self._protocol.report(token, "heartbeat", {}))

    async def health(self) -> Any:
        return await self.drive(self._protocol.read("/healthz"))

    async def ask(self, request: ClientRequest) -> Any:
        """Send a request and decode its response; an error is raised."""
        return await self.drive(value_of(request))

    async def send(self, request: ClientRequest) -> ClientResponse:
        return await self._send(request)

    async def drive(self, exchange: Exchange[T]) -> T:
        """The result of an exchange; an error is raised."""
        result = await self._outcome(exchange)
        if isinstance(result, LaminaError):
            raise result
        return result

    async def _outcome(self, exchange: Exchange[T]) -> T | LaminaError:
        try:
            step = resume(exchange, None)
            while isinstance(step, ClientRequest):
                step = resume(exchange, await self._send(step))
            return step
        except LaminaError as error:
            return error.with_traceback(None)

    async def _send(self, request: ClientRequest) -> ClientResponse:
        """Send a request to the server that leads, wherever that is by now."""
        attempt = self._route.begin(time.monotonic())
        while True:
            server = self._route.current
            try:
                response = await self._pool(server).send(self._route.adapt(request, server))
            except Unreachable as error:
                if not attempt.repeats_error(error, request, time.monotonic()):
                    raise
            else:
                if not attempt.repeats_response(response, request, time.monotonic()):
                    return response
            await asyncio.sleep(FOLLOW_PAUSE_S)

    @asynccontextmanager
    async def _open_stream(self, request: ClientRequest) -> AsyncIterator[tuple[ClientResponse, AsyncIterator[Any] | None]]:
        """A response and its items, from the server that leads; a stream that has begun is not begun again."""
        attempt = self._route.begin(time.monotonic())
        while True:
            server = self._route.current
            async with AsyncExitStack() as stack:
                try:
                    found = await stack.enter_async_context(self._pool(server).stream(self._route.adapt(request, server)))
                except Unreachable as error:
                    if not attempt.repeats_error(error, request, time.monotonic()):
                        raise
                else:
                    if found[1] is not None or not attempt.repeats_response(found[0], request, time.monotonic()):
                        yield found
                        return
            await asyncio.sleep(FOLLOW_PAUSE_S)

    def _pool(self, server: ServerAddress) -> AsyncConnectionPool:
        return self._pools.get(server) or self._pools.setdefault(server, AsyncConnectionPool(server, self._timeout, self._most))


class AsyncRunHandle:
    """Asyncio handle of a durable run."""

    def __init__(self, client: AsyncClient, protocol: ClientProtocol, id: str) -> None:
        self._client = client
        self._protocol = protocol
        self.id = checked_run_id(id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    async def status(self) -> RunStatus:
        return await self._client.drive(self._protocol.run_status(self.id))

    async def result(self, timeout: str | None = None) -> Any:
        """Wait for the result, or raise what the run failed with. `TimeoutError` after `timeout`, such as "5s"."""
        return await self._client.drive(self._protocol.run_result(self.id, timeout))

    async def history(self) -> list[dict[str, Any]]:
        """Events of the run so far; times are microseconds since 1970."""
        return await self._client.drive(self._protocol.run_history(self.id))

    async def cancel(self) -> RunStatus:
        return await self._client.drive(self._protocol.run_status(self.id, "cancel"))

    async def retry(self) -> RunStatus:
        """Resume a run that failed or was cancelled; steps that are done are not repeated."""
        return await self._client.drive(self._protocol.run_status(self.id, "retry"))


class AsyncConnectionPool:
    """Connections to one server for asyncio, at most `most` at a time; `timeout` is for a whole exchange."""

    def __init__(self, server: ServerAddress, timeout: str, most: int) -> None:
        self._server = server
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self._slots = asyncio.Semaphore(most)
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        for connection in list(self._open):
            await connection.close()

    async def send(self, request: ClientRequest) -> ClientResponse:
        """Send a request, as in `ConnectionPool`; a cancelled call closes its connection, so that the server drops it too."""
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                pooled = self._idle.pop() if self._idle else None
                response = await self._exchange(pooled, request) if pooled is not None else None
                if response is None:
                    response = await self._exchange(await self._connect(), request)
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        if response is None:
            raise no_response(self._server)
        return response

    @asynccontextmanager
    async def stream(self, request: ClientRequest) -> AsyncIterator[tuple[ClientResponse, AsyncIterator[Any] | None]]:
        """A streamed response, as in `ConnectionPool`: on a connection of its own, so that a slow reader holds up no other call.
        Here `timeout` is how long to wait for the next bytes."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    connection = await self._connect()
            except TimeoutError:
                raise timed_out(self._server, self._timeout) from None
            try:
                reader = connection.begin(request, paced=True)
                while not (reader.has_head and reader.is_streamed) and not reader.is_complete:
                    if not await self._more(connection) and not reader.is_complete:
                        raise broken_off(self._server, connection.error) if reader.has_begun else no_response(self._server)
                response = reader.response()
                yield response, self._items(connection, reader, response) if reader.is_streamed else None
            finally:
                await connection.close()

    async def _items(self, connection: _Connection, reader: ResponseReader, response: ClientResponse) -> AsyncIterator[Any]:
        decoder, has_ended = StreamDecoder(response), False
        while True:
            for item in decoder.feed(reader.take_body()):
                yield item
            if has_ended or reader.is_complete:
                break
            has_ended = not await self._more(connection)
        decoder.check_end()

    async def _more(self, connection: _Connection) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await connection.more()
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None

    async def _exchange(self, connection: _Connection, request: ClientRequest) -> ClientResponse | None:
        """None: the connection dropped before a byte of a response."""
        reader = None
        try:
            reader = connection.begin(request)
            while not reader.is_complete:
                if not await connection.more() and not reader.is_complete:
                    if reader.has_begun:
                        raise broken_off(self._server, connection.error)
                    return None
            return reader.response()
        finally:
            if reader is not None and reader.keep_alive and not connection.has_ended:
                connection.end_exchange()
                self._idle.append(connection)
            else:
                connection.abandon()

    async def _connect(self) -> _Connection:
        loop, server = asyncio.get_running_loop(), self._server
        try:
            if server.unix:
                _, connection = await loop.create_unix_connection(lambda: _Connection(server, self._on_closed), server.unix)
                self._open.add(connection)
                return connection
            _, connection = await loop.create_connection(
                lambda: _Connection(self._server, self._on_closed), server.host, server.port, ssl=True if server.tls else None
            )
        except OSError as error:
            raise connect_error(server, error) from None
        self._open.add(connection)
        return connection

    def _on_closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one exchange at a time. Data that comes while nothing was asked closes it."""

    def __init__(self, server: ServerAddress, on_closed: Callable[[_Connection], None]) -> None:
        self.closed = asyncio.Event()
        self.error: Exception | None = None  #: what ended it
        self._server = server
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._is_paced = False
        self._has_news = False
        self._failure: Unreachable | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def begin(self, request: ClientRequest, *, paced: bool = False) -> ResponseReader:
        """Send a request. `paced`: bytes are read from the socket only when they are waited for."""
        self._reader = ResponseReader(self._server)
        self._is_paced = paced
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(request.as_http())
        return self._reader

    async def more(self) -> bool:
        """Wait until the reader has got more. False: the connection has ended."""
        if not self._has_news and not self.closed.is_set():
            if self._is_paced and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._has_news = self._has_news, False
        if self._failure is not None:
            raise self._failure
        return news

    def end_exchange(self) -> None:
        self._reader = None

    def abandon(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def close(self) -> None:
        self.abandon()
        await self.closed.wait()

    # ----------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        if self._reader is not None:
            self._reader.feed(b"")
        self.closed.set()
        self._on_closed(self)
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.abandon()
            return
        try:
            self._reader.feed(data)
        except Unreachable as error:
            self._failure = error
            self.abandon()
        self._has_news = True
        if self._is_paced and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
