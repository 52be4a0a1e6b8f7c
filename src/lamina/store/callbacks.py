"""Callback queue from the store's threads to the event loop: a few callbacks in each of its turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Any

from lamina.store.base import Done

log = logging.getLogger("lamina")

TURN_S = 0.001
"""How long callbacks may hold the loop in one turn."""

Callback = tuple[Done[Any], Any, bool]
"""Callback, result, and whether the work was required: else a client may wait for it."""


class CallbackQueue:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._first: deque[Callback] = deque()
        self._others: deque[Callback] = deque()

    def post(self, callbacks: list[Callback]) -> None:
        """Queue callbacks, from any thread."""
        if callbacks:
            with contextlib.suppress(RuntimeError):  # the loop has gone: there is nothing left to call
                self._loop.call_soon_threadsafe(self._enqueue, callbacks)

    def _enqueue(self, callbacks: list[Callback]) -> None:
        if not self._others and not self._first:
            self._loop.call_soon(self._run_some)
        for one in callbacks:
            (self._others if one[2] else self._first).append(one)

    def _run_some(self) -> None:
        """Run a few callbacks in their order, then yield: what follows from a write may be work. Answers to works that may be
        refused go first: clients wait for them."""
        until_s = time.perf_counter() + TURN_S
        while self._others or self._first:
            done, result, _ = (self._first or self._others).popleft()
            try:
                done(result)
            except Exception:
                log.exception("what followed from a write failed")
            if time.perf_counter() >= until_s:
                break
        if self._others or self._first:
            self._loop.call_soon(self._run_some)
