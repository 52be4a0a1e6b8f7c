"""The blocking client: one object, any number of threads, connections kept open between calls."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

from lamina.errors import Cancelled, LaminaError, Unreachable
from lamina.sdk.binding import NOTHING
from lamina.sdk.client_codec import (
    FOLLOW_PAUSE_S,
    CallKeywords,
    CallOptions,
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

MAX_SPAWNED = 64
MAX_IDLE = 64
READ_BYTES = 2**16


class Client:
    """The blocking client: `Client("http://127.0.0.1:8700")`, or `Client()` for `LAMINA_URL` with the token in `LAMINA_TOKEN`.
    `timeout` is how long to wait for the next bytes of the server. Several addresses, separated by commas, are those of a leader
    and its standbys; the client goes to the one that leads."""

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout: str = "60s") -> None:
        servers = servers_at(url, token)
        self.server = servers[0]
        self._timeout = timeout
        self._protocol = ClientProtocol(self.server, timeout)
        self._route = LeaderRoute(servers, timeout)
        self._pools: dict[ServerAddress, ConnectionPool] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for spawned calls, then close the connections. The client can still be used: it opens new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        for pool in list(self._pools.values()):
            pool.close()

    # ------------------------------------------------------------------ calls

    def call(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> Any:
        """The result of a function or workflow for inputs by name, or for the value of its only parameter. Options are those of
        `CallOptions`: `deadline`, `priority`, `cost_limit`, and `kind`, without which either is looked for."""
        result = self._call(name, inputs, call_options(options))
        if isinstance(result, LaminaError):
            raise result
        return result.value

    def call_detailed(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> CallResult:
        """As `call`, with latency, batch, slice and cost of the call."""
        result = self._call(name, inputs, call_options(options))
        if isinstance(result, LaminaError):
            raise result
        return result

    def stream(self, name: str, inputs: Inputs = None, **options: Unpack[CallKeywords]) -> Iterator[Any]:
        """What a function yields, item by item as it comes; of anything else the result is the only item. The request is sent
        when the first item is asked for. Closing the iterator cancels the call: the function is closed at its next `yield`."""
        exchange = self._protocol.call(name, inputs, call_options(options), stream=True)
        step = resume(exchange, None)
        while isinstance(step, ClientRequest):
            with self._open_stream(step) as (response, items):
                step = resume(exchange, response)
                if isinstance(step, CallResult):
                    yield from items if items is not None else (step.value,)
        if isinstance(step, LaminaError):
            raise step

    def spawn(self, name: str, inputs: Inputs = None, *, deadline: str | None = None, kind: str = "") -> SpawnedCall:
        """As `call`, without waiting."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_SPAWNED, thread_name_prefix="lamina-call")
            return self._spawn(self._threads, name, inputs, CallOptions(deadline, kind=kind))

    def map(
        self,
        name: str,
        inputs: Iterable[Inputs],
        *,
        max_concurrency: int = 16,
        return_errors: bool = False,
        kind: str = "",
    ) -> Iterator[Any]:
        """One call per entry, `max_concurrency` at once; results in order, read as they are asked for.

        The first error ends it, and the calls still under way are cancelled; with `return_errors` errors are results.
        """
        checked_int(max_concurrency, "max_concurrency", 1)
        return self._map(name, inputs, max_concurrency, return_errors, CallOptions(kind=kind))

    def bind(self, name: str, body: Any = NOTHING) -> dict[str, Any]:
        """Named inputs for a JSON body, by asking the server which parameters `name` has."""
        return self.drive(self._protocol.bind(name, body))

    def _call(self, name: str, inputs: Inputs, options: CallOptions) -> CallResult | LaminaError:
        return self._outcome(self._protocol.call(name, inputs, options), CancelToken())

    def _map(self, name: str, inputs: Iterable[Inputs], width: int, return_errors: bool, options: CallOptions) -> Iterator[Any]:
        threads = ThreadPoolExecutor(width, thread_name_prefix="lamina-map")
        ahead: deque[SpawnedCall] = deque()
        try:
            for one in inputs:
                ahead.append(self._spawn(threads, name, one, options))
                if len(ahead) > 2 * width:  # more than run at once: one slow call must not idle the others
                    yield _settled(ahead.popleft(), return_errors)
            while ahead:
                yield _settled(ahead.popleft(), return_errors)
        finally:
            for call in ahead:
                call.cancel()
            threads.shutdown()

    def _spawn(self, threads: Executor, name: str, inputs: Inputs, options: CallOptions) -> SpawnedCall:
        return SpawnedCall(threads, lambda token: self._outcome(self._protocol.call(name, inputs, options), token))

    # ------------------------------------------------------------------- runs

    def start(self, name: str, inputs: Inputs = None, *, idempotency_key: str = "", **options: Unpack[CallKeywords]) -> RunHandle:
        """Start a durable run: it survives this process, and the server's. The same key starts the same run once."""
        return self.run(self.drive(self._protocol.start(name, inputs, call_options(options), idempotency_key)))

    def run(self, id: str) -> RunHandle:
        """The durable run of that id, started by any client."""
        return RunHandle(self, self._protocol, id)

    def runs(self, *, target: str = "", state: str = "") -> Iterator[RunStatus]:
        """All durable runs, the newest first, read page by page as they are asked for."""
        found, before = self.drive(self._protocol.runs_page(target, state, ""))
        yield from found
        while before:
            found, before = self.drive(self._protocol.runs_page(target, state, before))
            yield from found

    # ------------------------------------------------------------------ reads

    def functions(self) -> Any:
        """The list at /v1/functions."""
        return self.drive(self._protocol.read("/v1/functions"))

    def workflows(self) -> Any:
        """The list at /v1/workflows."""
        return self.drive(self._protocol.read("/v1/workflows"))

    def status(self) -> Any:
        """Devices, functions and targets as they are now."""
        return self.drive(self._protocol.read("/v1/status"))

    def profiles(self) -> Any:
        """What the server has learnt: profiles of its functions, with specs, devices and rates."""
        return self.drive(self._protocol.read("/v1/profiles"))

    def explain(self, call_id: str) -> Any:
        """History of a call or run that the server still remembers: its batches, and which rule delayed or rejected it."""
        return self.drive(self._protocol.read(f"/v1/explain/{quote(call_id, safe='')}"))

    def kernels(self) -> Any:
        """The list at /v1/kernels: kernel graphs by content hash."""
        return self.drive(self._protocol.read("/v1/kernels"))

    def triggers(self) -> Any:
        """Triggers that start targets by themselves: those of apps, and those that were added."""
        return (self.drive(self._protocol.read("/v1/triggers")))["triggers"]

    def trigger(self, id: str) -> Any:
        """One trigger, with the messages that it has set aside."""
        return self.drive(self._protocol.trigger("GET", id))

    def add_trigger(self, id: str, target: str, **terms: Unpack[TriggerTerms]) -> Any:
        """Add a trigger to the server, or change the one of that id: `every`, `cron`, `on_change`, or `broker` with `topic` say
        when it starts its target. It needs the scope `deploy`, and is kept until it is removed."""
        return self.drive(self._protocol.trigger("PUT", id, {"target": target, **terms}))

    def remove_trigger(self, id: str) -> None:
        """Remove a trigger that was added; runs that it has started go on."""
        self.drive(self._protocol.trigger("DELETE", id))

    def buffers(self, prefix: str = "") -> Any:
        """Buffers of this tenant whose keys begin so: the list at /v1/buffers."""
        return self.drive(self._protocol.read(f"/v1/buffers?prefix={quote(prefix, safe='')}"))

    def put_buffer(self, key: str, array: Any) -> Any:
        """Keep an array under a key, for kernel graphs to read."""
        return self.drive(self._protocol.buffer("PUT", key, array))

    def get_buffer(self, key: str) -> Any:
        """The array under a key."""
        return self.drive(self._protocol.buffer("GET", key))

    def delete_buffer(self, key: str) -> None:
        self.drive(self._protocol.buffer("DELETE", key))

    def put_object(self, bucket: str, key: str, data: bytes) -> Any:
        """Keep bytes in a bucket of this tenant, under a key such as "photos/1.png"."""
        return self.drive(self._protocol.object("PUT", bucket, key, data))

    def get_object(self, bucket: str, key: str) -> bytes:
        found: bytes = self.drive(self._protocol.object("GET", bucket, key))
        return found

    def delete_object(self, bucket: str, key: str) -> None:
        self.drive(self._protocol.object("DELETE", bucket, key))

    def objects(self, bucket: str, prefix: str = "") -> Any:
        """Objects of a bucket whose keys begin so, with their sizes: the list at /v1/buckets/NAME."""
        path = f"/v1/buckets/{quote(bucket, safe='')}?prefix={quote(prefix, safe='')}"
        return (self.drive(self._protocol.read(path)))["objects"]

    def complete_task(self, token: str, value: Any = None) -> None:
        """Report the result of a step that waits (`lamina.callback`, `.waitForTaskToken`)."""
        self.drive(self._protocol.report(token, "success", value))

    def fail_task(self, token: str, error: str = "States.TaskFailed", cause: str = "") -> None:
        """Report the failure of a step that waits, with the name that `except` or `Catch` know it by."""
        self.drive(self._protocol.report(token, "failure", {"error": error, "cause": cause}))

    def heartbeat_task(self, token: str) -> None:
        """Report that a step that waits is being worked on."""
        self.drive(self._protocol.report(token, "heartbeat", {}))

    def health(self) -> Any:
        return self.drive(self._protocol.read("/healthz"))

    def ask(self, request: ClientRequest) -> Any:
        """Send a request and decode its response; an error is raised."""
        return self.drive(value_of(request))

    def send(self, request: ClientRequest) -> ClientResponse:
        return self._send(request, CancelToken())

    def drive(self, exchange: Exchange[T]) -> T:
        """The result of an exchange; an error is raised."""
        result = self._outcome(exchange, CancelToken())
        if isinstance(result, LaminaError):
            raise result
        return result

    def _outcome(self, exchange: Exchange[T], token: CancelToken) -> T | LaminaError:
        try:
            step = resume(exchange, None)
            while isinstance(step, ClientRequest):
                step = resume(exchange, self._send(step, token))
            return step
        except LaminaError as error:
            return error.with_traceback(None)

    def _send(self, request: ClientRequest, token: CancelToken) -> ClientResponse:
        """Send a request to the server that leads, wherever that is by now."""
        attempt = self._route.begin(time.monotonic())
        while True:
            server = self._route.current
            try:
                response = self._pool(server).send(self._route.adapt(request, server), token)
            except Unreachable as error:
                if token.is_cancelled or not attempt.repeats_error(error, request, time.monotonic()):
                    raise
            else:
                if not attempt.repeats_response(response, request, time.monotonic()):
                    return response
            time.sleep(FOLLOW_PAUSE_S)

    @contextmanager
    def _open_stream(self, request: ClientRequest) -> Iterator[tuple[ClientResponse, Iterator[Any] | None]]:
        """A response and its items, from the server that leads; a stream that has begun is not begun again."""
        attempt = self._route.begin(time.monotonic())
        while True:
            server = self._route.current
            with ExitStack() as stack:
                try:
                    found = stack.enter_context(self._pool(server).stream(self._route.adapt(request, server)))
                except Unreachable as error:
                    if not attempt.repeats_error(error, request, time.monotonic()):
                        raise
                else:
                    if found[1] is not None or not attempt.repeats_response(found[0], request, time.monotonic()):
                        yield found
                        return
            time.sleep(FOLLOW_PAUSE_S)

    def _pool(self, server: ServerAddress) -> ConnectionPool:
        return self._pools.get(server) or self._pools.setdefault(server, ConnectionPool(server, self._timeout))


