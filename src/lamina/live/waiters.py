"""Completion listeners of durable runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def add(self, id: str, waiter: Callable[[], None]) -> Callable[[], None]:
        """Add a listener; the returned function removes it."""
        self._waiting.setdefault(id, []).append(waiter)

        def leave() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._waiting[id].remove(waiter)
                if not self._waiting[id]:
                    del self._waiting[id]

        return leave

    def wake(self, id: str) -> None:
        for waiter in self._waiting.pop(id, []):
            waiter()
