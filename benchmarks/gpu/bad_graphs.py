"""Bad requests to kernel graphs on the device: each has a clear error or is right, memory stays, another caller is in time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from benchmarks.bad_graphs import LATE_MS, REQUEST, attack, bystand
from benchmarks.gpu.common import Bench
from benchmarks.gpu.density import device_mib, tree
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.server import once, post, served

COUNT, SENDERS = int(os.environ.get("LAMINA_COUNT", "10000")), 4
GOOD = {name: REQUEST[name] for name in ("x", "n")}


def run(bench: Bench) -> None:
    with served(app="benchmarks/gpu/graphs_app.py") as (_url, port, pid):
        for name, body in (("mutated", b'{"x": [1, 2, 3, 4], "n": [[1, 2], [3, 4]]}'), ("bystander", b'{"x": [1, 2, 3, 4]}')):
            status, answer, took_s = once(port, post(f"/v1/functions/{name}", body, patient=True))
            print(f"   {name}: {status} {answer[:120]!r} after {took_s:.1f} s", flush=True)
        asyncio.run(measure(bench, port, pid))


async def measure(bench: Bench, port: int, pid: int) -> None:
    await attack(port, 300, 2, GOOD)  # what is made once is made now
    await settled()
    stop = asyncio.Event()
    alone_task = asyncio.create_task(bystand(port, stop))
    await asyncio.sleep(3)
    stop.set()
    alone = await alone_task
    before, processes = usage(pid), sorted(tree(pid))
    stop, begin_s = asyncio.Event(), time.perf_counter()
    beside_task = asyncio.create_task(bystand(port, stop))
    found = await asyncio.gather(*(attack(port, COUNT // SENDERS, seed, GOOD) for seed in range(SENDERS)))
    took_s = time.perf_counter() - begin_s
    stop.set()
    beside = await beside_task
    await asyncio.sleep(2)
    after = usage(pid)
    answers: dict[str, int] = {}
    for some in found:
        for kind, count in some.items():
            answers[kind] = answers.get(kind, 0) + count
    bench.report.add(
        "requests with changes, each with a clear answer", sum(answers.values()), "", seconds=round(took_s, 1), **answers
    )
    gained = {key: after[key] - before[key] for key in before}
    bench.report.add(
        "device memory gained", gained["device_mib"], "MiB", most=0, host_mib=gained["host_mib"], files=gained["files"]
    )
    late = sum(one > LATE_MS for one in beside)
    times = {
        f"{name}_p{part}_ms": round(percentile(some, part / 100), 2)
        for name, some in (("alone", alone), ("beside", beside))
        for part in (50, 99)
    }
    bench.report.add(f"calls of another past {LATE_MS:g} ms", late, "", most=0, of=len(beside), **times)
    bench.report.add("the same processes", float(processes == sorted(tree(pid))), "", least=1)


async def settled(limit_s: float = 40.0) -> None:
    """Wait until the hot standby has opened the device too: memory as it was 5 s ago, and 5 s before that."""
    known, ends_s = [device_mib()], time.monotonic() + limit_s
    while (len(known) < 3 or len(set(known[-3:])) > 1) and time.monotonic() < ends_s:
        await asyncio.sleep(5)
        known.append(device_mib())


def usage(pid: int) -> dict[str, int]:
    pids = list(tree(pid))
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in pids)
    files = sum(len(os.listdir(f"/proc/{one}/fd")) for one in pids)
    return {"device_mib": device_mib(), "host_mib": pages // 256, "files": files}
