"""Streamed responses for asyncio, each on a connection of its own, so that a slow reader holds up no other call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httptools

from lamina.errors import Unreachable
from lamina.sdk.client_codec import ClientRequest, ClientResponse, ServerAddress, connect_error, no_response, timed_out
from lamina.sdk.stream_codec import CONTENT_TYPE, StreamDecoder

READ_BYTES = 2**16


class AsyncStreamedResponse:
    """One streamed exchange. `timeout` is how long to wait for the next bytes of the server."""

    def __init__(self, server: ServerAddress, timeout: str, timeout_s: float) -> None:
        self._server = server
        self._timeout = timeout
        self._timeout_s = timeout_s
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._has_head = self._has_ended = False
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, request: ClientRequest) -> ClientResponse:
        """The response, with its body if it is not streamed."""
        server = self._server
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await asyncio.open_connection(server.host, server.port, ssl=True if server.tls else None)
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        except OSError as error:
            raise connect_error(server, error) from None
        self._reader, self._writer = found
        self._writer.writelines(request.as_http())
        while not self._has_head:
            await self._read()
        while not self._has_ended and not self.is_streamed:
            await self._read()
        body = b"" if self.is_streamed else b"".join(self._body)
        self._response = ClientResponse(self._parser.get_status_code(), self._headers, body)
        return self._response

    @property
    def is_streamed(self) -> bool:
        return self._headers.get("content-type") == CONTENT_TYPE

    async def items(self) -> AsyncIterator[Any]:
        pieces = StreamDecoder(self._response)
        while True:
            data, self._body = b"".join(self._body), []
            for piece in pieces.feed(data):
                yield piece
            if self._has_ended:
                break
            await self._read()
        pieces.check_end()

    async def close(self) -> None:
        """Close the connection; the server notices, and closes a function that still yields."""
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    async def _read(self) -> None:
        with self._translated_errors():
            async with asyncio.timeout(self._timeout_s):
                data = await self._reader.read(READ_BYTES)
            if not data and not self._headers:
                raise no_response(self._server)
            if not data and not self.is_streamed:
                raise ConnectionError("connection closed")
            self._has_ended = self._has_ended or not data
            self._parser.feed_data(data)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        except OSError as error:
            raise Unreachable(f"the answer of {self._server.url} broke off: {error}") from None
        except httptools.HttpParserError as error:
            raise Unreachable(f"the answer is not HTTP: {error}", hint="is the address that of a Lamina server?") from None

    # ------------------------------------------------------------- llhttp's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200  # 100 Continue and its kin announce the answer

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        self._has_ended = self._has_head
