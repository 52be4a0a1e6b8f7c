"""Events a second through the controller alone, and what one decision costs."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from types import FrameType
from typing import Any

from msgspec.structs import replace

from benchmarks.planner import BATCHES, CORES, UNITS, chain
from benchmarks.report import Report
from lamina.core.actions import Load, StartBatch, WakeAt
from lamina.core.events import BatchFinished, CallArrived, Deployed, DeviceJoined, Event, InstanceReady, Tick
from lamina.core.policy import DispatchRole
from lamina.lab.experiments import scale
from lamina.policies import edf, fifo, frontier, new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo, call_for

CALLS = 50_000
RUNS = 3
"""Of each figure; the quietest is shown, because another process may have had the core."""


def run(report: Report) -> None:
    made: dict[str, Callable[[], Any]] = {"fifo": fifo.Policy, "edf": edf.Policy, "frontier": frontier.Policy}
    for name, policy in made.items():
        for functions in (1, 100):
            events, seconds, arrival_us = min((measure(policy(), functions) for _ in range(RUNS)), key=lambda one: one[1])
            least = {("frontier", 100): 20_000.0}.get((name, functions))
            what = f"controller, {name}, {functions} functions on one 16-unit device"
            report.add(what, events / seconds, "events/s", least=least, arrival_p99_us=arrival_us)
    dispatches(report)
    crowds(report)


class Crowd:
    """Functions on a device of 16 units. One batch of eight follows another; every call goes through arrival, batch and reply."""

    def __init__(self, policy: DispatchRole, functions: int, before: Callable[[Event], None] = lambda event: None) -> None:
        self.names = [f"f{number}" for number in range(functions)]
        points = [Point(batch=1, units=1, p50_us=1_000), Point(batch=8, units=1, p50_us=2_000)]
        table = ProfileTable([Profile(function=name, device="g", points=points) for name in self.names])
        self.controller = new_controller(policy, table)
        self.slo = Slo(latency_us=10_000_000)
        self.now_us = self.handled = 0
        self.spent_s = 0.0
        self.arrivals: list[float] = []
        self._before = before
        self._running: list[int] = []
        device = DeviceSpec(id="g0", kind="g", units=16, memory_mib=10**6, limits=SliceLimits(batches_per_instance=0))
        specs = tuple(FunctionSpec(name=name, gpu="may", share=1 / 16, max_batch=8, slo=self.slo) for name in self.names)
        for event in (DeviceJoined(device), Deployed(functions=specs)):
            self.handle(event)

    def handle(self, event: Event) -> None:
        self._before(event)
        begin = time.thread_time()
        actions = self.controller.handle(self.now_us, event)
        took_s = time.thread_time() - begin
        self.spent_s += took_s
        self.handled += 1
        if isinstance(event, CallArrived):
            self.arrivals.append(took_s)
        for action in actions:
            if isinstance(action, StartBatch):
                self._running.append(action.batch_id)
            elif isinstance(action, Load):
                self.handle(InstanceReady(action.instance))

    def play(self, calls: int) -> None:
        for number in range(calls):
            self.now_us += 20
            self.handle(CallArrived(call_for(f"c{number}", self.names[number % len(self.names)], self.now_us, self.slo)))
            if number % 8 == 7 and self._running:
                self.now_us += 20
                self.handle(BatchFinished(self._running.pop(0), 1_500))


def measure(policy: DispatchRole, functions: int) -> tuple[int, float, float]:
    crowd = Crowd(policy, functions)
    crowd.play(CALLS)
    crowd.arrivals.sort()
    return crowd.handled, crowd.spent_s, crowd.arrivals[int(len(crowd.arrivals) * 0.99)] * 1e6


def dispatches(report: Report) -> None:
    """The whole of dispatching, not the look-up alone: runs of three steps with 256 configurations each, at half of the load.
    Its calls of Python functions are the same on every machine."""
    took = min((dispatch_costs(time.thread_time, seed) for seed in range(RUNS)), key=lambda one: one[int(len(one) * 0.99)])
    p99_us, p50_us = (1e6 * took[int(len(took) * part)] for part in (0.99, 0.5))
    report.add("dispatch, 3 functions x 256 configurations, p99", p99_us, "us", most=100, p50_us=p50_us)
    made = dispatch_costs(CallCounter(), seed=0, runs=500)
    p99, p50 = made[int(len(made) * 0.99)], made[len(made) // 2]
    report.add("dispatch, Python calls, p99", p99, "calls", p50=p50, mean=sum(made) / len(made))


class CallCounter:
    """A clock that counts calls of the package's own Python functions, between every other reading and the next."""

    def __init__(self) -> None:
        self.calls = 0
        self._is_counting = False

    def __call__(self) -> float:
        self._is_counting = not self._is_counting
        sys.setprofile(self._count if self._is_counting else None)
        return self.calls

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("lamina."):
            self.calls += 1


