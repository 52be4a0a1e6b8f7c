"""Open-loop load generator on bare sockets, in a process of its own so that drawing a screen never delays a call.

Calls leave when they are due, whether or not earlier ones were answered, and their time counts from when they were due. A
connection has at most one request in flight: a rejection must not queue behind a result. No event loop library: at tens of
thousands of calls a second the generator must not be what is measured. `run_load` starts the process and follows it.
"""

from __future__ import annotations

import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from lamina.errors import LaminaError, Unreachable
from lamina.load.load_plan import LoadPlan
from lamina.load.results import LoadResult, LoadTally, SecondStats

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
        """Whether all of it has left; if not, `send_more` when the socket is writable."""
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


POLL_INTERVAL_S = 0.0005
"""Sockets are looked at this often: many sends and answers at a time cost less than each by itself."""


def run(plan: LoadPlan, on_second: Callable[[SecondStats], None] = lambda second: None, *, stop_on: int = 0) -> LoadResult:
    """`stop_on`: a signal that ends it before its time, with what was seen until then."""
    generator = _Generator(plan, on_second)
    if stop_on:
        signal.signal(stop_on, lambda *_: setattr(generator, "stopped", True))
    return generator.run()


class _Generator:
    def __init__(self, plan: LoadPlan, on_second: Callable[[SecondStats], None]) -> None:
        self.plan = plan
        self.on_second = on_second
        self.tally = LoadTally(plan.slo_us)
        self.request = plan.request_bytes()
        self.poll = select.epoll()
        self.connections: dict[int, LoadConnection] = {}
        self.idle: list[LoadConnection] = []
        self.waiting: deque[int] = deque()  #: due, and no connection free
        self.busy = 0
        self.stopped = False  #: no more calls, and no more waiting
        self._tls = _context(plan)

    def run(self) -> LoadResult:
        plan, tally = self.plan, self.tally
        self._connect()  # the first one now, so that a wrong address is an error and not a thousand failures
        arrivals = plan.arrivals()
        next_us: int | None = next(arrivals, None)
        start_ns = time.perf_counter_ns()
        second = 1
        while True:
            now_us = (time.perf_counter_ns() - start_ns) // 1000
            self._read_responses(now_us)
            next_us = self._enqueue_due(now_us, next_us, arrivals)
            self._send(now_us)
            if now_us >= second * 1_000_000:
                self.on_second(tally.close_second(second, self.busy + len(self.waiting)))
                second += 1
            if self.stopped:
                break
            over = next_us is None and now_us >= plan.seconds * 1e6
            if over and ((not self.busy and not self.waiting) or now_us > (plan.seconds + plan.patience_s) * 1e6):
                break
            self._sleep(now_us, next_us)
        if tally.has_open_second:
            self.on_second(tally.close_second(second, self.busy + len(self.waiting)))
        for connection in self.connections.values():
            connection.close()
        self.poll.close()
        unanswered = self.busy + len(self.waiting)
        seconds = min(plan.seconds, max(0.001, now_us / 1e6)) if self.stopped else plan.seconds
        return tally.result(
            url=plan.url,
            shape=plan.shape,
            seed=plan.seed,
            seconds=seconds,
            unanswered=unanswered,
            stopped=self.stopped,
        )

    def _sleep(self, now_us: int, next_us: int | None) -> None:
        """Until something may have changed: at low rates that is not every tick."""
        ahead_s = 0.05 if next_us is None else (next_us - now_us) / 1e6
        if ahead_s <= POLL_INTERVAL_S:
            time.sleep(POLL_INTERVAL_S)
        else:
            self.poll.poll(min(ahead_s, 0.05) - POLL_INTERVAL_S / 2, 1)

    def _enqueue_due(self, now_us: int, next_us: int | None, arrivals: Iterator[int]) -> int | None:
        while next_us is not None and next_us <= now_us:
            self.tally.call_due()
            self.waiting.append(next_us)
            next_us = next(arrivals, None)
        return next_us

    def _read_responses(self, now_us: int) -> None:
        for number, events in self.poll.poll(0):
            connection = self.connections[number]
            try:
                if events & select.EPOLLOUT and connection.send_more():
                    self.poll.modify(number, select.EPOLLIN)
                status = connection.read_status() if events & ~select.EPOLLOUT else ""
            except ConnectionLost:
                self._connection_lost(number, connection, now_us)
                continue
            if status:
                self.tally.call_ended(status, now_us - connection.due_us)
                self.idle.append(connection)
                self.busy -= 1

    def _connection_lost(self, number: int, connection: LoadConnection, now_us: int) -> None:
        self.poll.unregister(number)
        del self.connections[number]
        connection.close()
        if connection in self.idle:
            self.idle.remove(connection)
        else:
            self.busy -= 1
            self.tally.call_ended("connection lost", now_us - connection.due_us)

    def _send(self, now_us: int) -> None:
        while self.waiting:
            if not self.idle and not self._connect_more(now_us):
                return
            connection = self.idle.pop()
            connection.due_us = self.waiting.popleft()
            self.tally.call_sent(now_us - connection.due_us)
            self.busy += 1
            try:
                if not connection.send(self.request):
                    self.poll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
            except ConnectionLost:
                self._connection_lost(connection.socket.fileno(), connection, now_us)

    def _connect_more(self, now_us: int) -> bool:
        if len(self.connections) >= self.plan.connections:
            return False
        try:
            self._connect()
        except OSError:
            self.tally.call_ended("no connection", now_us - self.waiting.popleft())
            return bool(self.idle)
        return True

    def _connect(self) -> None:
        host, port, _ = self.plan.endpoint()
        connection = LoadConnection(host, port, self._tls)
        self.connections[connection.socket.fileno()] = connection
        self.poll.register(connection.socket.fileno(), select.EPOLLIN)
        self.idle.append(connection)


