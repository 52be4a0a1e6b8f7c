"""Loader of queued durable runs: by priority, tenants in turn, each tenant's by age, a page at a time.

A lane is the runs of one priority and tenant. Identifiers sort by age, so one cursor per lane tells what has been fetched;
`unloaded` counts what lies behind it. A count that is too high costs a look into the store and corrects itself; it is never too
low. A tenant over its limits is passed over until it is within them: its runs wait in the store, where they hold up no others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lamina.errors import LaminaError
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import Fed, Lane, Portion, RunRow

PORTION, PORTION_BYTES = 128, 32 * 2**20
"""Runs loaded from the store at a time, and the limit of their inputs."""

AGAIN_S = 1.0
"""After the store could not be read."""

LEAST_PAUSE_S = 0.05


@dataclass(slots=True)
class _Waiting:
    """Runs of one lane that have not been loaded."""

    unfed: int = 0
    cursor: str = ""
    served: int = 0  #: the turn in which it was last loaded from


class Feeder:
    """Loads queued runs. `begin` starts one; `has_room` says whether one more may come, and when asked to, looks closely."""

    def __init__(self, store: Store, begin: Callable[[Fed], None], has_room: Callable[[bool], bool]) -> None:
        self._store = store
        self._begin = begin
        self._has_room = has_room
        self._lanes: dict[Lane, _Waiting] = {}
        self._turn = 0
        self._by_name: deque[tuple[str, str]] = deque()  #: run and tenant
        self._fetched: deque[Fed] = deque()  #: and not begun
        self._paused: dict[str, list[str]] = {}  #: by tenant that may not have more now: runs that were fetched already
        self._fetching = self._knows = self._beginning = False
        self._withdrawn: set[str] = set()
        self.closed = False

    @property
    def waiting(self) -> int:
        behind = sum(lane.unfed for lane in self._lanes.values()) + sum(map(len, self._paused.values()))
        return behind + len(self._by_name) + len(self._fetched)

    def found(self, counts: dict[Lane, int]) -> None:
        """Runs left by an earlier server. Until they are counted no run starts: older runs start first."""
        self._knows = True
        for lane, count in counts.items():
            self._lane(lane).unfed += count
        self.feed()

    def arrived(self, row: RunRow, inputs: bytes) -> None:
        """A new run is on disk; if none is ahead of it, it starts at once."""
        mine = self._lane((row.priority, row.tenant))
        if row.id <= mine.cursor:
            return  # fetched before this was told
        held_up = self._by_name or self._fetched or self.closed or not self._knows or row.tenant in self._paused
        if held_up or self._is_anybody_ahead(row.priority) or not self._has_room(False):
            mine.unfed += 1
            self.feed()
        else:
            mine.cursor = row.id
            self._begin(Fed(row, inputs, []))

    def again(self, id: str, tenant: str) -> None:
        """Queue a run again that was loaded before."""
        self._by_name.append((id, tenant))
        self.feed()

    def pause(self, id: str, tenant: str, wait_s: float) -> None:
        """Pause a tenant over its limits: for so long none of its runs is tried, and then this one first."""
        if tenant not in self._paused:
            self._paused[tenant] = []
            asyncio.get_running_loop().call_later(max(LEAST_PAUSE_S, wait_s), self._resume, tenant)
        self._paused[tenant].append(id)

    def _resume(self, tenant: str) -> None:
        self._by_name.extend((id, tenant) for id in self._paused.pop(tenant))
        self.feed()

    def withdraw(self, id: str) -> None:
        """Skip a run that was cancelled in the store and may be on its way here."""
        if self._fetching or self._fetched:
            self._withdrawn.add(id)

    def feed(self, look: bool = False) -> None:
        if self.closed or self._beginning:
            return
        self._begin_fetched(look)
        if self._fetching or self._fetched or not self._knows:
            return
        self._withdrawn.clear()
        named = self._next_by_name()
        if named is not None:
            self._fetching = True
            self._store.read(lambda db: stored.take_one(db, named[0]), lambda one: self._came_by_name(*named, one))
            return
        lane = self._next_lane()
        if lane is None or not self._has_room(look):
            return
        waiting = self._lanes[lane]
        after, expected = waiting.cursor, waiting.unfed
        self._turn += 1
        waiting.served = self._turn
        self._fetching = True
        self._store.read(
            lambda db: stored.take(db, lane, after, PORTION, PORTION_BYTES),
            lambda portion: self._came(lane, expected, portion),
        )

    def _begin_fetched(self, look: bool) -> None:
        self._beginning = True  # what begins may end at once, and then we are asked for more
        while self._fetched and self._has_room(look):
            one = self._fetched.popleft()
            if one.row.id in self._withdrawn:
                continue
            if one.row.tenant in self._paused:
                self._paused[one.row.tenant].append(one.row.id)
            else:
                self._begin(one)
        self._beginning = False

    def _lane(self, lane: Lane) -> _Waiting:
        return self._lanes.setdefault(lane, _Waiting())

    def _is_anybody_ahead(self, priority: int) -> bool:
        return any(
            lane.unfed and level >= priority and tenant not in self._paused for (level, tenant), lane in self._lanes.items()
        )

    def _next_by_name(self) -> tuple[str, str] | None:
        while self._by_name:
            id, tenant = self._by_name.popleft()
            if tenant not in self._paused:
                return id, tenant
            self._paused[tenant].append(id)
        return None

    def _next_lane(self) -> Lane | None:
        """Next lane: the highest priority; among its tenants the one that was served longest ago."""
        ready = [lane for lane, waiting in self._lanes.items() if waiting.unfed and lane[1] not in self._paused]
        return max(ready, key=lambda lane: (lane[0], -self._lanes[lane].served), default=None)

    def _came(self, lane: Lane, expected: int, portion: Portion | LaminaError) -> None:
        if isinstance(portion, LaminaError):
            asyncio.get_running_loop().call_later(AGAIN_S, self._done, [])
            return
        some, waiting = portion.runs, self._lanes[lane]
        gone = expected if portion.is_last else len(some)  # if there were to be more, they have been cancelled
        waiting.unfed = max(0, waiting.unfed - gone)
        if some:
            waiting.cursor = some[-1].row.id
        self._done(some)

    def _came_by_name(self, id: str, tenant: str, one: Fed | LaminaError | None) -> None:
        if isinstance(one, LaminaError):
            self._by_name.appendleft((id, tenant))
            asyncio.get_running_loop().call_later(AGAIN_S, self._done, [])
        else:
            self._done([] if one is None else [one])

    def _done(self, some: list[Fed]) -> None:
        self._fetching = False
        self._fetched.extend(some)
        self.feed()