class RunHandle:
    """Blocking handle of a durable run. The server keeps the run whatever becomes of this object."""

    def __init__(self, client: Client, protocol: ClientProtocol, id: str) -> None:
        self._client = client
        self._protocol = protocol
        self.id = checked_run_id(id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def status(self) -> RunStatus:
        return self._client.drive(self._protocol.run_status(self.id))

    def result(self, timeout: str | None = None) -> Any:
        """Wait for the result, or raise what the run failed with. `TimeoutError` after `timeout`, such as "5s"."""
        return self._client.drive(self._protocol.run_result(self.id, timeout))

    def history(self) -> list[dict[str, Any]]:
        """Events of the run so far; times are microseconds since 1970."""
        return self._client.drive(self._protocol.run_history(self.id))

    def cancel(self) -> RunStatus:
        return self._client.drive(self._protocol.run_status(self.id, "cancel"))

    def retry(self) -> RunStatus:
        """Resume a run that failed or was cancelled; steps that are done are not repeated."""
        return self._client.drive(self._protocol.run_status(self.id, "retry"))


class CancelToken:
    """Cancellation token: the connection a request is on, so that another thread can shut it; the server drops a call whose
    client is gone."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def attach(self, connection: socket.socket) -> None:
        with self._lock:
            if self.is_cancelled:
                raise Cancelled("cancelled by its caller")
            self._socket = connection

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class SpawnedCall:
    """A spawned call, made by `.spawn(...)`."""

    def __init__(self, threads: Executor, send: Callable[[CancelToken], CallResult | LaminaError]) -> None:
        self._token = CancelToken()
        self._cancelled = False
        self._future: Future[CallResult | LaminaError] = threads.submit(send, self._token)

    def __repr__(self) -> str:
        return f"<call, {'done' if self.done() else 'under way'}>"

    def get(self, timeout: str | None = None) -> Any:
        """The result, or the error it ended with. `TimeoutError` if it takes longer than `timeout`, such as "5s"."""
        if self._cancelled:
            raise Cancelled("cancelled by its caller")
        timeout_s = None if timeout is None else parse_us(timeout, "timeout") / 1e6
        try:
            result = self._future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"not done within {timeout}") from None
        if isinstance(result, LaminaError):
            raise result.with_traceback(None)
        return result.value

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


def _settled(call: SpawnedCall, return_errors: bool) -> Any:
    try:
        return call.get()
    except LaminaError as error:
        if return_errors:
            return error
        raise


class ConnectionPool:
    """Blocking connections to one server. `timeout` is how long to wait for the next bytes of the server."""

    def __init__(self, server: ServerAddress, timeout: str) -> None:
        self._server = server
        self._timeout = timeout
        self._timeout_s = parse_us(timeout, "timeout") / 1e6
        self._tls = ssl.create_default_context() if server.tls else None
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)  # the client behind `.remote(...)` is never closed

    def close(self) -> None:
        """Close the idle connections. Others can still be opened."""
        with self._lock:
            _close_all(self._idle)

    def send(self, request: ClientRequest, token: CancelToken) -> ClientResponse:
        """Send a request. The server may have closed a pooled one: if it drops before the first byte, retry on a new one."""
        pooled = self._take_idle()
        response = self._exchange(pooled, request, token) if pooled is not None else None
        if response is None:
            response = self._exchange(self._connect(), request, token)
        if response is None:
            raise no_response(self._server)
        return response

    @contextmanager
    def stream(self, request: ClientRequest) -> Iterator[tuple[ClientResponse, Iterator[Any] | None]]:
        """A response, and its items if it is streamed; then it has no body. On a connection of its own; leaving closes it,
        and the server notices."""
        token, reader = CancelToken(), ResponseReader(self._server)
        with self._connect() as connection:
            with self._translated_errors(token):
                connection.sendall(b"".join(request.as_http()))
                while not (reader.has_head and reader.is_streamed) and not reader.is_complete:
                    data = connection.recv(READ_BYTES)
                    if not data and not reader.has_begun:
                        raise no_response(self._server)
                    self._feed(reader, data)
            response = reader.response()
            yield response, self._items(connection, reader, response) if reader.is_streamed else None

    def _items(self, connection: socket.socket, reader: ResponseReader, response: ClientResponse) -> Iterator[Any]:
        decoder, has_ended = StreamDecoder(response), False
        while True:
            yield from decoder.feed(reader.take_body())
            if has_ended or reader.is_complete:
                break
            with self._translated_errors(CancelToken()):
                data = connection.recv(READ_BYTES)
                has_ended = not data
                reader.feed(data)
        decoder.check_end()

    def _exchange(self, connection: socket.socket, request: ClientRequest, token: CancelToken) -> ClientResponse | None:
        """None: the connection dropped before a byte of a response."""
        reader = ResponseReader(self._server)
        try:
            with self._translated_errors(token):
                token.attach(connection)
                try:
                    with suppress(ConnectionError):  # it may have answered without reading all of the body: 413
                        connection.sendall(b"".join(request.as_http()))
                    data = connection.recv(READ_BYTES)
                    if not data:
                        raise ConnectionResetError
                except ConnectionError:
                    if token.is_cancelled:
                        raise
                    return None
                self._feed(reader, data)
                while not reader.is_complete:
                    self._feed(reader, connection.recv(READ_BYTES))
                return reader.response()
        finally:
            if reader.keep_alive and not token.is_cancelled:
                self._give_back(connection)
            else:
                connection.close()

    def _feed(self, reader: ResponseReader, data: bytes) -> None:
        reader.feed(data)
        if not data and not reader.is_complete:
            raise ConnectionError("connection closed")

    @contextmanager
    def _translated_errors(self, token: CancelToken) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise timed_out(self._server, self._timeout) from None
        except OSError as error:
            if token.is_cancelled:
                raise Cancelled("cancelled by its caller") from None
            raise broken_off(self._server, error) from None

    def _connect(self) -> socket.socket:
        server = self._server
        connection: socket.socket | None = None
        try:
            if server.unix:
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(self._timeout_s)
                connection.connect(server.unix)
                return connection
            connection = socket.create_connection((server.host, server.port), self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=server.host)
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            raise connect_error(server, error) from None

    def _take_idle(self) -> socket.socket | None:
        """An idle connection; one with something to read while nothing was asked has been closed, or is out of step."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                poller = select.poll()
                poller.register(connection, select.POLLIN)
                if not poller.poll(0):
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _close_all(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()
