"""Arrival processes: seeded streams of arrival times in whole microseconds, one at a time, never a list.

Every generated stream is the same two things. A *pulse*, gaps of mean one with a coefficient of variation that says how bursty
it is (0 even, 1 Poisson, above 1 bunched), and a *rate*, straight pieces over time. Arrival k stands where the rate has
added up to the k-th point of the pulse. So a ramp can be Poisson, even or bursty without a line of code for each.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Iterable, Iterator
from heapq import heapify, heapreplace
from heapq import heappop as _heappop
from pathlib import Path

from msgspec import Struct

from lamina.core.actions import Reject
from lamina.drivers.driver import Ending
from lamina.errors import BadValue, read_user_file, unreadable_file
from lamina.types import NEVER_US, Call, Objective, Slo, call_for


class RateSegment(Struct, frozen=True):
    """A span of time over which the rate is linear."""

    span_us: int
    from_per_s: float
    to_per_s: float


class Workload(Struct, frozen=True, kw_only=True):
    """Workload of one target: generated arrivals, a recorded trace, a list of times, or clients that wait for each answer."""

    target: str
    segments: tuple[RateSegment, ...] = ()
    cv: float = 1.0
    trace: str = ""  #: path of a recording, instead of `segments`
    at_us: tuple[int, ...] = ()  #: the times themselves, in order, instead of either
    speedup: float = 1.0
    loop: bool = False
    clients: int = 0  #: so many that wait for each answer before they ask again, instead of any of these
    think_us: int = 0  #: how long such a client waits on average after an answer
    start_us: int = 0
    stop_us: int = NEVER_US
    slo: Slo | None = None  #: in place of the target's own
    tenant: str = ""
    priority: int = 0
    objective: Objective = ""

    @property
    def is_endless(self) -> bool:
        return self.stop_us >= NEVER_US and (
            bool(self.clients) or self.loop or any(piece.span_us >= NEVER_US for piece in self.segments)
        )

    def arrivals(self, rng: random.Random) -> Iterator[int]:
        if self.clients:
            times = iter([0] * self.clients)  # the first call of each; `ClosedLoopClients` has the others
        elif self.at_us:
            times = iter(self.at_us)
        elif self.trace:
            times = replay_trace(self.trace, self.speedup, loop=self.loop)
        else:
            times = arrivals_along(self.segments, self.cv, rng)
        if not self.start_us and self.stop_us >= NEVER_US:
            return times
        return _shifted_until(times, self.start_us, self.stop_us)


def poisson(rate_per_s: float, rng: random.Random) -> Iterator[int]:
    """Poisson arrivals. An open-coded `expovariate`: this line runs once per simulated call."""
    scale_us, at_us, log, draw = -1e6 / rate_per_s, 0.0, math.log, rng.random
    while True:
        at_us += scale_us * log(1.0 - draw())
        yield int(at_us)


def gamma(rate_per_s: float, cv: float, rng: random.Random) -> Iterator[int]:
    """Gamma arrivals: bursty (cv > 1) or regular (cv < 1) at the same mean rate."""
    return arrivals_along((_constant_segment(NEVER_US, rate_per_s),), cv, rng)


def constant(rate_per_s: float) -> Iterator[int]:
    """One call every 1/rate, the first at once."""
    return arrivals_along((_constant_segment(NEVER_US, rate_per_s),), 0.0, random.Random(0))


def steps(stages: Iterable[tuple[int, float]]) -> tuple[RateSegment, ...]:
    """Stages of (microseconds, calls a second), each at its own constant rate."""
    return tuple(_constant_segment(span_us, rate) for span_us, rate in stages)


def ramp(stages: Iterable[tuple[int, float]], from_per_s: float = 0.0) -> tuple[RateSegment, ...]:
    """Stages of (microseconds, calls a second), each moving from the rate of the one before to its own."""
    pieces = []
    for span_us, rate in stages:
        pieces.append(RateSegment(span_us, from_per_s, rate))
        from_per_s = rate
    return tuple(pieces)


def _constant_segment(span_us: int, rate_per_s: float) -> RateSegment:
    return RateSegment(span_us, rate_per_s, rate_per_s)


def read_hasgpu(path: str | Path) -> tuple[RateSegment, ...]:
    """The rate of one HAS-GPU workload file: `step` or `ramp` stages, as its `arrival` says."""
    written = read_user_file(path, "see data/has-gpu/README.md")
    try:
        content = json.loads(written)
        shape = str(content["arrival"]).partition(":")[0]
        stages = [(round(content["stage_seconds"] * 1e6), float(rate)) for rate in content["rps_per_stage"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadValue(f"{path}: not a HAS-GPU workload: {error!r}", hint="see data/has-gpu/README.md") from None
    if shape not in ("step", "ramp"):
        raise BadValue(f"{path}: arrival {shape!r} is neither step nor ramp", hint="see data/has-gpu/README.md")
    return steps(stages) if shape == "step" else ramp(stages)


def arrivals_along(pieces: tuple[RateSegment, ...], cv: float, rng: random.Random) -> Iterator[int]:
    """Arrivals with a rate that follows `pieces` and gaps that vary by `cv`."""
    if cv == 1.0 and len(pieces) == 1 and pieces[0].span_us >= NEVER_US:
        return poisson(pieces[0].from_per_s, rng)
    return _warp(pieces, _pulse(cv, rng))


def _pulse(cv: float, rng: random.Random) -> Iterator[float]:
    """Increasing numbers with gaps of mean one. An even pulse starts at once, as a load generator does."""
    if cv == 0.0:
        count = 0
        while True:
            yield float(count)
            count += 1
    shape, scale, at = 1 / cv**2, cv**2, 0.0
    while True:
        at += rng.expovariate(1.0) if cv == 1.0 else rng.gammavariate(shape, scale)
        yield at


def _warp(pieces: Iterable[RateSegment], pulse: Iterator[float]) -> Iterator[int]:
    """Solve `rate added up until t = point` for each point; within a piece that is a quadratic equation."""
    begin_us, before = 0, 0.0
    point = next(pulse)
    for piece in pieces:
        span_s = piece.span_us / 1e6
        mass = span_s * (piece.from_per_s + piece.to_per_s) / 2
        bend = (piece.to_per_s - piece.from_per_s) / span_s
        while point < before + mass - 1e-9:
            inside = point - before
            root = math.sqrt(max(0.0, piece.from_per_s**2 + 2 * bend * inside))
            within_s = 2 * inside / (piece.from_per_s + root) if inside > 0 else 0.0
            yield begin_us + int(within_s * 1e6)
            point = next(pulse)
        begin_us += piece.span_us
        before += mass


def replay_trace(path: str | Path, speedup: float = 1.0, *, loop: bool = False) -> Iterator[int]:
    """Arrival times of a recorded trace, `speedup` times faster; with `loop` it starts over a mean gap after its end."""
    offset_us = 0.0
    while True:
        last_us, count = 0.0, 0
        for at_us in _trace_times(path):
            if at_us < last_us:
                raise BadValue(f"{path}: row {count + 1} is earlier than the one before", hint="sort the trace by time")
            last_us = at_us
            count += 1
            yield int(offset_us + at_us / speedup)
        if not loop or not count or not last_us:
            return
        offset_us += last_us / speedup * (count + 1) / count


def _trace_times(path: str | Path) -> Iterator[float]:
    """Times in a CSV file with a `t_us` column, or `end_s` and `duration_s` ones; it may be compressed (.gz)."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            if "t_us" in header:
                place = header.index("t_us")
                for row in rows:
                    yield float(row[place])
            elif "end_s" in header and "duration_s" in header:
                end, duration = header.index("end_s"), header.index("duration_s")
                for row in rows:
                    yield (float(row[end]) - float(row[duration])) * 1e6
            else:
                raise BadValue(f"{path}: no column of times", hint="the first line names a column t_us")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_file(path, error, "give a CSV file, plain or .gz") from None
    except EOFError:
        raise BadValue(f"{str(path)!r} is cut off", hint="give a CSV file, plain or .gz") from None
    except (ValueError, IndexError) as error:
        raise BadValue(f"{path}: {error}", hint="every row needs a number in the column of times") from None


