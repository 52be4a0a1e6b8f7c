"""Connection pool for asyncio: connections to one server, one exchange at a time on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httptools

from lamina.errors import Unreachable
from lamina.sdk.async_stream import AsyncStreamedResponse
from lamina.sdk.client_codec import ClientRequest, ClientResponse, ServerAddress, connect_error, no_response, timed_out
from lamina.units import parse_us


class AsyncConnectionPool:
    """Pool of at most `most` connections; `timeout` is for a whole exchange."""

    def __init__(self, server: ServerAddress, timeout: str, most: int) -> None:
        self._server = server
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self._slots = asyncio.Semaphore(most)
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()
            await connection.closed.wait()

    async def send(self, request: ClientRequest) -> ClientResponse:
        """Send a request, as in `ConnectionPool`; a cancelled call closes its connection, so that the server drops it too."""
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                kept = self._idle.pop() if self._idle else None
                response = await self._exchange(kept, request) if kept is not None else None
                if response is None:
                    response = await self._exchange(await self._connect(), request)
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        if response is None:
            raise no_response(self._server)
        return response

    @asynccontextmanager
    async def stream(self, request: ClientRequest) -> AsyncIterator[tuple[ClientResponse, AsyncIterator[Any] | None]]:
        """A streamed response, as in `ConnectionPool`."""
        async with self._slots:
            stream = AsyncStreamedResponse(self._server, self._timeout, self._timeout_s)
            try:
                response = await stream.open(request)
                yield response, stream.items() if stream.is_streamed else None
            finally:
                await stream.close()

    async def _exchange(self, connection: _Connection, request: ClientRequest) -> ClientResponse | None:
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
        server = self._server
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), server.host, server.port, ssl=True if server.tls else None
            )
        except OSError as error:
            raise connect_error(server, error) from None
        return connection

    def on_connected(self, connection: _Connection) -> None:
        self._open.add(connection)

    def on_closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one exchange at a time. Data that comes while nothing was asked closes it."""

    def __init__(self, pool: AsyncConnectionPool) -> None:
        self.closed = asyncio.Event()
        self.keep = True
        self._pool = pool
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[ClientResponse | None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._has_begun = False
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    async def exchange(self, request: ClientRequest) -> ClientResponse | None:
        """None: the connection dropped before a byte of an answer."""
        if self._transport is None or self._transport.is_closing():
            return None
        self._reset()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.writelines(request.as_http())
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
        self._pool.on_connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.on_closed(self)
        self.closed.set()
        if self._has_begun:
            self._settle(Unreachable(f"the answer broke off: {exc or 'connection closed'}"))
        else:
            self._settle(None)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._settle(Unreachable(f"the answer is not HTTP: {error}", hint="is the address that of a Lamina server?"))
            self.close()

    def _settle(self, result: ClientResponse | Unreachable | None) -> None:
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
        self._settle(ClientResponse(status, self._headers, b"".join(self._body)))
