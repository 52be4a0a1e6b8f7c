"""The blocking client: one object, any number of threads, connections kept open between calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lamina.errors import LaminaError
from lamina.sdk import client_codec
from lamina.sdk.binding import NOTHING
from lamina.sdk.client_codec import CallResult, ClientRequest, ClientResponse
from lamina.sdk.client_protocol import ClientProtocol, Exchange, resume
from lamina.sdk.connection_pool import ConnectionPool
from lamina.sdk.resources import checked_int
from lamina.sdk.run_handles import RunHandle, RunStatus, longest_poll_ms, run_request, status_of
from lamina.sdk.spawned_call import CancelToken, SpawnedCall
from lamina.sdk.stream_codec import ACCEPT_STREAM

T = TypeVar("T")

MAX_SPAWNED = 64


class Client:
    """The blocking client: `Client("http://127.0.0.1:8700")`, or `Client()` for `LAMINA_URL` with the token in `LAMINA_TOKEN`.
    `timeout` is how long to wait for the next bytes of the server."""

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout: str = "60s") -> None:
        self.server = client_codec.server_at(url, token)
        self._connections = ConnectionPool(self.server, timeout)
        self.poll_ms = longest_poll_ms(timeout)
        self._protocol = ClientProtocol(self.server)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for spawned calls, then close the connections. The client can still be used: it opens new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._connections.close()

    # ------------------------------------------------------------------ calls

    def call(
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
        answer = self._answer(CancelToken(), name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    def call_detailed(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> CallResult:
        """As `call`, with latency, batch, slice and cost of the call."""
        answer = self._answer(CancelToken(), name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer

    def stream(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> Iterator[Any]:
        """What a function yields, item by item as it comes; of anything else the result is the only item. The request is sent
        when the first item is asked for. Closing the iterator cancels the call: the function is closed at its next `yield`."""
        talk = self._protocol.call(name, inputs, deadline, priority, cost_limit, kind, more=ACCEPT_STREAM)
        request = next(talk)
        while True:
            with self._connections.stream(request) as (response, pieces):
                answer = resume(talk, response)
                if isinstance(answer, LaminaError):
                    raise answer
                if not isinstance(answer, ClientRequest):
                    yield from pieces if pieces is not None else (answer.value,)
                    return
                request = answer

    def spawn(
        self, name: str, inputs: Mapping[str, Any] | None = None, *, deadline: str | None = None, kind: str = ""
    ) -> SpawnedCall:
        """As `call`, without waiting."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_SPAWNED, thread_name_prefix="lamina-call")
            return self._spawn(self._pool, name, inputs, deadline, kind)

    def start(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
        idempotency_key: str = "",
    ) -> RunHandle:
        """Start a durable run: it survives this process, and the server's. The same key starts the same run once."""
        id = self._drive(self._protocol.start(name, inputs, deadline, priority, cost_limit, kind, idempotency_key), CancelToken())
        if isinstance(id, LaminaError):
            raise id
        return RunHandle(self, id)

    def run(self, id: str) -> RunHandle:
        """The durable run of that id, started by any client."""
        return RunHandle(self, id)

    def runs(self, *, target: str = "", state: str = "") -> Iterator[RunStatus]:
        """All durable runs, the newest first, read page by page as they are asked for."""
        before = ""
        while True:
            query = {"target": target, "state": state, "before": before}
            page = self.ask(run_request(self.server, "", "", query=query))
            yield from map(status_of, page["runs"])
            before = page["next"] or ""
            if not before:
                return

    def map(
        self,
        name: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        max_concurrency: int = 16,
        return_errors: bool = False,
        kind: str = "",
    ) -> Iterator[Any]:
        """One call per entry, `max_concurrency` at once; results in order, read as they are asked for.

        The first error ends it, and the calls still under way are called off; with `return_errors` errors are results.
        """
        checked_int(max_concurrency, "max_concurrency", 1)
        return self._map(name, iter(inputs), max_concurrency, return_errors, kind)

    def _map(self, name: str, inputs: Iterator[Mapping[str, Any]], width: int, return_errors: bool, kind: str) -> Iterator[Any]:
        pool = ThreadPoolExecutor(width, thread_name_prefix="lamina-map")
        ahead: deque[SpawnedCall] = deque()
        try:
            for one in inputs:
                ahead.append(self._spawn(pool, name, one, None, kind))
                if len(ahead) > 2 * width:  # more than run at once: one slow call must not idle the others
                    yield _settled(ahead.popleft(), return_errors)
            while ahead:
                yield _settled(ahead.popleft(), return_errors)
        finally:
            for call in ahead:
                call.cancel()
            pool.shutdown()

    def _spawn(
        self, pool: ThreadPoolExecutor, name: str, inputs: Mapping[str, Any] | None, deadline: str | None, kind: str
    ) -> SpawnedCall:
        def send(line: CancelToken) -> Any:
            answer = self._answer(line, name, inputs, deadline, 0, 0.0, kind)
            if isinstance(answer, LaminaError):
                raise answer
            return answer.value

        return SpawnedCall(pool, send)

    def _answer(
        self,
        line: CancelToken,
        name: str,
        inputs: Mapping[str, Any] | None,
        deadline: str | None,
        priority: int,
        cost_limit: float,
        kind: str,
    ) -> CallResult | LaminaError:
        try:
            return self._drive(self._protocol.call(name, inputs, deadline, priority, cost_limit, kind), line)
        except LaminaError as error:
            return error.with_traceback(None)

    # ------------------------------------------------------------------ reads

    def functions(self) -> Any:
        """The list at /v1/functions."""
        return self._read("/v1/functions")

    def workflows(self) -> Any:
        return self._read("/v1/workflows")

    def status(self) -> Any:
        """Devices, functions and targets as they are now."""
        return self._read("/v1/status")

    def health(self) -> Any:
        return self._read("/healthz")

    def bind(self, name: str, body: Any = NOTHING) -> dict[str, Any]:
        """Named inputs for a JSON body, by asking the server which parameters `name` has."""
        named = self._drive(self._protocol.bind(name, body), CancelToken())
        if isinstance(named, LaminaError):
            raise named
        return named

    def _read(self, path: str) -> Any:
        return self.ask(client_codec.read_request(self.server, path))

    def ask(self, request: ClientRequest) -> Any:
        """Send a request and decode its response; an error is raised."""
        answer = client_codec.result_of(self.send(request))
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    def send(self, request: ClientRequest) -> ClientResponse:
        return self._connections.send(request, CancelToken())

    def _drive(self, talk: Exchange[T], line: CancelToken) -> T:
        """Drive an exchange to its end."""
        said: ClientRequest | T = next(talk)
        while isinstance(said, ClientRequest):
            said = resume(talk, self._connections.send(said, line))
        return said


def _settled(call: SpawnedCall, return_errors: bool) -> Any:
    try:
        return call.get()
    except LaminaError as error:
        if return_errors:
            return error
        raise
