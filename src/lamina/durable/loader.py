"""Loader of queued durable runs: by priority, tenants in turn, each tenant's by age, a page at a time.

A lane is the runs of one priority and tenant. Identifiers sort by age, so one cursor per lane tells what has been loaded (a run
that was loaded twice is started once); `unloaded` counts what lies behind it. A count that is too high costs a look into the
store and corrects itself; it is never too low. A tenant over its limits is passed over until it is within them: its runs wait in
the store, where they hold up no others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lamina.errors import LaminaError
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import Lane, LoadedRun, RunPage, RunRow

PAGE_RUNS, PAGE_BYTES = 128, 32 * 2**20
"""Runs loaded from the store at a time, and the limit of their inputs."""

RETRY_S = 1.0
"""After the store could not be read."""

MIN_PAUSE_S = 0.05


@dataclass(slots=True)
class _LaneCursor:
    """Runs of one lane that have not been loaded."""

    unloaded: int = 0
    cursor: str = ""
    last_turn: int = 0  #: the turn in which it was last loaded from


class RunLoader:
    """Loads queued runs. `start_run` starts one, or sets it aside: it does not raise. `has_room` says whether one more may come:
    of all runs in memory, or of those that have work to do."""

    def __init__(self, store: Store, start_run: Callable[[LoadedRun], None], has_room: Callable[[bool], bool]) -> None:
        self._store = store
        self._start_run = start_run
        self._has_room = has_room
        self._lanes: dict[Lane, _LaneCursor] = {}
        self._turn = 0
        self._requeued: deque[tuple[str, str]] = deque()  #: run and tenant
        self._loaded: deque[LoadedRun] = deque()  #: and not started
        self._paused: dict[str, list[str]] = {}  #: by tenant that may not have more now: runs that were loaded already
        self._is_loading = self._is_recovered = self._is_starting = False
        self._cancelled: set[str] = set()
        self._is_closed = False

    @property
    def queued(self) -> int:
        behind = sum(lane.unloaded for lane in self._lanes.values()) + sum(map(len, self._paused.values()))
        return behind + len(self._requeued) + len(self._loaded)

    def on_recovered(self, counts: dict[Lane, int]) -> None:
        """Runs left by an earlier server. Until they are counted no run starts: older runs start first."""
        self._is_recovered = True
        for lane, count in counts.items():
            self._lane(lane).unloaded += count
        self.load_more()

    def on_accepted(self, row: RunRow, inputs: bytes) -> None:
        """A new run is on disk; if none is ahead of it, it starts at once."""
        lane = self._lane((row.priority, row.tenant))
        if row.id <= lane.cursor:  # loaded before this was called back; or accepted by a clock that was set back, and passed over
            self.requeue(row.id, row.tenant)
            return
        is_held_up = self._requeued or self._loaded or self._is_closed or not self._is_recovered or row.tenant in self._paused
        if is_held_up or self._has_earlier(row.priority) or not self._has_room(False):
            lane.unloaded += 1
            self.load_more()
        else:
            lane.cursor = row.id
            self._start_run(LoadedRun(row, inputs, []))

    def requeue(self, id: str, tenant: str) -> None:
        """Queue a run again that was loaded before."""
        self._requeued.append((id, tenant))
        self.load_more()

    def pause_tenant(self, id: str, tenant: str, wait_s: float) -> None:
        """Pause a tenant over its limits: for so long none of its runs is tried, and then this one first."""
        if tenant not in self._paused:
            self._paused[tenant] = []
            asyncio.get_running_loop().call_later(max(MIN_PAUSE_S, wait_s), self._resume_tenant, tenant)
        self._paused[tenant].append(id)

    def _resume_tenant(self, tenant: str) -> None:
        self._requeued.extend((id, tenant) for id in self._paused.pop(tenant))
        self.load_more()

    def on_cancelled(self, id: str) -> None:
        """Skip a run that was cancelled in the store and may be on its way here."""
        if self._is_loading or self._loaded:
            self._cancelled.add(id)

    def close(self) -> None:
        """Load no more runs."""
        self._is_closed = True

    def load_more(self, exclude_waiting: bool = False) -> None:
        if self._is_closed or self._is_starting:
            return
        self._start_loaded(exclude_waiting)
        if self._is_loading or self._loaded or not self._is_recovered:
            return
        self._cancelled.clear()
        named = self._next_requeued()
        if named is not None:
            self._is_loading = True
            self._store.read(lambda db: stored.load_run(db, named[0]), lambda one: self._on_requeued(*named, one))
            return
        lane = self._next_lane()
        if lane is None or not self._has_room(exclude_waiting):
            return
        waiting = self._lanes[lane]
        after, expected = waiting.cursor, waiting.unloaded
        self._turn += 1
        waiting.last_turn = self._turn
        self._is_loading = True
        self._store.read(
            lambda db: stored.load_page(db, lane, after, PAGE_RUNS, PAGE_BYTES),
            lambda page: self._on_page(lane, expected, page),
        )

    def _start_loaded(self, exclude_waiting: bool) -> None:
        self._is_starting = True  # a run may end at once, and then more are loaded
        try:
            while self._loaded and self._has_room(exclude_waiting):
                one = self._loaded.popleft()
                if one.row.id in self._cancelled:
                    continue
                if one.row.tenant in self._paused:
                    self._paused[one.row.tenant].append(one.row.id)
                else:
                    self._start_run(one)
        finally:  # whatever becomes of one run, others are behind it
            self._is_starting = False

    def _lane(self, lane: Lane) -> _LaneCursor:
        return self._lanes.setdefault(lane, _LaneCursor())

    def _has_earlier(self, priority: int) -> bool:
        return any(
            lane.unloaded and level >= priority and tenant not in self._paused for (level, tenant), lane in self._lanes.items()
        )

    def _next_requeued(self) -> tuple[str, str] | None:
        while self._requeued:
            id, tenant = self._requeued.popleft()
            if tenant not in self._paused:
                return id, tenant
            self._paused[tenant].append(id)
        return None

    def _next_lane(self) -> Lane | None:
        """Next lane: the highest priority; among its tenants the one that was served longest ago."""
        ready = [lane for lane, waiting in self._lanes.items() if waiting.unloaded and lane[1] not in self._paused]
        return max(ready, key=lambda lane: (lane[0], -self._lanes[lane].last_turn), default=None)

    def _on_page(self, lane: Lane, expected: int, page: RunPage | LaminaError) -> None:
        if isinstance(page, LaminaError):
            asyncio.get_running_loop().call_later(RETRY_S, self._on_loaded, [])
            return
        runs, waiting = page.runs, self._lanes[lane]
        gone = expected if page.is_last else len(runs)  # if there were to be more, they have been cancelled
        waiting.unloaded = max(0, waiting.unloaded - gone)
        if runs:
            waiting.cursor = runs[-1].row.id
        self._on_loaded(runs)

    def _on_requeued(self, id: str, tenant: str, one: LoadedRun | LaminaError | None) -> None:
        if isinstance(one, LaminaError):
            self._requeued.appendleft((id, tenant))
            asyncio.get_running_loop().call_later(RETRY_S, self._on_loaded, [])
        else:
            self._on_loaded([] if one is None else [one])

    def _on_loaded(self, runs: list[LoadedRun]) -> None:
        self._is_loading = False
        self._loaded.extend(runs)
        self.load_more()
