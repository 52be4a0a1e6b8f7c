"""What breaks, tried behind HTTP: a killed executor, a batch without memory, functions that hang, an illegal address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
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
HANGS = os.environ.get("LAMINA_HANGS", "kernel sleep spin").split()
SPARE_S = 60
"""The longest it waits for a spare process to have everything ready."""

MODELS = (*FIVE, "features", "pool", "pool_on_host", "hungry")
"""With `hang`, ten functions stand on the device when it is killed, as the goal has it. These a spare has ready too."""


def run(bench: Bench) -> None:
    """Shortest first, so that a run that is cut off has most of it."""
    with served() as (url, port, _):
        bench.report.add("first loads of all ten at once: the last answers", max(everybody(port).values()), "s", **loads(url))
        for _ in range(3):  # so that it is known how long it takes
            once(port, post("/v1/functions/hang", b'"no"', patient=True))
        hungry(bench, url, port)
        killed(bench, url, port)
        illegal(bench, url, port)
        for how in HANGS:
            hung(bench, url, port, how)


def loads(url: str) -> dict[str, Any]:
    """Where the time of the last load of each function went."""
    found = executor(url)
    return {"replaced_ms": found["replaced_ms"], "loads_ms": found["loads_ms"]}


def spare(bench: Bench, url: str) -> None:
    """Until everything stands by."""
    begin_s = time.monotonic()
    while len((found := executor(url))["standing_by"] or ()) < len(MODELS) and time.monotonic() < begin_s + SPARE_S:
        time.sleep(0.1)
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    held = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    took_s = round(time.monotonic() - begin_s, 1)
    bench.report.add(
        "waited for the spare", took_s, "s", ready=found["standing_by"], pid=found["pid"], restarts=found["restarts"], memory=held
    )


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


def everybody(port: int) -> dict[str, float]:
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

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(wire) for wire in wires.values()))

    return {name: round(took_s, 2) for name, took_s in zip(wires, asyncio.run(all_of_them()), strict=True)}


def killed(bench: Bench, url: str, port: int) -> None:
    """F2: kill -9 under load, again and again. Every call must be answered: retried, or refused while there is no executor."""
    for turn in range(KILLS):
        spare(bench, url)
        pid = executor(url)["pid"]
        back: dict[str, float] = {}

        def kill(pid: int = pid, back: dict[str, float] = back) -> None:
            os.kill(pid, signal.SIGKILL)
            back |= everybody(port)

        killer = threading.Timer(1.5, kill)
        killer.start()
        found = load(port, dict.fromkeys(FIVE, 40), 3.0, seed=turn)
        killer.join()
        statuses = Counter(status for _, status, _ in found)
        label = f"F2, kill -9 number {turn + 1} under 200 calls/s"
        bench.report.add(f"{label}: calls without any answer", statuses.get(0, 0), "calls", most=0, statuses=dict(statuses))
        bench.report.add(f"{label}: first of ten functions back", min(back.values()), "s", most=10)
        bench.report.add(f"{label}: last of ten functions back", max(back.values()), "s", most=10, each=back, **loads(url))


def hungry(bench: Bench, url: str, port: int) -> None:
    """F7: batches that do not fit are halved; every answer is right, others are unharmed, nothing leaks."""
    from benchmarks.gpu.server import ask

    spare(bench, url)
    body, image = post("/v1/functions/hungry", ROW), request("resnet50", patient=True)
    before, usual = _settled(url), once(port, image)[1]

    async def crowd() -> int:
        theirs = asyncio.gather(*(ask(port, body) for _ in range(16)))
        others = asyncio.gather(*(ask(port, image) for _ in range(4)))
        right = sum(status == 200 and json.loads(said) == [2, 4, 6, 8] for status, said, _ in await theirs)
        return right + sum((status, said) == (200, usual) for status, said, _ in await others)

    right = sum(asyncio.run(crowd()) for _ in range(25))
    after = _settled(url)
    bench.report.add(
        "F7, 400 calls in batches that run out of memory and 100 beside them: right answers", right, "calls", least=500
    )
    bench.report.add(
        "F7: device memory more than before",
        after["device_used_mib"] - before["device_used_mib"],
        "MiB",
        most=64,
        restarts=after["restarts"] - before["restarts"],
    )


def illegal(bench: Bench, url: str, port: int) -> None:
    """F11: the executor is declared broken at once, and replaced; no answer of the broken one is given out."""
    spare(bench, url)
    restarts = executor(url)["restarts"]
    begin = time.perf_counter()
    status, body, _ = once(port, post("/v1/functions/illegal", b"1"))
    answered_s = time.perf_counter() - begin
    back = everybody(port)
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
    bench.report.add("F11: last of ten functions back", answered_s + max(back.values()), "s", most=10, each=back, **loads(url))


def hung(bench: Bench, url: str, port: int, how: str) -> None:
    """F8: the caller has its answer by its deadline (3 s); while a client may wait for it a function of any kind is let be, then
    the executor is replaced."""
    spare(bench, url)
    everybody(port)  # it must be loaded, for only what runs can hang
    restarts, ends_s = executor(url)["restarts"], time.monotonic() + 20
    begin = time.perf_counter()
    answer: list[Any] = []
    caller = threading.Thread(target=lambda: answer.append(once(port, post("/v1/functions/hang", json.dumps(how).encode()))))
    caller.start()
    while executor(url)["restarts"] == restarts and time.monotonic() < ends_s:
        time.sleep(0.02)
    noticed_s = time.perf_counter() - begin
    back = everybody(port)
    caller.join()
    status, body, took_s = answer[0]
    label = f"F8, hung ({how})"
    bench.report.add(f"{label}: the caller has an answer", took_s, "s", most=3.1, status=status, said=body.decode()[:120])
    bench.report.add(
        f"{label}: noticed, and the process ended", noticed_s, "s", most=4, restarts=executor(url)["restarts"] - restarts
    )
    bench.report.add(f"{label}: all others answer", noticed_s + max(back.values()), "s", each=back, **loads(url))
