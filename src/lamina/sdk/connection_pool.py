"""Connection pool for threads: connections to one server, kept open between requests."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lamina.errors import Cancelled, Unreachable
from lamina.sdk.client_codec import ClientRequest, ClientResponse, ServerAddress, connect_error, no_response, timed_out
from lamina.sdk.spawned_call import CancelToken
from lamina.sdk.stream_codec import CONTENT_TYPE, StreamDecoder
from lamina.units import parse_us

MAX_IDLE = 64
READ_BYTES = 2**16


class ConnectionPool:
    """Pool of blocking connections. `timeout` is how long to wait for the next bytes of the server."""

    def __init__(self, server: ServerAddress, timeout: str) -> None:
        self._server = server
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)  # the client behind `.remote(...)` is never closed

    def close(self) -> None:
        """Close the idle connections. Others can still be opened."""
        with self._lock:
            _close_all(self._idle)

    def send(self, request: ClientRequest, line: CancelToken) -> ClientResponse:
        """Send a request. The server may have closed a pooled one: if it drops before the first byte, retry on a new one."""
        kept = self._take_idle()
        response = self._exchange(kept, request, line) if kept is not None else None
        if response is None:
            response = self._exchange(self._connect(), request, line)
        if response is None:
            raise no_response(self._server)
        return response

    @contextmanager
    def stream(self, request: ClientRequest) -> Iterator[tuple[ClientResponse, Iterator[Any] | None]]:
        """A response, and its items if it is streamed; then it has no body. On a connection of its own; leaving closes it,
        and the server notices."""
        connection = self._connect()
        try:
            with self._translated_errors(CancelToken()):
                connection.request(request.method, request.path, request.body or None, request.headers)
                answer = connection.getresponse()
                in_pieces = answer.headers.get_content_type() == CONTENT_TYPE
                response = _response(answer, b"" if in_pieces else answer.read())
            with answer:
                yield response, self._items(answer, response) if in_pieces else None
        finally:
            connection.close()

    def _items(self, answer: http.client.HTTPResponse, response: ClientResponse) -> Iterator[Any]:
        pieces, data = StreamDecoder(response), b"-"
        while data:
            with self._translated_errors(CancelToken()):
                data = answer.read1(READ_BYTES)
            yield from pieces.feed(data)
        pieces.check_end()

    def _exchange(
        self, connection: http.client.HTTPConnection, request: ClientRequest, line: CancelToken
    ) -> ClientResponse | None:
        """None: the connection dropped before a byte of an answer."""
        keep = False
        try:
            with self._translated_errors(line):
                line.attach(connection)
                try:
                    connection.request(request.method, request.path, request.body or None, request.headers)
                    if not self._server.tls and not connection.sock.recv(1, socket.MSG_PEEK):
                        raise ConnectionResetError
                except ConnectionError:
                    if line.is_cancelled:
                        raise
                    return None
                answer = connection.getresponse()
                response = _response(answer, answer.read())
                keep = not answer.will_close and not line.is_cancelled
                return response
        finally:
            if keep:
                self._give_back(connection)
            else:
                connection.close()

    @contextmanager
    def _translated_errors(self, line: CancelToken) -> Iterator[None]:
        """Translate errors of a connection into ours."""
        try:
            yield
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        except (OSError, http.client.HTTPException) as error:
            if line.is_cancelled:
                raise Cancelled("cancelled by its caller") from None
            raise Unreachable(f"the answer of {self._server.url} broke off: {error or type(error).__name__}") from None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._server.tls else http.client.HTTPConnection
        connection = kind(self._server.host, self._server.port, timeout=self._timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise connect_error(self._server, error) from None
        return connection

    def _take_idle(self) -> http.client.HTTPConnection | None:
        """An idle connection; one with something to read while nothing was asked has been closed, or is out of step."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                poller = select.poll()
                poller.register(connection.sock, select.POLLIN)
                if not poller.poll(0):
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _response(answer: http.client.HTTPResponse, body: bytes) -> ClientResponse:
    return ClientResponse(answer.status, {key.lower(): value for key, value in answer.getheaders()}, body)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()