def _context(plan: LoadPlan) -> ssl.SSLContext | None:
    if not plan.endpoint()[2]:
        return None
    context = ssl.create_default_context()
    if not plan.check_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def main() -> None:
    """A plan on stdin; seconds, then the result, as JSON lines on stdout."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    out = sys.stdout.buffer

    def say(kind: str, what: SecondStats | LoadResult) -> None:
        out.write(msgspec.json.encode({kind: what}) + b"\n")
        out.flush()

    try:
        say("result", run(plan, lambda second: say("second", second), stop_on=signal.SIGINT))
    except OSError as error:
        out.write(msgspec.json.encode({"error": error.strerror or str(error)}) + b"\n")


class _GeneratorMessage(msgspec.Struct):
    second: SecondStats | None = None
    result: LoadResult | None = None
    error: str = ""


def run_load(plan: LoadPlan, on_second: Callable[[SecondStats], None] = lambda second: None) -> LoadResult:
    """Run `plan` to its end."""
    plan.request_bytes()  # a wrong address is known before anything starts
    command = [sys.executable, "-m", "lamina.load.generator"]
    with _forward_interrupts() as pass_on, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pass_on(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        try:
            for line in process.stdout:
                message = msgspec.json.decode(line, type=_GeneratorMessage)
                if message.error:
                    raise Unreachable(f"{plan.url}: {message.error}", hint="is the server running, and on that port?")
                if message.second is not None:
                    on_second(message.second)
                if message.result is not None:
                    return message.result
        finally:
            process.kill()
    raise LaminaError("the load generator ended without a result")


@contextmanager
def _forward_interrupts() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """The first Ctrl-C is for the generator, which then says what it has seen. A second one is for us."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda process: None
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, until it has its own way to stop

    def pass_on(process: subprocess.Popen[bytes]) -> None:
        def once(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            process.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, once)

    try:
        yield pass_on
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
