"""What an event loop is too coarse for: a timer with microsecond resolution (Linux timerfd), and writes that leave at once.

Event loops round their timers to a millisecond, which is longer than many of the batches we time. A Linux timerfd does
not; where there is none, the loop's own timers serve, and are asked again if they come early.

uvloop keeps what is written until the end of its turn, when everything that could be read has been dealt with: the first of
sixteen answers waits for the sixteenth, and under overload a rejection for hundreds of others. Where nothing is waiting to be
sent the bytes go straight to the socket instead; what it does not take, and all of a connection with TLS, goes the usual way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE = 1


def clock_us() -> int:
    """Monotonic clock: deadlines never use the wall clock."""
    return time.monotonic_ns() // 1000


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timer:
    """Timer: calls back at given times of `clock_us`, never before them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._armed_us = 0
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._spec = _TimerSpec()
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._fire)

    def call_at(self, at_us: int, callback: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (at_us, self._order, callback))
        if not self._armed_us or at_us < self._armed_us:
            self._arm(at_us)

    def close(self) -> None:
        self._heap.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, at_us: int) -> None:
        self._armed_us = at_us
        if self._fd >= 0:
            self._spec.value_s, micros = divmod(max(1, at_us), 1_000_000)
            self._spec.value_ns = micros * 1000
            self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)
        else:
            self._loop.call_later(max(0.0, (at_us - clock_us()) / 1e6), self._fire)

    def _fire(self) -> None:
        """Let sockets be read first: callbacks decide about what has come in by now."""
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)
            self._loop.call_soon(self._call_back)
        else:
            self._call_back()

    def _call_back(self) -> None:
        now_us = time.monotonic_ns() // 1000  # `clock_us`, without a call: once for every batch
        self._armed_us = 1  # callbacks may ask for more: they are armed together, below
        try:
            while self._heap and self._heap[0][0] <= now_us:
                _, _, callback = heappop(self._heap)
                callback()
        finally:  # one that fails must not be the last
            self._armed_us = 0
            if self._heap:
                self._arm(self._heap[0][0])


class ImmediateWriter:
    """Immediate writes: to the socket itself, as long as nothing waits to be sent before."""

    __slots__ = ("_fd", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd = -1
        about = getattr(transport, "get_extra_info", None)  # what stands for a transport in a test need not know it
        if about is not None and about("ssl_object") is None:
            plain = about("socket")
            self._fd = plain.fileno() if plain is not None else -1

    def write(self, data: bytes | bytearray) -> None:
        transport = self._transport
        if self._fd >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._fd, data)
            except OSError:  # full, or broken: the transport finds out, and knows what to do
                sent = 0
            if sent == len(data):
                return
            transport.write(memoryview(data)[sent:] if isinstance(data, bytes) else data[sent:])  # a large one is not copied
            return
        transport.write(data)
