"""Spawned calls: requests that run in another thread, to be awaited, polled or cancelled."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from lamina.errors import Cancelled
from lamina.units import parse_us


class CancelToken:
    """Cancellation token: the connection a request is on, so that another thread can shut it; the server drops a call whose
    client is gone."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def attach(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self.is_cancelled:
                raise Cancelled("cancelled by its caller")
            self._connection = connection

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)


class SpawnedCall:
    """A spawned call, made by `.spawn(...)`."""

    def __init__(self, pool: Executor, send: Callable[[CancelToken], Any]) -> None:
        self._token = CancelToken()
        self._cancelled = False
        self._future: Future[Any] = pool.submit(send, self._token)

    def __repr__(self) -> str:
        return f"<call, {'done' if self.done() else 'under way'}>"

    def get(self, timeout: str | None = None) -> Any:
        """The result, or the error it ended with. `TimeoutError` if it takes longer than `timeout`, such as "5s"."""
        if self._cancelled:
            raise Cancelled("cancelled by its caller")
        timeout_s = None if timeout is None else parse_us(timeout, "timeout") / 1e6
        try:
            error = self._future.exception(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"not done within {timeout}") from None
        if error is not None:
            raise error.with_traceback(None)
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel it, running or not; False if it was done already. `get` raises `Cancelled` from now on."""
        if self._future.done() and not self._cancelled:
            return False
        self._cancelled = True
        self._future.cancel()
        self._token.cancel()
        return True
