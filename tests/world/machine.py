"""Clock, event loops and threads of a simulated machine.

Time moves only when nothing is left to do at the present instant. Threads are real ones, because SQLite wants each connection in
its own, but one alone runs at a time: a thread that would wait gives the turn back.
"""

from __future__ import annotations

import _thread
import asyncio
import queue
import random
import selectors
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FOREVER_US = 2**62
_REAL = {
    name: getattr(time, name) for name in ("monotonic", "monotonic_ns", "time", "time_ns", "perf_counter", "perf_counter_ns")
}
_RealThread = threading.Thread
EPOCH_US = 1_700_000_000_000_000
"""Wall time when a world begins."""


class Clock:
    """The time of the world that is being played, for all of this process; real time while there is none."""

    def __init__(self) -> None:
        self.now_us: int | None = None
        self.wall_jump_us = 0  #: the wall clock has been set forward, or back

    def install(self) -> None:
        """Put itself in the place of Python's clocks. Before the product is imported, which may keep what it finds."""

        def clock(name: str, unit: float, offset_us: Callable[[], int]) -> Callable[[], float]:
            real = _REAL[name]

            def read() -> float:
                now_us = self.now_us
                if now_us is None:
                    return real()  # type: ignore[no-any-return]
                at_us = now_us + offset_us()
                return at_us * 1000 if unit == 1e9 else at_us / 1e6

            return read

        def wall_us() -> int:
            return EPOCH_US + self.wall_jump_us

        for name in _REAL:
            offset_us = wall_us if name.startswith("time") else lambda: 10_000_000
            setattr(time, name, clock(name, 1e9 if name.endswith("_ns") else 1.0, offset_us))


CLOCK = Clock()


class Killed(BaseException):
    """The process that this thread belonged to is gone."""


class Turn:
    """A thread of the world. It runs in `step`, until it waits for something or ends."""

    def __init__(self, machine: Machine, owner: object, work: Callable[[], object]) -> None:
        self.owner = owner
        self.is_over = False
        self.is_killed = False
        self._machine = machine
        self._wakes_us: Callable[[], int] = lambda: 0
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()  # held by the side that waits
        self._go.acquire()
        self._back.acquire()

        def run() -> None:
            self._go.acquire()
            try:
                if not self.is_killed:
                    work()
            except Killed:
                pass
            finally:
                self.is_over = True
                self._back.release()

        _RealThread(target=run, daemon=True).start()

    @property
    def wakes_us(self) -> int:
        return self._wakes_us()

    def step(self) -> None:
        machine = self._machine
        before, machine.turn = machine.turn, self
        self._go.release()
        self._back.acquire()
        machine.turn = before

    def wait(self, wakes_us: Callable[[], int]) -> None:
        """Give the turn back until this time, which may come nearer meanwhile."""
        self._wakes_us = wakes_us
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        self.is_killed = True
        while not self.is_over:
            self.step()


class Loop(asyncio.SelectorEventLoop):
    """Event loop of one simulated process. It is told when to run, and reads no descriptor."""

    def __init__(self, machine: Machine, owner: object) -> None:
        self.machine, self.owner = machine, owner
        super().__init__(_NoSelector())

    @property
    def wakes_us(self) -> int:
        if self._ready:  # type: ignore[attr-defined]
            return 0
        timers = self._scheduled  # type: ignore[attr-defined]  # a heap
        return round(timers[0].when() * 1e6) - 10_000_000 if timers else FOREVER_US

    def step(self) -> None:
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            try:
                result, error = func(*args), None
            except Exception as failed:
                result, error = None, failed

            def done() -> None:
                if not future.done():
                    future.set_result(result) if error is None else future.set_exception(error)

            self.call_soon_threadsafe(done)

        self.machine.spawn(self.owner, work)
        return future


