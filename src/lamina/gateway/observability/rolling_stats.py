"""Rolling statistics of the last seconds: how much of each device functions held and used, and latencies of calls.

Held is the time a slice was leased to a batch, used the time the device measured for it: the gap between the two is what
hand-overs cost. Kept in one-second bins, because `top` asks for the recent past and nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from lamina.core.actions import StartBatch

WINDOW_S = 10
MAX_CALLS = 2_000


@dataclass(slots=True)
class _Batch:
    device: str
    function: str
    units: int
    jobs: int
    begin_us: int
    cores: int = 0
    part: float = 1.0  #: of its units


@dataclass(slots=True, frozen=True)
class BatchUsage:
    """Usage of one finished batch; held and used are in unit-microseconds."""

    function: str
    device: str
    jobs: int
    held: int
    used: int
    units: int
    cores: int
    device_us: int
    part: float = 1.0  #: of these units: others had the rest


@dataclass(slots=True)
class UsageShare:
    """Usage of one function on one device, in unit-microseconds."""

    held: int = 0
    used: int = 0
    batches: int = 0
    jobs: int = 0


Replies = deque[tuple[int, int, bool]]


class RollingStats:
    """Usage by device and function in one-second bins, and the latest replies by target."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, dict[tuple[str, str], UsageShare]]] = deque()
        self._running: dict[int, _Batch] = {}
        self._followers: dict[int, _Batch] = {}  #: booked ones, by the batch whose slice they take over
        self._replies: dict[str, Replies] = {}

    def on_batch_started(self, now_us: int, action: StartBatch) -> None:
        units = action.mask.bit_count()
        place = (action.device, action.function, units, len(action.jobs), now_us, action.cores, action.part)
        batch = self._running[action.batch_id] = _Batch(*place)
        if action.behind in self._running:
            self._followers[action.behind] = batch
        if len(self._running) > 10_000:  # batches that were lost never finish
            self._running.clear()
            self._followers.clear()

    def on_batch_finished(self, now_us: int, batch_id: int, device_us: int) -> BatchUsage | None:
        """The usage of this batch, if its start was seen."""
        batch = self._running.pop(batch_id, None)
        if batch is None:
            return None
        key = (batch.device, batch.function)
        second, shares = self._bins[-1] if self._bins else (-1, {})
        if second != now_us // 1_000_000:
            shares = self._new_bin(now_us)
        share = shares.get(key)
        if share is None:
            share = shares[key] = UsageShare()
        held_us = max(device_us, now_us - batch.begin_us)
        held, used = batch.units * held_us, batch.units * device_us
        if batch.part < 1.0:
            held, used = int(held * batch.part), int(used * batch.part)
        share.held += held
        share.used += used
        share.batches += 1
        share.jobs += batch.jobs
        follower = self._followers.pop(batch_id, None)
        if follower is not None:  # it was booked, and holds its slice only from now on
            follower.begin_us = now_us
        where = (batch.function, batch.device, batch.jobs)
        return BatchUsage(*where, held, used, batch.units, batch.cores, device_us, batch.part)

    def replies_of(self, target: str) -> Replies:
        """The latest replies of a target, to be appended to: when, latency, and whether in time."""
        return self._replies.setdefault(target, deque(maxlen=MAX_CALLS))

    def usage_shares(self, now_us: int) -> tuple[float, dict[tuple[str, str], UsageShare]]:
        """Seconds covered, and the usage of each (device, function) in them."""
        self._drop_old(now_us)
        total: dict[tuple[str, str], UsageShare] = {}
        for _, shares in self._bins:
            for key, share in shares.items():
                into = total.setdefault(key, UsageShare())
                into.held += share.held
                into.used += share.used
                into.batches += share.batches
                into.jobs += share.jobs
        return max(1e-6, min(WINDOW_S, now_us / 1e6)), total

    def reply_rate(self, now_us: int, target: str) -> float:
        """Replies a second in the last minute, as `call_stats` has them, without a look at each."""
        replies = self._replies.get(target)
        while replies and now_us - replies[0][0] > 60_000_000:
            replies.popleft()
        return round(len(replies) / max(1.0, (now_us - replies[0][0]) / 1e6), 2) if replies else 0.0

    def call_stats(self, now_us: int, target: str) -> dict[str, Any]:
        """Reply statistics of the last minute, at most the latest two thousand."""
        found = [entry for entry in self._replies.get(target, ()) if now_us - entry[0] <= 60_000_000]
        if not found:
            return {"answers": 0, "per_s": 0.0, "met": None, "p50_ms": None, "p99_ms": None}
        times = sorted(entry[1] for entry in found)
        span_s = max(1.0, (now_us - found[0][0]) / 1e6)
        return {
            "answers": len(found),
            "per_s": round(len(found) / span_s, 2),
            "met": round(sum(entry[2] for entry in found) / len(found), 4),
            "p50_ms": times[len(times) // 2] / 1000,
            "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] / 1000,
        }

    def _new_bin(self, now_us: int) -> dict[tuple[str, str], UsageShare]:
        self._drop_old(now_us)
        self._bins.append((now_us // 1_000_000, {}))
        return self._bins[-1][1]

    def _drop_old(self, now_us: int) -> None:
        while self._bins and self._bins[0][0] <= now_us // 1_000_000 - WINDOW_S:
            self._bins.popleft()
