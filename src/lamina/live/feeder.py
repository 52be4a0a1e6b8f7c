"""Which runs of the store come into memory, and when: by priority, then by age, a portion at a time.

Identifiers sort by age, so one cursor per priority tells what has been fetched; `_unfed` counts what lies behind it. A count
that is too high costs a look into the store and corrects itself; it is never too low.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from lamina.errors import LaminaError
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import Fed, Portion, RunRow

PORTION, PORTION_BYTES = 128, 32 * 2**20
"""Runs fetched from the store at a time, and what their inputs may come to."""

AGAIN_S = 1.0
"""After the store could not be read."""


class Feeder:
    """`begin` takes a run over; `has_room` says whether one more may come, and when asked to, looks closely."""

    def __init__(self, store: Store, begin: Callable[[Fed], None], has_room: Callable[[bool], bool]) -> None:
        self._store = store
        self._begin = begin
        self._has_room = has_room
        self._unfed: dict[int, int] = {}
        self._cursor: dict[int, str] = {}
        self._by_name: deque[str] = deque()
        self._fetched: deque[Fed] = deque()  #: and not begun
        self._fetching = self._knows = self._beginning = False
        self._withdrawn: set[str] = set()
        self.closed = False

    @property
    def waiting(self) -> int:
        return sum(self._unfed.values()) + len(self._by_name) + len(self._fetched)

    def found(self, counts: dict[int, int]) -> None:
        """These were left by an earlier server. Until that is known, nobody begins: who came before must begin before."""
        self._knows = True
        for priority, count in counts.items():
            self._unfed[priority] = self._unfed.get(priority, 0) + count
        self.feed()

    def arrived(self, row: RunRow, inputs: bytes) -> None:
        """A new one is on disk; if nobody is before it, it begins at once."""
        if row.id <= self._cursor.get(row.priority, ""):
            return  # fetched before this was told
        ahead = any(count for priority, count in self._unfed.items() if priority >= row.priority)
        held_up = self._by_name or self._fetched or self.closed or not self._knows
        if ahead or held_up or not self._has_room(False):
            self._unfed[row.priority] = self._unfed.get(row.priority, 0) + 1
            self.feed()
        else:
            self._cursor[row.priority] = row.id
            self._begin(Fed(row, inputs, []))

    def again(self, id: str) -> None:
        """One that was fetched before is queued again."""
        self._by_name.append(id)
        self.feed()

    def withdraw(self, id: str) -> None:
        """It has ended in the store, and may be on its way here."""
        if self._fetching or self._fetched:
            self._withdrawn.add(id)

    def feed(self, look: bool = False) -> None:
        if self.closed or self._beginning:
            return
        self._beginning = True  # what begins may end at once, and then we are asked for more
        while self._fetched and self._has_room(look):
            one = self._fetched.popleft()
            if one.row.id not in self._withdrawn:
                self._begin(one)
        self._beginning = False
        if self._fetching or self._fetched or not self._knows:
            return
        self._withdrawn.clear()
        if self._by_name:
            id = self._by_name.popleft()
            self._fetching = True
            self._store.read(lambda db: stored.take_one(db, id), lambda one: self._came_by_name(id, one))
            return
        priority = max((one for one, count in self._unfed.items() if count), default=None)
        if priority is None:
            return
        if not self._has_room(look):
            return
        after, expected = self._cursor.get(priority, ""), self._unfed[priority]
        self._fetching = True
        self._store.read(
            lambda db: stored.take(db, priority, after, PORTION, PORTION_BYTES),
            lambda portion: self._came(priority, expected, portion),
        )

    def _came(self, priority: int, expected: int, portion: Portion | LaminaError) -> None:
        if isinstance(portion, LaminaError):
            asyncio.get_running_loop().call_later(AGAIN_S, self._done, [])
            return
        some = portion.runs
        gone = expected if portion.is_last else len(some)  # if there were to be more, they have been cancelled
        self._unfed[priority] = max(0, self._unfed[priority] - gone)
        if some:
            self._cursor[priority] = some[-1].row.id
        self._done(some)

    def _came_by_name(self, id: str, one: Fed | LaminaError | None) -> None:
        if isinstance(one, LaminaError):
            self._by_name.appendleft(id)
            asyncio.get_running_loop().call_later(AGAIN_S, self._done, [])
        else:
            self._done([] if one is None else [one])

    def _done(self, some: list[Fed]) -> None:
        self._fetching = False
        self._fetched.extend(some)
        self.feed()
