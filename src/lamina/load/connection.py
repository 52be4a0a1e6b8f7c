"""Connection of the load generator, with at most one request in flight: a rejection must not queue behind a result."""

from __future__ import annotations

import socket
import ssl

CHUNKED_END = b"\r\n0\r\n\r\n"


class ConnectionLost(Exception):
    """The connection was closed by the server, or lost."""


class LoadConnection:
    """Non-blocking connection. A request that does not fit into the socket's buffer is sent on when there is room."""

    __slots__ = ("_buffer", "_unsent", "due_us", "socket")

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float = 5.0) -> None:
        plain = socket.create_connection((host, port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = tls.wrap_socket(plain, server_hostname=host) if tls else plain
        self.socket.setblocking(False)
        self.due_us = 0
        self._buffer = b""
        self._unsent = memoryview(b"")

    def send(self, request: bytes) -> bool:
        """Whether all of it has left; if not, `go_on` when the socket is writable."""
        self._unsent = memoryview(request)
        return self.send_more()

    def send_more(self) -> bool:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        except OSError:
            raise ConnectionLost from None
        return True

    def read_status(self) -> str:
        """Status of the answer that has come in whole; empty while it has not."""
        while True:
            try:
                data = self.socket.recv(262_144)
            except (BlockingIOError, ssl.SSLWantReadError):
                return ""
            except OSError:
                raise ConnectionLost from None
            if not data:
                raise ConnectionLost
            data = self._buffer + data if self._buffer else data
            if _is_complete(data):
                self._buffer = b""
                return data[9:12].decode("latin-1")
            self._buffer = data

    def close(self) -> None:
        self.socket.close()


def _is_complete(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = data[:end].lower()
    mark = head.find(b"\r\ncontent-length:")
    if mark >= 0:
        stop = head.find(b"\r", mark + 2)
        return len(data) >= end + 4 + int(head[mark + 17 : stop if stop > 0 else None])
    if b"\r\ntransfer-encoding:" in head:
        return data.endswith(CHUNKED_END)
    return True
