"""Clients that share a GPU by kernel graphs, 1 to 64 of them over HTTP, against a process per client with a context of its own.

Each client calls again as soon as it has its answer. A process runs the same graph by the same executor, captured, one request at
a time, without HTTP: it is the better off of the two. Sixty-four processes need more memory of the host than there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.density import device_mib, host_mib
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.server import once, post, read, served

CLIENTS, PROCESSES, UNDER_MPS, SECONDS = (1, 4, 16, 64), (1, 16), (16,), 2.0
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
BODY = json.dumps({"x": [0.5] * 256}).encode()


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(one * one for one in shares)) if any(shares) else 0.0


async def closed_loop(port: int, seconds: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    wire, times, ends_s = post("/v1/functions/recur", BODY), list[float](), time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        begin_s = time.perf_counter()
        writer.write(wire)
        status, _ = await read(reader)
        if status == 200:
            times.append(time.perf_counter() - begin_s)
    writer.close()
    return times


async def together(port: int, count: int) -> list[list[float]]:
    return await asyncio.gather(*(closed_loop(port, SECONDS) for _ in range(count)))


def tell(bench: Bench, what: str, found: list[list[float]], seconds: float, mib: float, **more: Any) -> None:
    everything = [one * 1e3 for some in found for one in some]
    ms = {f"p{part}_ms": round(percentile(everything, part / 100), 2) for part in (50, 99)} if everything else {}
    fair = jain([float(len(some)) for some in found])
    bench.report.add(what, len(everything) / seconds, "calls/s", **ms, device_mib_each=round(mib, 1), jain=round(fair, 4), **more)


def run(bench: Bench) -> None:
    idle_mib = device_mib()
    with served("--ingress", "2", app="benchmarks/gpu/graphs_app.py") as (_, port, pid):
        print("   first call:", once(port, post("/v1/functions/recur", BODY, patient=True))[::2], flush=True)
        time.sleep(6)  # graphs are captured
        for count in CLIENTS:
            found = asyncio.run(together(port, count))
            used = device_mib() - idle_mib
            host = sum(host_mib(pid).values())
            tell(bench, f"{count} clients by kernel graphs", found, SECONDS, used / count, device_mib=used, host_mib=host)
            fair = jain([float(len(some)) for some in found])
            bench.report.add(f"{count} clients by kernel graphs: fairness (Jain)", fair, "", least=0.95)
    for is_mps in (False, True):
        environment = mps() if is_mps else {key: value for key, value in os.environ.items() if key != QUEUES}
        if environment is None:
            continue
        for count in UNDER_MPS if is_mps else PROCESSES:
            processes(bench, count, environment, is_mps, idle_mib)
    with contextlib.suppress(OSError):
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, env=mps_folders())


def mps_folders() -> dict[str, str]:
    return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/tmp/lamina-mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/lamina-mps"}


def mps() -> dict[str, str] | None:
    os.makedirs("/tmp/lamina-mps", exist_ok=True)
    environment = {key: value for key, value in mps_folders().items() if key != QUEUES}
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True, env=environment, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"   no MPS: {error}", flush=True)
        return None
    return environment


def processes(bench: Bench, count: int, environment: dict[str, str], is_mps: bool, idle_mib: int) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.clients"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    begin_s = time.perf_counter()
    running = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    try:
        ready = [process.stdout.readline() for process in running]  # type: ignore[union-attr]
        started_s, used = time.perf_counter() - begin_s, device_mib() - idle_mib
        host = sum(sum(host_mib(process.pid).values()) for process in running)
        able = [
            process for process, line in zip(running, ready, strict=True) if line == "ready\n"
        ]  # the device had no room for others
        for process in able:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        found = [json.loads(process.communicate(timeout=40)[0] or "[]") for process in able]
        label = f"{count} processes, one per client{' under MPS' if is_mps else ''}"
        more = {"host_mib": host, "started_s": round(started_s, 1), "ready": len(able)}
        tell(bench, label, found, SECONDS, used / count, **more)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()


def client() -> None:
    import torch

    from benchmarks.gpu.graphs_app import app
    from lamina.gpu.driver import CudaDriver
    from lamina.gpu.executor import open_executor
    from lamina.gpu.loaded_function import model_work
    from lamina.gpu.slicers.green import GreenSlicer

    slicer = GreenSlicer(driver=CudaDriver(0))  # with the driver's own number of queues: of 32 each there is not enough for all
    executor = open_executor(slicer)
    model = app.functions["recur"].open().model
    assert model is not None
    torch.zeros(1, device="cuda")
    module, example = model_work(model, True)
    whole = (1 << slicer.device.units) - 1
    executor.load("recur", module, tuple(example), buckets=(1,))
    executor.prepare("recur", [whole])
    while executor.has_work:
        executor.poll()
    item = [(torch.full((256,), 0.5).numpy(),)]
    print("ready", flush=True)
    sys.stdin.readline()
    times, ends_s = list[float](), time.perf_counter() + SECONDS
    while time.perf_counter() < ends_s:
        begin_s = time.perf_counter()
        executor.submit("recur", item, whole)
        while not executor.poll():
            pass
        times.append(time.perf_counter() - begin_s)
    print(json.dumps(times), flush=True)
    os._exit(0)


if __name__ == "__main__":
    client()
