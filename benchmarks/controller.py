"""Events a second through the controller alone, and what one decision costs."""

from __future__ import annotations

import time

from benchmarks.report import Report
from lamina.core.actions import Load, StartBatch
from lamina.core.events import BatchFinished, CallArrived, Deployed, DeviceJoined, Event, InstanceReady
from lamina.policies import edf, fifo, new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits, Slo, call_for

CALLS = 50_000


def run(report: Report) -> None:
    for name, policy in (("fifo", fifo.Policy()), ("edf", edf.Policy())):
        for functions in (1, 100):
            events, seconds, arrival_us = measure(policy, functions)
            report.add(
                f"controller, {name}, {functions} functions on one 16-unit device",
                events / seconds,
                "events/s",
                arrival_p99_us=arrival_us,
            )


def measure(policy: object, functions: int) -> tuple[int, float, float]:
    """One batch of eight follows another; every call goes through arrival, batch and reply."""
    names = [f"f{number}" for number in range(functions)]
    points = [Point(batch=1, units=1, p50_us=1_000), Point(batch=8, units=1, p50_us=2_000)]
    table = ProfileTable([Profile(function=name, device="g", points=points) for name in names])
    controller = new_controller(policy, table)  # type: ignore[arg-type]
    slo = Slo(latency_us=10_000_000)
    device = DeviceSpec(id="g0", kind="g", units=16, memory_mib=10**6, limits=SliceLimits(batches_per_instance=0))
    specs = tuple(FunctionSpec(name=name, gpu="may", share=1 / 16, max_batch=8, slo=slo) for name in names)
    now_us = handled = 0
    running: list[int] = []
    spent_s = 0.0
    arrivals: list[float] = []

    def handle(event: Event) -> None:
        nonlocal handled, spent_s
        begin = time.perf_counter()
        actions = controller.handle(now_us, event)
        took_s = time.perf_counter() - begin
        spent_s += took_s
        handled += 1
        if isinstance(event, CallArrived):
            arrivals.append(took_s)
        for action in actions:
            if isinstance(action, StartBatch):
                running.append(action.batch_id)
            elif isinstance(action, Load):
                handle(InstanceReady(action.instance))

    for event in (DeviceJoined(device), Deployed(functions=specs)):
        handle(event)
    for number in range(CALLS):
        now_us += 20
        handle(CallArrived(call_for(f"c{number}", names[number % functions], now_us, slo)))
        if number % 8 == 7 and running:
            now_us += 20
            handle(BatchFinished(running.pop(0), 1_500))
    arrivals.sort()
    return handled, spent_s, arrivals[int(len(arrivals) * 0.99)] * 1e6
