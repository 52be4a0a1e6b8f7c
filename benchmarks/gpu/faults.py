"""What breaks, tried behind HTTP: a killed executor, a batch without memory, functions that hang, an illegal address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.server import load, once, post, request, served
from benchmarks.gpu.zoo import FIVE

ROW = b"[1, 2, 3, 4]"
KILLS = int(os.environ.get("LAMINA_KILLS", "2"))
SPARE_S = 16
"""Until the next spare process has done its imports."""


TEN = (*FIVE, "features", "pool", "pool_on_host", "hungry", "hang")
"""What stands on the device when it is killed: ten functions, as the goal has it."""


def run(bench: Bench) -> None:
    """Shortest first, so that a run that is cut off has most of it."""
    with served() as (url, port, _):
        for name in FIVE:
            once(port, request(name, patient=True))
        for name in ("on_device", "by_host"):
            once(port, request(name, "workflows", patient=True))
        once(port, post("/v1/functions/hungry", ROW, patient=True))
        for _ in range(3):  # so that it is known how long it takes
            once(port, post("/v1/functions/hang", b'"no"', patient=True))
        _hungry(bench, url, port)
        time.sleep(6)  # until the spare process has done its imports
        _killed(bench, url, port)
        _illegal(bench, url, port)
        _hung(bench, url, port)


def executor(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/status") as answer:
        found = json.load(answer)
    return next(device["executor"] for device in found["devices"] if device["executor"])


def _settled(url: str) -> dict[str, Any]:
    """When no more graphs are made: they take memory too."""
    ends_s = time.monotonic() + 12
    while True:
        before = executor(url)
        time.sleep(2.5)
        after = executor(url)
        if after["graphs"] == before["graphs"] or time.monotonic() > ends_s:
            return after


def _everybody(port: int) -> dict[str, float]:
    """Seconds until each of the ten has answered again, asked all at once."""
    from benchmarks.gpu.server import ask

    wires = {name: request(name, patient=True) for name in FIVE}
    wires |= {"features+pool": request("on_device", "workflows", patient=True)}
    wires |= {"features+pool_on_host": request("by_host", "workflows", patient=True)}
    wires |= {"hungry": post("/v1/functions/hungry", ROW, patient=True)}
    wires |= {"hang": post("/v1/functions/hang", b'"no"', patient=True)}
    begin = time.perf_counter()

    async def one(wire: bytes) -> float:
        while (await ask(port, wire))[0] != 200:
            await asyncio.sleep(0.02)
        return time.perf_counter() - begin

    async def everybody() -> list[float]:
        return await asyncio.gather(*(one(wire) for wire in wires.values()))

    return {name: round(took_s, 2) for name, took_s in zip(wires, asyncio.run(everybody()), strict=True)}


def _killed(bench: Bench, url: str, port: int) -> None:
    """F2: kill -9 under load, again and again. Every call must be answered: retried, or refused while there is no executor."""
    for turn in range(KILLS):
        pid = executor(url)["pid"]
        back: dict[str, float] = {}

        def kill(pid: int = pid, back: dict[str, float] = back) -> None:
            os.kill(pid, signal.SIGKILL)
            back |= _everybody(port)

        killer = threading.Timer(1.5, kill)
        killer.start()
        found = load(port, dict.fromkeys(FIVE, 40), 3.0, seed=turn)
        killer.join()
        statuses = Counter(status for _, status, _ in found)
        label = f"F2, kill -9 number {turn + 1} under 200 calls/s"
        bench.report.add(f"{label}: calls without any answer", statuses.get(0, 0), "calls", most=0, statuses=dict(statuses))
        bench.report.add(f"{label}: first of ten functions back", min(back.values()), "s", most=10)
        bench.report.add(f"{label}: last of ten functions back", max(back.values()), "s", most=10, each=back)
        time.sleep(SPARE_S)


def _hungry(bench: Bench, url: str, port: int) -> None:
    """F7: batches that do not fit are halved; others are unharmed, nothing leaks."""
    from benchmarks.gpu.server import ask

    body = post("/v1/functions/hungry", ROW)
    before = _settled(url)

    async def crowd() -> list[int]:
        found = await asyncio.gather(
            *(ask(port, body) for _ in range(16)), *(ask(port, request("resnet50", patient=True)) for _ in range(4))
        )
        return [status for status, _, _ in found]

    wrong = 0
    for _ in range(25):
        wrong += sum(status != 200 for status in asyncio.run(crowd()))
    after = _settled(url)
    bench.report.add("F7, 500 calls in batches that run out of memory: not answered", wrong, "calls", most=0)
    bench.report.add(
        "F7: device memory more than before",
        after["device_used_mib"] - before["device_used_mib"],
        "MiB",
        most=64,
        restarts=after["restarts"] - before["restarts"],
    )


def _illegal(bench: Bench, url: str, port: int) -> None:
    """F11: the executor is declared broken at once, and replaced; no answer of the broken one is given out."""
    restarts = executor(url)["restarts"]
    begin = time.perf_counter()
    status, body, _ = once(port, post("/v1/functions/illegal", b"1"))
    answered_s = time.perf_counter() - begin
    back = _everybody(port)
    bench.report.add(
        "F11, illegal address: first of ten functions back",
        answered_s + min(back.values()),
        "s",
        most=10,
        status=status,
        said=body.decode()[:160],
        answered_s=round(answered_s, 3),
        restarts=executor(url)["restarts"] - restarts,
    )
    bench.report.add("F11: last of ten functions back", answered_s + max(back.values()), "s", most=10, each=back)


def _hung(bench: Bench, url: str, port: int) -> None:
    """F8: the caller has its answer by its deadline (3 s); the hang is noticed after five times the predicted time, at least
    five seconds; then the executor is replaced."""
    for how in ("kernel", "sleep", "spin"):
        _everybody(port)  # it must be loaded, for only what runs can hang
        restarts, ends_s = executor(url)["restarts"], time.monotonic() + 40
        wire = post("/v1/functions/hang", json.dumps(how).encode())
        begin = time.perf_counter()
        status, body, took_s = once(port, wire)
        while executor(url)["restarts"] == restarts and time.monotonic() < ends_s:
            time.sleep(0.05)
        noticed_s = time.perf_counter() - begin
        answered, _, _ = once(port, request("resnet50", patient=True))
        label = f"F8, hung ({how})"
        bench.report.add(f"{label}: the caller has an answer", took_s, "s", most=3.11, status=status, said=body.decode()[:120])
        bench.report.add(f"{label}: noticed, and the process ended", noticed_s, "s", most=5.5)
        bench.report.add(f"{label}: another function answers", time.perf_counter() - begin, "s", most=16, status=answered)
