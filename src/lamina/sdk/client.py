"""A blocking client: one object, any number of threads, connections kept open between calls."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lamina.errors import Cancelled, DeadlineExceeded, LaminaError, UnknownTarget, Unreachable
from lamina.sdk import wire
from lamina.sdk.binding import NOTHING, Param, bind
from lamina.sdk.calls import Call, Line
from lamina.sdk.resources import whole
from lamina.sdk.runs import POLL_MS, Run, RunStatus, key_of, run_request, start_request, started, status_of
from lamina.sdk.wire import Answer, Request, Response
from lamina.units import parse_us

MAX_IDLE = 64
MAX_SPAWNED = 64


class Client:
    """`Client("http://127.0.0.1:8700")`, or `Client()`: at `LAMINA_URL`, with the token in `LAMINA_TOKEN`. `timeout` is how long
    to wait for the server's next word."""

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout: str = "60s") -> None:
        self.server = wire.server_at(url, token)
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self.poll_ms = min(POLL_MS, round(500 * self._timeout_s))  #: longest time the server may keep us waiting for a result
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close_all, self._idle)  # nobody closes the client behind `.remote(...)`
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._kinds: dict[str, str] = {}  #: what a name turned out to be

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for spawned calls, then closes the connections. The client can still be used: it opens new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        with self._lock:
            _close_all(self._idle)

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
        answer = self._answer(Line(), name, inputs, deadline, priority, cost_limit, kind)
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
    ) -> Answer:
        """As `call`, with latency, batch, slice and cost."""
        answer = self._answer(Line(), name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer

    def spawn(self, name: str, inputs: Mapping[str, Any] | None = None, *, deadline: str | None = None, kind: str = "") -> Call:
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
    ) -> Run:
        """A run that the server keeps: it survives this process, and that one. The same key starts the same run once."""
        kind, key = kind or self._kinds.get(name, ""), key_of(idempotency_key)
        for guess in (kind,) if kind else wire.KINDS:
            request = start_request(self.server, guess, name, inputs, deadline, priority, cost_limit, key)
            id = started(self.server, name, self.send(request))
            if isinstance(id, LaminaError):
                raise id
            if id is not None:
                self._kinds[name] = guess
                return Run(self, id)
        self._kinds.pop(name, None)
        raise wire.unknown(self.server, name)

    def run(self, id: str) -> Run:
        """The run of that id, whoever started it."""
        return Run(self, id)

    def runs(self, *, target: str = "", state: str = "") -> Iterator[RunStatus]:
        """All of them, the newest first, read as they are asked for."""
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
        whole(max_concurrency, "max_concurrency", 1)
        return self._map(name, iter(inputs), max_concurrency, return_errors, kind)

    def _map(self, name: str, inputs: Iterator[Mapping[str, Any]], width: int, return_errors: bool, kind: str) -> Iterator[Any]:
        pool = ThreadPoolExecutor(width, thread_name_prefix="lamina-map")
        ahead: deque[Call] = deque()
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
    ) -> Call:
        def send(line: Line) -> Any:
            answer = self._answer(line, name, inputs, deadline, 0, 0.0, kind)
            if isinstance(answer, LaminaError):
                raise answer
            return answer.value

        return Call(pool, send)

    def _answer(
        self,
        line: Line,
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
                answer = wire.answer_of(self._send(request, line))
                if not isinstance(answer, UnknownTarget):
                    self._kinds[name] = guess
                    return answer
        except LaminaError as error:
            return error.with_traceback(None)
        self._kinds.pop(name, None)
        return wire.unknown(self.server, name)

    # ------------------------------------------------------------------ reads

    def functions(self) -> Any:
        """What the server lists at /v1/functions."""
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
        known = {about["name"]: about["inputs"] for about in [*self.functions(), *self.workflows()]}
        if name not in known:
            raise wire.unknown(self.server, name, list(known))
        return bind([Param(one["name"], one["required"]) for one in known[name]], body)

    def _read(self, path: str) -> Any:
        return self.ask(wire.read_request(self.server, path))

    def ask(self, request: Request) -> Any:
        """What the server says to it; an error is raised."""
        answer = wire.answer_of(self.send(request))
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    # ------------------------------------------------------------ connections

    def send(self, request: Request) -> Response:
        return self._send(request, Line())

    def _send(self, request: Request, line: Line) -> Response:
        """A kept connection may have been closed by the server: if it drops before a byte of answer, once more on a new one."""
        kept = self._take()
        response = self._exchange(kept, request, line) if kept is not None else None
        if response is None:
            response = self._exchange(self._connect(), request, line)
        if response is None:
            raise Unreachable(f"{self.server.url} closed the connection without an answer", hint="see the server's log")
        return response

    def _exchange(self, connection: http.client.HTTPConnection, request: Request, line: Line) -> Response | None:
        """None: the connection dropped before a byte of an answer."""
        keep = False
        try:
            line.hold(connection)
            try:
                connection.request(request.method, request.path, request.body or None, request.headers)
                if not self.server.tls and not connection.sock.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
            except ConnectionError:
                if line.cut:
                    raise
                return None
            answer = connection.getresponse()
            body = answer.read()
            keep = not answer.will_close and not line.cut
            headers = {key.lower(): value for key, value in answer.getheaders()}
            return Response(answer.status, headers, body)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer from {self.server.url} within {self._timeout}", hint="give the client a longer timeout="
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if line.cut:
                raise Cancelled("cancelled by its caller") from None
            raise Unreachable(f"the answer of {self.server.url} broke off: {error or type(error).__name__}") from None
        finally:
            if keep:
                self._give_back(connection)
            else:
                connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.server.tls else http.client.HTTPConnection
        connection = kind(self.server.host, self.server.port, timeout=self._timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Unreachable(f"no server at {self.server.url}: {error}", hint="start it with: lamina serve app.py") from None
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        """A kept connection; one with something to read while nothing was asked has been closed, or is out of step."""
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


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _settled(call: Call, return_errors: bool) -> Any:
    try:
        return call.get()
    except LaminaError as error:
        if return_errors:
            return error
        raise
