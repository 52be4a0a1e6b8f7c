"""Open-loop load generator on bare sockets, in a process of its own so that drawing a screen never delays a call.

Calls leave when they are due, whether or not earlier ones were answered, and their time counts from when they were due.
No event loop library: at tens of thousands of calls a second the generator must not be what is measured.
"""

from __future__ import annotations

import select
import signal
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from lamina.load.line import Gone, Line
from lamina.load.plan import Plan
from lamina.load.record import Result, Second, Tally

TICK_S = 0.0005
"""Sockets are looked at this often: many sends and answers at a time cost less than each by itself."""


def run(plan: Plan, on_second: Callable[[Second], None] = lambda second: None, *, stop_on: int = 0) -> Result:
    """`stop_on`: a signal that ends it before its time, with what was seen until then."""
    generator = _Generator(plan, on_second)
    if stop_on:
        signal.signal(stop_on, lambda *_: setattr(generator, "stopped", True))
    return generator.run()


class _Generator:
    def __init__(self, plan: Plan, on_second: Callable[[Second], None]) -> None:
        self.plan = plan
        self.on_second = on_second
        self.tally = Tally(plan.slo_us)
        self.request = plan.request()
        self.poll = select.epoll()
        self.lines: dict[int, Line] = {}
        self.idle: list[Line] = []
        self.waiting: deque[int] = deque()  #: due, and no connection free
        self.busy = 0
        self.stopped = False  #: no more calls, and no more waiting
        self._tls = _context(plan)

    def run(self) -> Result:
        plan, tally = self.plan, self.tally
        self._connect()  # the first one now, so that a wrong address is an error and not a thousand failures
        arrivals = plan.arrivals()
        next_us: int | None = next(arrivals, None)
        start_ns = time.perf_counter_ns()
        second = 1
        while True:
            now_us = (time.perf_counter_ns() - start_ns) // 1000
            self._answers(now_us)
            next_us = self._due(now_us, next_us, arrivals)
            self._send(now_us)
            if now_us >= second * 1_000_000:
                self.on_second(tally.close_second(second, self.busy + len(self.waiting)))
                second += 1
            if self.stopped:
                break
            over = next_us is None and now_us >= plan.seconds * 1e6
            if over and ((not self.busy and not self.waiting) or now_us > (plan.seconds + plan.patience_s) * 1e6):
                break
            self._rest(now_us, next_us)
        if tally.has_more:
            self.on_second(tally.close_second(second, self.busy + len(self.waiting)))
        for line in self.lines.values():
            line.close()
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

    def _rest(self, now_us: int, next_us: int | None) -> None:
        """Until something may have changed: at low rates that is not every tick."""
        ahead_s = 0.05 if next_us is None else (next_us - now_us) / 1e6
        if ahead_s <= TICK_S:
            time.sleep(TICK_S)
        else:
            self.poll.poll(min(ahead_s, 0.05) - TICK_S / 2, 1)

    def _due(self, now_us: int, next_us: int | None, arrivals: Iterator[int]) -> int | None:
        while next_us is not None and next_us <= now_us:
            self.tally.due()
            self.waiting.append(next_us)
            next_us = next(arrivals, None)
        return next_us

    def _answers(self, now_us: int) -> None:
        for number, events in self.poll.poll(0):
            line = self.lines[number]
            try:
                if events & select.EPOLLOUT and line.go_on():
                    self.poll.modify(number, select.EPOLLIN)
                status = line.answer() if events & ~select.EPOLLOUT else ""
            except Gone:
                self._lost(number, line, now_us)
                continue
            if status:
                self.tally.ended(status, now_us - line.due_us)
                self.idle.append(line)
                self.busy -= 1

    def _lost(self, number: int, line: Line, now_us: int) -> None:
        self.poll.unregister(number)
        del self.lines[number]
        line.close()
        if line in self.idle:
            self.idle.remove(line)
        else:
            self.busy -= 1
            self.tally.ended("connection lost", now_us - line.due_us)

    def _send(self, now_us: int) -> None:
        while self.waiting:
            if not self.idle and not self._connect_more(now_us):
                return
            line = self.idle.pop()
            line.due_us = self.waiting.popleft()
            self.tally.sent(now_us - line.due_us)
            self.busy += 1
            try:
                if not line.send(self.request):
                    self.poll.modify(line.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
            except Gone:
                self._lost(line.socket.fileno(), line, now_us)

    def _connect_more(self, now_us: int) -> bool:
        if len(self.lines) >= self.plan.connections:
            return False
        try:
            self._connect()
        except OSError:
            self.tally.ended("no connection", now_us - self.waiting.popleft())
            return bool(self.idle)
        return True

    def _connect(self) -> None:
        host, port, _ = self.plan.place()
        line = Line(host, port, self._tls)
        self.lines[line.socket.fileno()] = line
        self.poll.register(line.socket.fileno(), select.EPOLLIN)
        self.idle.append(line)


def _context(plan: Plan) -> ssl.SSLContext | None:
    if not plan.place()[2]:
        return None
    context = ssl.create_default_context()
    if not plan.check_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def main() -> None:
    """A plan on stdin; seconds, then the result, as JSON lines on stdout."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    out = sys.stdout.buffer

    def say(kind: str, what: Second | Result) -> None:
        out.write(msgspec.json.encode({kind: what}) + b"\n")
        out.flush()

    try:
        say("result", run(plan, lambda second: say("second", second), stop_on=signal.SIGINT))
    except OSError as error:
        out.write(msgspec.json.encode({"error": error.strerror or str(error)}) + b"\n")


if __name__ == "__main__":
    main()
