"""A value from one step to the next: in shared memory, against copies through the gateway and against plain calls.

`workflow` is the time of a workflow of two steps on real workers, loop and all but HTTP. `sockets` is the same with shared memory
switched off: the value then travels to the gateway and on in frames. `client` is a client that calls one function, gets the
value over HTTP and sends it to the other. `plain` is two Python calls. Medians; everything else in the run is the same.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import lamina
from benchmarks.report import Report
from benchmarks.servers import APPS
from lamina import encoding, policies
from lamina.bootstrap import open_local
from lamina.core.actions import Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.cpu import CpuEngine
from lamina.engines.process_engine import WorkerLimits
from lamina.gateway.bootstrap import open_gateway
from lamina.policies import new_controller
from lamina.predict import online
from lamina.predict.profile_table import ProfileTable
from lamina.sdk.app_loader import load_app
from lamina.types import Slo, call_for
from lamina.values.run_values import RunValues

APP = str(APPS / "handover.py")
SIZES = {"1 KB": 1_000, "600 KB": 600_000, "20 MB": 20_000_000}
TRIES = {"1 KB": 300, "600 KB": 200, "20 MB": 40}
GOAL_FROM = 600_000
NO_MEMORY = WorkerLimits(pool_bytes=0, worker_pool_bytes=0, spill_bytes=0, worker_spill_bytes=0)

Times = dict[str, float]


def run(report: Report) -> None:
    shared = asyncio.run(_workflow(WorkerLimits()))
    sockets = asyncio.run(_workflow(NO_MEMORY))
    client = asyncio.run(_client())
    plain = _plain()
    for name, size in SIZES.items():
        details = {"workflow_ms": shared[name], "sockets_ms": sockets[name], "client_ms": client[name], "plain_ms": plain[name]}
        goal = {"least": 3.0} if size >= GOAL_FROM else {}
        report.add(f"{name}: copying through the gateway, of shared memory", client[name] / shared[name], "x", **goal, **details)
        moved, copied = (times[name] - times["1 KB"] for times in (shared, sockets))
        if size >= GOAL_FROM:
            report.add(f"{name}: the copy alone, frames of shared memory", copied / max(moved, 1e-3), "x", least=3.0)
        report.add(f"{name}: a workflow over two plain calls", shared[name] - plain[name], "ms")


async def _workflow(limits: WorkerLimits) -> Times:
    app = load_app(APP)
    engine = CpuEngine(APP, limits=limits)
    controller = new_controller(policies.build("edf"), online.OnlinePredictor(ProfileTable([])))
    slots = engine.references
    loop = RealtimeDriver(controller, engine, RunValues(slots.pool, slots.reader, slots.release))
    await loop.start(app.deployed())
    count = 0

    async def once(size: int) -> None:
        nonlocal count
        count += 1
        done: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        call = call_for(f"c{count}", "hand_over", loop.now_us(), Slo(timeout_us=60_000_000))
        loop.submit(call, {"size": encoding.encode(size)}, done.set_result)
        assert isinstance(await done, Reply)

    try:
        return {name: await _median(once, size, TRIES[name]) for name, size in SIZES.items()}
    finally:
        await loop.stop()


async def _client() -> Times:
    gateway = await open_gateway(open_local(APP))
    try:
        async with lamina.AsyncClient(gateway.url) as client:

            async def once(size: int) -> None:
                value = await client.call("make", {"size": size}, kind="functions")
                await client.call("take", {"x": value}, kind="functions")

            return {name: await _median(once, size, TRIES[name] // 2) for name, size in SIZES.items()}
    finally:
        await gateway.stop(5)


def _plain() -> Times:
    app = load_app(APP)
    make, take = app.functions["make"], app.functions["take"]
    found = {}
    for name, size in SIZES.items():
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            take(make(size))
            times.append(time.perf_counter() - begin)
        found[name] = statistics.median(times) * 1e3
    return found


async def _median(once: Callable[[int], Awaitable[None]], size: int, tries: int) -> float:
    for _ in range(5):
        await once(size)
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        await once(size)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3
