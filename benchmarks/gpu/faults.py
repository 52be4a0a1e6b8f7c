"""What breaks, tried: a killed executor, a batch without memory, functions that hang, an illegal address, a killed MPS client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import median, percentile
from benchmarks.gpu.server import load, once, post, request, served
from benchmarks.gpu.zoo import FIVE


def run(bench: Bench) -> None:
    with served() as (url, port, _):
        for name in FIVE:
            once(port, request(name, patient=True))
        time.sleep(8)
        _killed(bench, url, port)
        _hungry(bench, url, port)
        _illegal(bench, url, port)
        _hung(bench, port)
    _mps(bench)


def executor(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/status") as answer:
        found = json.load(answer)
    return next(device["executor"] for device in found["devices"] if device["executor"])


def _killed(bench: Bench, url: str, port: int) -> None:
    """F2: kill -9 under load. Every call must be answered: retried, or refused while there is no executor."""
    times: list[float] = []
    for turn in range(2):
        pid = executor(url)["pid"]
        killer = threading.Timer(1.5, os.kill, [pid, signal.SIGKILL])
        killer.start()
        begin = time.perf_counter()
        found = load(port, dict.fromkeys(FIVE, 40), 3.0, seed=turn)
        while once(port, request("resnet50", patient=True))[0] != 200:
            time.sleep(0.05)
        times.append(time.perf_counter() - begin - 1.5)
        statuses = {code: sum(status == code for _, status, _ in found) for code in {status for _, status, _ in found}}
        back = {name: once(port, request(name, patient=True))[0] for name in FIVE}
        bench.report.add(
            f"F2, kill -9 number {turn + 1}: calls without any answer",
            statuses.get(0, 0),
            "calls",
            most=0,
            statuses=str(statuses),
            all_back=set(back.values()) == {200},
        )
    bench.report.add("F2: back in service", max(times), "s", most=10)


def _hungry(bench: Bench, url: str, port: int) -> None:
    """F7: batches that do not fit are halved; others are unharmed, nothing leaks."""
    import asyncio

    from benchmarks.gpu.server import ask

    body = post("/v1/functions/hungry", b"[1, 2, 3, 4]")
    once(port, post("/v1/functions/hungry", b"[1, 2, 3, 4]", patient=True))
    before = executor(url)["device_used_mib"]

    async def crowd() -> list[int]:
        found = await asyncio.gather(
            *(ask(port, body) for _ in range(16)), *(ask(port, request("resnet50", patient=True)) for _ in range(4))
        )
        return [status for status, _, _ in found]

    wrong = 0
    for _ in range(25):
        wrong += sum(status != 200 for status in asyncio.run(crowd()))
    time.sleep(1.5)
    after = executor(url)
    bench.report.add("F7: 500 calls in batches that run out of memory: not answered", wrong, "calls", most=0)
    bench.report.add(
        "F7: device memory more than before", after["device_used_mib"] - before, "MiB", most=64, restarts=after["restarts"]
    )


def _illegal(bench: Bench, url: str, port: int) -> None:
    """F11: the executor is declared broken at once, and replaced; no answer of the broken one is given out."""
    restarts = executor(url)["restarts"]
    begin = time.perf_counter()
    status, body, _ = once(port, post("/v1/functions/illegal", b"1"))
    while once(port, request("resnet50", patient=True))[0] != 200:
        time.sleep(0.05)
    took_s = time.perf_counter() - begin
    bench.report.add(
        "F11, illegal address: back in service",
        took_s,
        "s",
        most=10,
        status=status,
        said=body.decode()[:160],
        restarts=executor(url)["restarts"] - restarts,
    )


def _hung(bench: Bench, port: int) -> None:
    """F8: noticed after five times the predicted time, at least five seconds; the worker is replaced."""
    for how in ("sleep", "spin", "kernel"):
        begin = time.perf_counter()
        status, body, took_s = once(port, post("/v1/functions/hang", json.dumps(how).encode()))
        while once(port, request("resnet50", patient=True))[0] != 200:
            time.sleep(0.05)
        bench.report.add(
            f"F8, hung ({how}): back in service",
            time.perf_counter() - begin,
            "s",
            most=20,
            status=status,
            answered_s=took_s,
            said=body.decode()[:120],
        )


_CLIENT = """
import sys, time, torch
a = torch.randn(2048, 2048, device="cuda", dtype=torch.half)
for _ in range(20): a @ a
torch.cuda.synchronize()
print("ready", flush=True)
ends = time.time() + float(sys.argv[1]); times = []
while time.time() < ends:
    begin = time.perf_counter()
    for _ in range(20): b = a @ a
    torch.cuda.synchronize()
    times.append((time.perf_counter() - begin) * 1e3)
print(" ".join(f"{t:.4f}" for t in times))
"""


def _mps(bench: Bench) -> None:
    """F12: an MPS client is killed in the middle of its work again and again; its neighbour goes on."""
    from lamina.gpu.mps import MpsSlicer

    slicer = MpsSlicer()
    try:
        half = (1 << 25) - 1

        def client(seconds: float) -> subprocess.Popen[bytes]:
            env = {**os.environ, **slicer.environment(half, 4096)}
            started = subprocess.Popen([sys.executable, "-c", _CLIENT, str(seconds)], stdout=subprocess.PIPE, env=env)
            assert started.stdout is not None
            started.stdout.readline()
            return started

        def times_of(process: subprocess.Popen[bytes]) -> list[float]:
            out, _ = process.communicate(timeout=60)
            return [float(word) for word in out.split()]

        victim, other = client(4.0), client(30.0)
        calm = times_of(victim)
        victim = client(14.0)
        kills = 0
        ends_s = time.monotonic() + 13
        while time.monotonic() < ends_s:
            slicer.daemon.end_client(other)
            kills += 1
            other = client(30.0)
            time.sleep(0.5)
        shaken = times_of(victim)
        slicer.daemon.end_client(other)
        servers = slicer.daemon.servers()
        state = slicer.daemon.ask(f"get_server_status {servers[0]}") if servers else "no server"
        bench.report.add(
            f"F12, {kills} kills of an MPS client: p99 of its neighbour against before",
            percentile(shaken, 0.99) / percentile(calm, 0.99),
            "x",
            most=1.2,
            p50=median(shaken) / median(calm),
            batches=len(shaken),
            server=state,
        )
    finally:
        slicer.close()
