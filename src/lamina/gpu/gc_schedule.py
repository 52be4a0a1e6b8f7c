"""Garbage collection schedule of the executor: full collections run when the executor is idle.

A full collection holds the interpreter, and so every batch. While a function is loaded it takes 100 to 280 ms, for what has
just been imported is a million objects, and it came every other second (measured on an H200, five models). Once a function is
ready all of it is frozen, and collections take a few milliseconds again. What was garbage then, or is since its function left, is
found when the executor has been idle for a while.
"""

from __future__ import annotations

import gc

IDLE_COLLECT_AFTER, FORCED_COLLECT_AFTER = 10, 100
"""Middle collections since the last full one: enough to have one when idle; so many that calls have to wait for one."""

QUIET_S = 1.0
"""Nothing has been served for so long: time to look at what is frozen, too."""


def disable_full_collections() -> None:
    """Turn off automatic full collections; `GcSchedule` has them. Most garbage is young, and found as ever."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 10**9)


class GcSchedule:
    """Decides when to collect. `now_s` is any clock that goes forward."""

    def __init__(self) -> None:
        self._busy_s = 0.0  #: when there was a batch or a load last
        self._pending_since_s: float | None = None  #: since when there may be garbage among what is frozen
        self._captured_s: float | None = None  #: when the last graph was captured, if memory was not given back since

    @property
    def has_pending(self) -> bool:
        return self._pending_since_s is not None

    def on_loaded(self, now_s: float) -> None:
        """Freeze what is loaded: it stays, and the collector need not scan it again."""
        gc.freeze()
        self._pending_since_s = now_s

    def on_unloaded(self, now_s: float) -> None:
        """Note that some of what is frozen may be garbage now."""
        self._pending_since_s = now_s

    def on_captured(self, now_s: float) -> None:
        """Note that no graph is left to capture: workspaces and buffers of captures can go back to the device."""
        self._captured_s = now_s

    def collect_if_due(self, now_s: float, *, is_idle: bool, is_loading: bool) -> bool:
        """Collect, if it is due. Returns whether it is time to give memory back to the device."""
        if is_loading or not is_idle:
            self._busy_s = now_s
        since = gc.get_count()[2]
        if self._pending_since_s is not None and now_s - max(self._busy_s, self._pending_since_s) > QUIET_S:
            had = gc.get_stats()[2]["collections"]
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            if gc.get_stats()[2]["collections"] == had:  # another thread was at a collection, so there was none: next time
                return False
            self._pending_since_s = self._captured_s = None
            return True
        if self._captured_s is not None and now_s - max(self._busy_s, self._captured_s) > QUIET_S:
            self._captured_s = None
            return True
        if not is_loading and (since >= FORCED_COLLECT_AFTER or (is_idle and since >= IDLE_COLLECT_AFTER)):
            gc.collect()
        return False