class _NoSelector(selectors.BaseSelector):
    """A selector in which nothing ever happens: what does happen comes by `call_soon`."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def get_map(self) -> Any:
        return self._keys


class Machine:
    """All loops, threads and timers of a world, and who runs next."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turn: Turn | None = None
        self.owner: object = None  #: the process that runs now
        self.loops: list[Loop] = []
        self.turns: list[Turn] = []
        self.frozen: set[object] = set()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._timer_count = 0

    @property
    def now_us(self) -> int:
        assert CLOCK.now_us is not None
        return CLOCK.now_us

    @contextmanager
    def running(self) -> Iterator[None]:
        """The world's time and threads in place of this machine's, for the product."""
        from lamina.ipc import event_loop as timer
        from lamina.server import process_status
        from lamina.store import group_commit

        CLOCK.now_us, CLOCK.wall_jump_us = 0, 0
        real = (timer.sys, group_commit.threading, group_commit.queue)
        interval_s, process_status.INTERVAL_S = process_status.INTERVAL_S, 1.0  # no loop is late here
        timer.sys = types.SimpleNamespace(platform="simulated")  # type: ignore[assignment]
        group_commit.threading = types.SimpleNamespace(Thread=self._thread, Event=lambda: Flag(self))  # type: ignore[assignment]
        group_commit.queue = types.SimpleNamespace(SimpleQueue=lambda: Queue(self), Empty=queue.Empty)  # type: ignore[assignment]
        try:
            yield
        finally:
            timer.sys, group_commit.threading, group_commit.queue = real  # type: ignore[assignment]
            process_status.INTERVAL_S = interval_s
            for turn in self.turns:
                turn.kill()
            CLOCK.now_us = None

    def _thread(self, target: Callable[[], object], name: str = "", daemon: bool = True) -> Any:
        owner = self.owner
        return types.SimpleNamespace(start=lambda: self.spawn(owner, target))

    def spawn(self, owner: object, work: Callable[[], object]) -> None:
        self.turns.append(Turn(self, owner, work))

    def call_at(self, at_us: int, callback: Callable[[], None]) -> None:
        """For the world itself; an owner's own timers are its loop's."""
        self._timer_count += 1
        self._timers.append((at_us, self._timer_count, callback))
        self._timers.sort()

    def end(self, owner: object) -> None:
        """Lose a process, with its threads and its loop, in the middle of whatever they do."""
        for turn in [turn for turn in self.turns if turn.owner is owner]:
            self._as(owner, turn.kill)
            self.turns.remove(turn)
        for loop in [loop for loop in self.loops if loop.owner is owner]:
            self.loops.remove(loop)
            loop._ready.clear()  # type: ignore[attr-defined]
            loop._scheduled.clear()  # type: ignore[attr-defined]
            loop.close()
        self.frozen.discard(owner)

    def _as(self, owner: object, work: Callable[[], None]) -> None:
        before, self.owner = self.owner, owner
        try:
            work()
        finally:
            self.owner = before

    def run(self, until: Callable[[], bool], limit_us: int) -> bool:
        """Let the world go on until this holds; False: the limit came first, or nothing is left that could happen."""
        choice = self.rng.choice
        while not until():
            now_us, next_us, ended = self.now_us, FOREVER_US, False
            ready: list[Turn | Loop] = []
            for one in (*self.loops, *self.turns):
                if isinstance(one, Turn) and one.is_over:
                    ended = True
                elif one.owner not in self.frozen:
                    wakes_us = one.wakes_us
                    if wakes_us <= now_us:
                        ready.append(one)
                    elif wakes_us < next_us:
                        next_us = wakes_us
            if ended:
                self.turns = [turn for turn in self.turns if not turn.is_over]
            if ready:
                chosen = choice(ready) if len(ready) > 1 else ready[0]
                self._as(chosen.owner, chosen.step)
            elif self._timers and self._timers[0][0] <= now_us:
                self._timers.pop(0)[2]()
            else:
                if self._timers:
                    next_us = min(next_us, self._timers[0][0])
                if next_us > limit_us:
                    CLOCK.now_us = max(now_us, min(limit_us, next_us))
                    return until()
                CLOCK.now_us = max(now_us, next_us)
        return True


class Queue:
    """`queue.SimpleQueue`, for threads of the world. What is put arrives a little later."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._items: deque[tuple[int, Any]] = deque()

    def put(self, item: Any) -> None:
        delay_us = self._machine.rng.choice((0, 0, 100, 2_000))
        last_us = self._items[-1][0] if self._items else 0
        self._items.append((max(last_us, self._machine.now_us + delay_us), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        machine = self._machine
        limit_us = machine.now_us + int(timeout * 1e6) if timeout is not None else FOREVER_US
        while not self._items or self._items[0][0] > machine.now_us:
            if not block or machine.now_us >= limit_us:
                raise queue.Empty
            assert machine.turn is not None, "only a thread may wait"
            machine.turn.wait(lambda: min(limit_us, self._items[0][0] if self._items else FOREVER_US))
        return self._items.popleft()[1]


class Flag:
    """`threading.Event`, for threads of the world."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        machine = self._machine
        limit_us = machine.now_us + int(timeout * 1e6) if timeout is not None else FOREVER_US
        while not self._is_set and machine.now_us < limit_us:
            assert machine.turn is not None, "only a thread may wait"
            machine.turn.wait(lambda: 0 if self._is_set else limit_us)
        return self._is_set