def dispatch_costs(clock: Callable[[], float], seed: int, runs: int = 1_500) -> list[float]:
    """By this clock, what the policy's dispatch takes between two decisions, the least first; the first fifth left out, in which
    plans are made."""
    flow, tables = chain(3, seed=1)
    profiles = []
    for name, own in tables.items():
        rows = [own[at] for at in range(len(own.batch))]
        points = [Point(batch=row.batch, units=row.units, cores=row.cpus, p50_us=row.time_us) for row in rows]
        profiles.append(Profile(function=name, device="g", points=points))
    controller = new_controller(frontier.Policy(), ProfileTable(profiles))
    took: list[float] = []

    class Timed:
        order = controller.policy.order

        def __init__(self, inner: DispatchRole) -> None:
            self.inner = inner

        def dispatch(self, view):  # type: ignore[no-untyped-def]
            begin = clock()
            for decision in self.inner.dispatch(view):
                took.append(clock() - begin)
                yield decision
                begin = clock()
            took.append(clock() - begin)

    controller.wrap_roles(lambda role, inner: Timed(inner) if role == "dispatch" else inner)
    limits = SliceLimits(batches_per_instance=0, sizes=UNITS)
    device = DeviceSpec(id="g", kind="g", units=UNITS[-1], memory_mib=10**6, limits=limits, cores=CORES[-1])
    device = replace(device, price_per_s=2e-4, core_price_per_s=1e-5)
    devices = [replace(device, id=f"g{at}") for at in range(4)]
    slo = Slo(latency_us=int(1.5 * sum(one[0].time_us for one in tables.values())))
    standing = ScaleSpec(min=4, max=4)
    specs = tuple(
        FunctionSpec(name=name, gpu="must", share=1 / UNITS[-1], max_batch=BATCHES[-1], scale=standing) for name in tables
    )
    pending: list[tuple[int, int, Event]] = [(0, at, DeviceJoined(device)) for at, device in enumerate(devices)]
    pending.append((0, len(pending), Deployed(specs, (flow,))))
    dice, at_us, number = random.Random(seed), 1_000_000.0, len(pending)
    for run_number in range(runs):
        at_us += dice.expovariate(1 / 150_000)
        number += 1
        pending.append((int(at_us), number, CallArrived(call_for(f"c{run_number}", flow.name, int(at_us), slo))))
    heapify(pending)
    while pending:
        now_us, _, event = heappop(pending)
        for action in controller.handle(now_us, event):
            number += 1
            if isinstance(action, Load):
                heappush(pending, (now_us, number, InstanceReady(action.instance)))
            elif isinstance(action, StartBatch):
                heappush(pending, (now_us + action.predicted_us, number, BatchFinished(action.batch_id, action.predicted_us)))
            elif isinstance(action, WakeAt) and pending:
                heappush(pending, (action.at_us, number, Tick()))
    return sorted(took[len(took) // 5 :])


def crowds(report: Report) -> None:
    """The lab's `scale` with ten thousand functions: warm, on eight devices, popularity by Zipf."""
    cell = {"sweep": "functions", "size": 10_000, "policy": "frontier", "seed": 1, "calls": 6_000, "limit_s": 20.0}
    row = scale.run(cell)
    details = {"mean_us": row["event_us"], "call_us": row["call_us"], "served": row["served"]}
    report.add("event, 10,000 functions on eight devices, p99", row["event_p99_us"], "us", most=500, **details)