def _shifted_until(times: Iterator[int], start_us: int, stop_us: int) -> Iterator[int]:
    for at_us in times:
        if at_us + start_us >= stop_us:
            return
        yield at_us + start_us


def merge_calls(loads: Iterable[tuple[Workload, Slo, random.Random]], until_us: int = NEVER_US) -> Iterator[Call]:
    """All loads as one stream of calls in order of arrival; equal times keep the order of the loads."""
    streams = []
    heads: list[tuple[int, int]] = []
    for place, (load, slo, rng) in enumerate(loads):
        times = load.arrivals(rng)
        bare = call_for("", load.target, 0, load.slo or slo)
        streams.append((times, load.target, bare.deadline_us, bare.expires_us, load.tenant, load.priority, load.objective))
        first = next(times, None)
        if first is not None:
            heads.append((first, place))
    heapify(heads)
    number = 0
    while heads:
        at_us, place = heads[0]
        if at_us >= until_us:
            return
        times, target, goal_us, patience_us, tenant, priority, objective = streams[place]
        number += 1
        due_us, expires_us = at_us + goal_us, at_us + patience_us
        yield Call(f"c{number}", target, at_us, due_us, expires_us, tenant, priority, objective=objective)
        following = next(times, None)
        if following is None:
            _heappop(heads)
        else:
            heapreplace(heads, (following, place))


RETRY_US = 10_000
"""A closed-loop client that is turned away asks again no sooner than this."""


class ClosedLoopClients:
    """Clients that send their next call when the last one has ended, until `until_us`. Clients of one load are alike, so which of
    them a call belongs to is not kept, only its load."""

    def __init__(self, loads: Iterable[tuple[Workload, Slo, random.Random]], until_us: int) -> None:
        self._loads = [(load, slo, rng) for load, slo, rng in loads if load.clients]
        self._places = {(load.target, load.tenant): place for place, (load, _, _) in enumerate(self._loads)}
        self._until_us = until_us
        self._open: dict[str, int] = {}  #: call -> its load
        self._sent = 0

    def __bool__(self) -> bool:
        return bool(self._loads)

    def observe(self, call: Call) -> None:
        """Note a first call; loads on the same target are told apart by their tenant."""
        place = self._places.get((call.target, call.tenant))
        if place is not None:
            self._open[call.id] = place

    def follow_up(self, now_us: int, ending: Ending) -> Call | None:
        place = self._open.pop(ending.call_id, None)
        if place is None:
            return None
        load, slo, rng = self._loads[place]
        pause_us = int(rng.expovariate(1 / load.think_us)) if load.think_us else 0
        if isinstance(ending, Reject):
            pause_us = max(pause_us, ending.retry_after_us, RETRY_US)
        at_us = now_us + pause_us
        if at_us >= min(self._until_us, load.stop_us):
            return None
        self._sent += 1
        id = f"r{self._sent}"
        call = call_for(
            id, load.target, at_us, load.slo or slo, tenant=load.tenant, priority=load.priority, objective=load.objective
        )
        self._open[call.id] = place
        return call
