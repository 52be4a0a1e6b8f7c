"""Completion listeners of durable runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class CompletionListeners:
    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[[], None]]] = {}

    def add(self, id: str, waiter: Callable[[], None]) -> Callable[[], None]:
        """Add a listener; the returned function removes it."""
        self._listeners.setdefault(id, []).append(waiter)

        def leave() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._listeners[id].remove(waiter)
                if not self._listeners[id]:
                    del self._listeners[id]

        return leave

    def notify(self, id: str) -> None:
        for waiter in self._listeners.pop(id, []):
            waiter()
