"""Controller and executor in one loop of one thread, with calls made up on the spot: HTTP is not what is measured."""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lamina import policies
from lamina.core.actions import FailCall, Load, Reject, Reply, StartBatch, WakeAt
from lamina.core.events import BatchFailed, BatchFinished, CallArrived, Deployed, DeviceJoined, InstanceReady, Tick
from lamina.policies import new_controller
from lamina.predict import online
from lamina.predict.profile_table import ProfileTable
from lamina.types import FunctionSpec, call_for


@dataclass
class Outcome:
    sent: int = 0
    in_time: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0
    by_function: Counter[str] = field(default_factory=Counter)  #: in time
    sent_to: Counter[str] = field(default_factory=Counter)
    latencies_us: list[int] = field(default_factory=list)
    batches: int = 0
    items: int = 0
    device_us: int = 0  #: on slices, all batches together
    unit_us: int = 0  #: the same, times the units each had
    longest_turn_us: int = 0  #: how long an event may have had to wait for the loop
    missed_at: Counter[int] = field(default_factory=Counter)  #: by tenth of a second of their arrival: one stall, or all along?
    busy_us: int = 0  #: in turns that had something to do
    wall_us: int = 1

    @property
    def attained(self) -> float:
        return self.in_time / max(1, self.sent)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class InProcess:
    def __init__(
        self,
        slicer: Any,
        executor: Any,
        functions: list[FunctionSpec],
        items: dict[str, Any],
        policy: str = "edf",
        device: Any = None,
        profiles: list[Any] | None = None,
        places: dict[str, int] | None = None,
        options: dict[str, Any] | None = None,
        soft: frozenset[str] = frozenset(),
    ) -> None:
        self.executor, self.items = executor, items
        self.places = places or {}  #: functions that always run on this mask, whatever the controller calls it
        table = ProfileTable(profiles or [], margin=0.02)
        self.controller = new_controller(policies.build(policy, options or {}), online.OnlinePredictor(table, soft))
        self.device = device or slicer.device
        self.specs = {spec.name: spec for spec in functions}
        self._ticks: list[int] = []
        self._batches: dict[int, int] = {}
        self._units: dict[int, int] = {}
        self._begin_ns = time.perf_counter_ns()
        self._todo: list[Any] = []
        self._calls = self._opened_us = 0
        self._arrived: dict[str, tuple[str, int]] = {}
        self.outcome = Outcome()
        self._act(self.controller.handle(self.now_us(), DeviceJoined(self.device)))
        self._act(self.controller.handle(self.now_us(), Deployed(functions=tuple(functions))))

    def now_us(self) -> int:
        return (time.perf_counter_ns() - self._begin_ns) // 1000

    def call(self, name: str, at_us: int, more: bool = False) -> None:
        """`more`: others have come by now too, and what to do is decided once for all of them, as the server does."""
        self._calls += 1
        call = call_for(f"c{self._calls}", name, at_us, self.specs[name].slo)
        self._arrived[call.id] = (name, at_us)
        self.outcome.sent += 1
        self.outcome.sent_to[name] += 1
        self._handle(CallArrived(call, more))

    def turn(self) -> None:
        """What has ended, then what is due."""
        for done in self.executor.poll():
            batch = self._batches.pop(done.ticket, None)
            if batch is not None:
                units = self._units.pop(batch, 1)
                self.outcome.device_us += done.device_us
                self.outcome.unit_us += units * done.device_us
                self._handle(BatchFinished(batch, done.device_us) if done.error is None else BatchFailed(batch, "failed"))
        now_us = self.now_us()
        if self._ticks and self._ticks[0] <= now_us:
            while self._ticks and self._ticks[0] <= now_us:
                heapq.heappop(self._ticks)
            self._handle(Tick())

    def _handle(self, event: Any) -> None:
        self._act(self.controller.handle(self.now_us(), event))
        while self._todo:
            self._act(self.controller.handle(self.now_us(), self._todo.pop()))

    def _act(self, actions: list[Any]) -> None:
        outcome = self.outcome
        for action in actions:
            kind = type(action)
            if kind is StartBatch:
                count = len(action.jobs)
                mask = self.places.get(action.function, action.mask)
                self._batches[self.executor.submit(action.function, [self.items[action.function]] * count, mask)] = (
                    action.batch_id
                )
                self._units[action.batch_id] = mask.bit_count()
                outcome.batches += 1
                outcome.items += count
            elif kind is WakeAt:
                heapq.heappush(self._ticks, action.at_us)
            elif kind is Reply:
                name, at_us = self._arrived.pop(action.call_id)
                latency_us = self.now_us() - at_us
                outcome.latencies_us.append(latency_us)
                goal_us = self.specs[name].slo.latency_us
                if goal_us and latency_us > goal_us:
                    outcome.late += 1
                    outcome.missed_at[(at_us - self._opened_us) // 100_000] += 1
                else:
                    outcome.in_time += 1
                    outcome.by_function[name] += 1
            elif kind is Reject or kind is FailCall:
                _, at_us = self._arrived.pop(action.call_id)
                outcome.missed_at[(at_us - self._opened_us) // 100_000] += 1
                outcome.refused += kind is Reject
                outcome.failed += kind is FailCall
            elif kind is Load:
                self._todo.append(InstanceReady(action.instance, 1000))

    def closed(self, name: str, callers: int, seconds: float) -> tuple[float, float]:
        """(batches a second, processor time by wall time): every caller calls again as soon as it has its answer."""
        for _ in range(callers):
            self.call(name, self.now_us())
        begin, processor = time.perf_counter(), time.process_time()
        started = self.outcome.batches
        while time.perf_counter() - begin < seconds:
            self.turn()
            for _ in range(callers - len(self._arrived)):
                self.call(name, self.now_us())
        took = time.perf_counter() - begin
        rate = (self.outcome.batches - started) / took
        share = (time.process_time() - processor) / took
        self.finish()
        return rate, share

    def open(self, rates: dict[str, float], seconds: float, seed: int = 0) -> Outcome:
        """Poisson arrivals; a call that the loop comes to late has waited all the same."""
        rng = random.Random(seed)
        gc.collect()
        gc.freeze()  # what is loaded stays, as in a worker: a full collection takes longer than any goal here
        self.outcome = Outcome()
        self._opened_us = begin_us = self.now_us() + 1000
        heap = [(begin_us + rng.expovariate(rate) * 1e6, name) for name, rate in rates.items()]
        heapq.heapify(heap)
        ends_us = begin_us + seconds * 1e6
        while heap[0][0] < ends_us:
            turned_us, events = self.now_us(), self.outcome.sent + self.outcome.batches + len(self._batches)
            if turned_us - heap[0][0] > 500_000:  # hopeless: the loop itself cannot follow
                break
            while heap[0][0] <= turned_us:
                at_us, name = heap[0]
                heapq.heapreplace(heap, (at_us + rng.expovariate(rates[name]) * 1e6, name))
                self.call(name, int(at_us), more=heap[0][0] <= turned_us)
            self.turn()
            took_us = self.now_us() - turned_us
            if events != self.outcome.sent + self.outcome.batches + len(self._batches):
                self.outcome.busy_us += took_us
            self.outcome.longest_turn_us = max(self.outcome.longest_turn_us, took_us)
        self.outcome.wall_us = max(1, self.now_us() - begin_us)
        self.finish()
        return self.outcome

    def finish(self) -> None:
        ends_s = time.perf_counter() + 5
        while self._arrived and time.perf_counter() < ends_s:
            self.turn()
        while self._batches and time.perf_counter() < ends_s:
            self.turn()
