"""`python -m benchmarks.gpu.twin`: `five.py` in virtual time, to find out where a call loses time, and which slices to use.

Simulated. The controller and the policy are the real ones; batches take what `data/h200` says, times what neighbours cost
there: on hard slices 1.12x beside one and 1.30x beside four; on soft ones and plain streams each of n batches has an n-th of the
units, and neighbours cost 1.07x to 1.22x on top, which gives the times measured on lanes of an H200 within 7 %. The host takes
its time for every event and every launch. Then it is run again with one of these left out.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.apart import BUCKETS, catalogue, places
from benchmarks.gpu.five import OPTIONS, SOFT, WAYS, capacity, profiles, specs_for
from benchmarks.gpu.inprocess import InProcess, Outcome
from benchmarks.gpu.zoo import FIVE
from lamina.core.actions import StartBatch
from lamina.planner.interference import ColocatedBatch
from lamina.sim.colocation import BatchWork, ColocatedBatches
from lamina.types import DeviceSpec

BESIDE = (1.0, 1.0, 1.12, 1.18, 1.24, 1.30, 1.33, 1.36, 1.38)
"""How many times longer a batch takes while so many run; the first two are none and it alone."""

AMONG = (1.0, 1.0, 1.07, 1.13, 1.18, 1.22, 1.25, 1.28, 1.30, 1.32, 1.34, 1.36, 1.38, 1.40, 1.42, 1.44)
"""The same where they share all SMs, on top of having an n-th of them."""

EVENT_US, LAUNCH_US, NOISE = 25, 60, 0.02
UNITS = 15
NEVER = 1e18

Table = dict[str, dict[tuple[int, int], float]]


@dataclass
class Neighbours:
    """What a batch takes, and how many times longer beside others."""

    table: Table
    beside: tuple[float, ...]
    soft: bool
    _known: dict[tuple[str, int, float], float] = field(default_factory=dict)

    def slowdown(self, one: ColocatedBatch, others: Sequence[ColocatedBatch], kind: str) -> float:
        return self.takes_us(one, len(others) + 1) / self.takes_us(one, 1)

    def takes_us(self, one: ColocatedBatch, count: int) -> float:
        """All of it, while so many run."""
        units = max(1.0, UNITS / count) if self.soft else float(round(one.share * UNITS))
        key = (one.function, one.batch, units)
        if key not in self._known:
            self._known[key] = self._alone_us(*key) + 10
        return self._known[key] * self.beside[min(count, len(self.beside) - 1)]

    def _alone_us(self, name: str, bucket: int, units: float) -> float:
        """Between two sizes that were measured, a straight line in 1/units."""
        table = self.table[name]
        sizes = [size for batch, size in table if batch == bucket]
        low, high = max(size for size in sizes if size <= units), min(size for size in sizes if size >= units)
        part = (1 / units - 1 / high) / (1 / low - 1 / high) if low != high else 1.0
        return part * table[bucket, low] + (1 - part) * table[bucket, high]


class Virtual:
    """An executor whose batches take their time and nothing else. Those of one slice run one after the other."""

    def __init__(self, table: Table, beside: tuple[float, ...] = BESIDE, soft: bool = False) -> None:
        self.over: list[Any] = []
        self._neighbours = Neighbours(table, beside, soft)
        self._crowd = ColocatedBatches(self._neighbours, "h200")
        self._rng = random.Random(1)
        self._at_us = self._tickets = 0
        self._last: dict[int, int] = {}  #: by slice: its last batch

    def submit(self, name: str, inputs: list[Any], mask: int) -> int:
        self._tickets += 1
        bucket = next(size for size in BUCKETS if size >= len(inputs))
        running = ColocatedBatch(name, bucket, mask.bit_count() / UNITS)
        work_us = round(self._neighbours.takes_us(running, 1) * (1 + abs(self._rng.gauss(0, NOISE))))
        self._crowd.add(self._at_us, BatchWork(self._tickets, running, self._at_us, self._last.get(mask, 0), 0, work_us))
        self._last[mask] = self._tickets
        return self._tickets

    def next_us(self) -> float:
        return min(NEVER, float(self._crowd.next_us))

    def advance(self, to_us: float) -> None:
        self._at_us = max(self._at_us, int(to_us))
        self._crowd.advance(self._at_us)
        for ended in self._crowd.take_finished():
            self.over.append(SimpleNamespace(ticket=ended.batch_id, device_us=ended.device_us, error=None))

    def poll(self) -> list[Any]:
        over, self.over = self.over, []
        return over


class Twin(InProcess):
    """The loop in virtual time: the host is busy for as long as it was measured to be."""

    def __init__(self, *arguments: Any, host: float = 1.0) -> None:
        self._clock_us, self._host = 0.0, host
        super().__init__(*arguments)

    def now_us(self) -> int:
        return int(self._clock_us)

    def _handle(self, event: Any) -> None:
        self._clock_us += EVENT_US * self._host
        super()._handle(event)

    def _act(self, actions: list[Any]) -> None:
        self._clock_us += LAUNCH_US * self._host * sum(type(action) is StartBatch for action in actions)
        self.executor.advance(self._clock_us)
        super()._act(actions)

    def open(self, rates: dict[str, float], seconds: float, seed: int = 0) -> Outcome:
        rng = random.Random(seed)
        self.outcome = Outcome()
        begin_us = self._clock_us + 1000
        self._opened_us = int(begin_us)
        heap = [(begin_us + rng.expovariate(rate) * 1e6, name) for name, rate in rates.items()]
        heapq.heapify(heap)
        ends_us = begin_us + seconds * 1e6
        while True:
            arrival_us = heap[0][0] if heap[0][0] < ends_us else NEVER
            ready_us = self._clock_us if self.executor.over else self.executor.next_us()
            next_us = min(arrival_us, ready_us, self._ticks[0] if self._ticks else NEVER)
            if next_us >= NEVER or next_us > ends_us + 1e6 or (arrival_us == NEVER and not self._arrived):
                break
            self._clock_us = max(self._clock_us, next_us)
            self.executor.advance(self._clock_us)
            if arrival_us <= self._clock_us:
                name = heap[0][1]
                heapq.heapreplace(heap, (arrival_us + rng.expovariate(rates[name]) * 1e6, name))
                self.call(name, int(arrival_us))
            self.executor.advance(self._clock_us)
            self.turn()
        self.outcome.wall_us = max(1, int(self._clock_us - begin_us))
        return self.outcome


@dataclass(frozen=True)
class Case:
    kind: str
    units: int = 3
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)
    policy: str = "edf"
    host: float = 1.0
    beside: tuple[float, ...] = ()


CASES = {
    "a stream per model": Case("streams"),
    "5 hard slices": Case("hard"),
    "3 hard slices": Case("hard", units=5),
    "5 soft slices": Case("soft"),
    "3 soft slices": Case("soft", units=5),
    "7 soft slices": Case("soft", units=2),
    "5 soft slices, frontier": Case("soft", policy="frontier", options={}),
    "5 soft slices, neighbours cost nothing but SMs": Case("soft", beside=(1.0, 1.0)),
    "5 soft slices, the host takes no time": Case("soft", host=0.0),
}


def tried(factor: int, case: Case) -> Any:
    profile_list, table = profiles()
    soft = case.kind != "hard"
    limits = catalogue(case.units, soft=case.kind == "soft")
    device = DeviceSpec(id="gpu0", kind="h200", units=UNITS, memory_mib=140_000, limits=limits, owned=True)
    fixed = case.kind == "streams"
    specs = specs_for(factor, case.units or 3, fixed=fixed)
    beside = case.beside or (AMONG if soft else BESIDE)

    def one(rate: float, seed: int = 1) -> Outcome:
        slicer = SimpleNamespace(device=device)
        known = (profile_list, places() if fixed else None, case.options, SOFT)
        items = dict.fromkeys(FIVE, 0)
        loop = Twin(slicer, Virtual(table, beside, soft), specs, items, case.policy, device, *known, host=case.host)
        loop.open(dict.fromkeys(FIVE, rate), 0.25)
        return loop.open(dict.fromkeys(FIVE, rate), 2.0, seed=seed)

    return one


def main() -> None:
    factors = [int(word) for word in sys.argv[1:]] or [5]
    rows = []
    for factor in factors:
        for what, case in CASES.items():
            guess = WAYS["streams" if case.kind == "streams" else "soft"].guess[factor]
            rate, outcome = capacity(tried(factor, case), guess)
            found = outcome or Outcome()
            row = {"factor": factor, "what": what, "calls_s": round(rate), "refused": found.refused}
            row |= {"dropped": found.failed, "late": found.late, "batch": round(found.items / max(1, found.batches), 2)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            Path("results/gpu/twin.json").write_text(json.dumps({"simulated": True, "seed": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
