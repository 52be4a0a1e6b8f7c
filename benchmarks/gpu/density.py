"""Density: forty models (eight architectures, five sets of weights each) on one device. Memory, start and latency.

Parts, each in processes of its own. *anatomy*: what one model of each architecture costs, step by step, in one process.
*executor*: all forty in one executor, without gateway or standby, and where its memory is. *server*: `lamina serve`, from its
start to the last model, memory with its standby, and calls over HTTP; then once more, for what a second start finds on disk,
and once with a lighter standby.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.server import GPU, IMAGE, ask, load, post, served

APP = "benchmarks/gpu/dense_app.py"
MASKS = [0b111 << (3 * index) for index in range(5)]
PARTS = os.environ.get("LAMINA_PARTS", "anatomy,executor,server").split(",")
SECONDS = 5.0
GOAL_S = 0.1


def run(bench: Bench) -> None:
    for part in PARTS:
        if part == "server":
            for start in ("first", "second"):
                serve(bench, start)
        if part in ("server", "imports"):
            serve(bench, "second, imports standing by", "--gpu-standby", "imports")
        elif part == "many":
            os.environ |= {"LAMINA_MODELS": "200", "LAMINA_STANDING": "60"}
            serve(bench, "200 registered, 60 standing")
        else:
            in_process(bench, part)


def in_process(bench: Bench, part: str) -> None:
    """Rows that another process prints, as they come."""
    command = [sys.executable, "-m", "benchmarks.gpu.density", part]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('["'):
            what, value, unit, details = json.loads(line)
            bench.report.add(f"{part}: {what}", value, unit, **details)
        else:
            print(line, end="", flush=True)
    if process.wait():
        print(f"{part} ended with {process.returncode}", flush=True)


def tell(what: str, value: float, unit: str, **details: Any) -> None:
    print(json.dumps([what, round(value, 3), unit, details]), flush=True)


# --------------------------------------------------------------------------- memory


def device_mib() -> int:
    """Memory of the device in use, by all processes; asked from outside."""
    if GPU == "null":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()[0])


def host_mib(pid: int) -> dict[str, int]:
    """Memory of a process and all its descendants, by what each of them runs: shared pages are counted once."""
    found: Counter[str] = Counter()
    for process in tree(pid):
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            command = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        except OSError:
            continue
        said = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
        name = next((word for word in command if word.startswith(("lamina", "benchmarks"))), command[0])
        name += " standby" if any('"is_standby":true' in word for word in command) else ""
        found[name] += said["Pss"] >> 10
    return dict(found)


def tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def by_pool() -> dict[str, int]:
    """MiB that torch holds: in use and free outside of graphs, and in memory pools of graphs."""
    import torch

    found: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():
        kind = "graphs" if tuple(segment["segment_pool_id"]) != (0, 0) else "plain"
        found[f"{kind}, segments"] += segment["total_size"]
        found[f"{kind}, in use"] += segment["allocated_size"]
        if kind == "plain":
            sizes = [block["size"] >> 20 for block in segment["blocks"] if block["state"] == "active_allocated"]
            found["plain, blocks of 8 MiB or more in use"] += sum(size << 20 for size in sizes if size >= 8)
    return {kind: size >> 20 for kind, size in found.items()}


# -------------------------------------------------------------------------- anatomy


def anatomy() -> None:
    begin_s = time.perf_counter()
    import torch

    tell("import torch", time.perf_counter() - begin_s, "s")
    from benchmarks.gpu.dense_app import build
    from lamina.gpu.executor import open_executor
    from lamina.gpu.slicers import open_slicer

    begin_s = time.perf_counter()
    slicer = open_slicer("green")
    executor = open_executor(slicer)
    torch.zeros(1, device="cuda")
    tell("open the device", time.perf_counter() - begin_s, "s", device_mib=device_mib(), host=host_mib(os.getpid()))
    begin_s = time.perf_counter()
    import torchvision  # noqa: F401

    tell("import torchvision", time.perf_counter() - begin_s, "s")
    models, kept = executor.models, []

    def timed(thread: ThreadPoolExecutor, work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        def inside() -> tuple[float, Any]:
            torch.cuda.set_device(0)
            begin_s = time.perf_counter()
            made = work(*args)
            return round(time.perf_counter() - begin_s, 3), made

        return thread.submit(inside).result()

    anatomy_begin_s = time.perf_counter()
    for shape in ("mobilenet_v3_large", "vit_b_16", "resnet50", "shufflenet_v2_x1_0", "convnext_tiny"):
        if time.perf_counter() - anatomy_begin_s > 50:
            break
        if shape == "mobilenet_v3_large":
            watch_native(1.5)
        first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        took: dict[str, float] = {}
        mib = {"begin": device_mib()}
        for number in (0, 1):
            name = f"{shape}_{number}"
            took[f"{number} build"], (module, example) = timed(first, build, name)
            took[f"{number} pin and hash"], staged = timed(first, models.stage, module)
            executor.load(name, module, example, buckets=(1, 4, 16), staged=staged)
            models.pin(name)
            for bucket in (16, 1):
                took[f"{number} first run {bucket}"], _ = timed(first, models.warmup_run, name, bucket, MASKS[0])
            mib[f"{number} run"] = device_mib()
            for bucket in (16, 1):
                took[f"{number} capture {bucket}"], plan = timed(first, models.capture, name, bucket, MASKS[0])
                kept.append(plan)
            mib[f"{number} two graphs"] = device_mib()
            for mask in MASKS[1:]:
                for bucket in (16, 1):
                    plan = timed(first, models.capture, name, bucket, mask)[1]
                    kept.append(plan)
            mib[f"{number} ten graphs"] = device_mib()
        took["first run 16 on another slice"], _ = timed(first, models.warmup_run, name, 16, MASKS[1])
        took["first run 16 in another thread"], _ = timed(second, models.warmup_run, name, 16, MASKS[0])
        took["first run 4 in another thread"], _ = timed(second, models.warmup_run, name, 4, MASKS[0])
        torch.cuda.empty_cache()
        mib["emptied"] = device_mib()
        nodes = None
        try:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            stream = slicer.slice(MASKS[0]).torch_stream
            inputs = torch.zeros(16, *example.shape[1:], dtype=example.dtype, device="cuda")
            with torch.inference_mode(), torch.cuda.stream(stream):
                module(inputs)
                stream.synchronize()
                graph.capture_begin(capture_error_mode="thread_local")
                module(inputs)
                graph.capture_end()
            nodes = len(slicer.driver.graph_nodes(graph.raw_cuda_graph()) or ())
            del graph
        except Exception as error:
            print(repr(error)[:200])
        held = by_pool()
        weights_mib = sum(models.model_weights_mib(f"{shape}_{number}") for number in (0, 1))
        more = {"weights_mib": weights_mib, "nodes": nodes, "device_mib": mib, "torch": held}
        tell(f"{shape}: first run 16", took["0 first run 16"], "s", **took, **more, host=host_mib(os.getpid()))
    os._exit(0)


def watch_native(after_s: float) -> None:
    """Print what all threads are at, native frames too, after a while: what takes so long in a first run?"""

    def dump() -> None:
        command = [sys.executable, "-m", "py_spy", "dump", "--native", "--pid", str(os.getpid())]
        for folder in sys.path:
            if (found := Path(folder) / "bin" / "py-spy").exists():
                command[:3] = [str(found)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        print("\n".join((done.stdout or done.stderr).splitlines()[:40]), flush=True)

    threading.Timer(after_s, dump).start()


# ------------------------------------------------------------------------- executor


def executor() -> None:
    """All models in the executor loop of this process; a thread stands in for the gateway."""
    import torch

    from benchmarks.gpu.dense_app import names
    from lamina.gpu.executor import open_executor
    from lamina.gpu.executor_loop import ExecutorLoop
    from lamina.gpu.executor_main import SWITCH_S
    from lamina.gpu.gc_schedule import disable_full_collections
    from lamina.gpu.protocol import (
        ExecutorSetup,
        ExecutorUsage,
        FunctionLoaded,
        FunctionLoadFailed,
        LoadFunction,
        from_executor_reader,
        to_executor_reader,
    )
    from lamina.gpu.slicers import open_slicer
    from lamina.ipc.framing import FrameChannel
    from lamina.values.shm_directory import ShmDirectory

    folder = ShmDirectory()
    ours, theirs = socket.socketpair()
    setup = ExecutorSetup(
        app=APP, device="gpu0", slicer="green", folder=folder.path, owner="a", values_owner="b", pool_bytes=1 << 26
    )
    sys.setswitchinterval(SWITCH_S)
    disable_full_collections()
    wanted = names()

    def gateway() -> None:
        channel = FrameChannel(ours, from_executor_reader())
        begin_s = time.perf_counter()
        for name in wanted:
            channel.send(LoadFunction(f"{name}#1", name, 0, time.monotonic_ns() // 1000, probe=True))
        left, ready, parts = set(wanted), [], Counter[str]()
        usage: Any = None
        settled_s = 0.0
        while time.perf_counter() - begin_s < 100:
            frame = channel.next_buffered()
            if frame is None:
                channel.read()
                continue
            if isinstance(frame, FunctionLoadFailed):
                print(f"{frame.instance}: {frame.error}", flush=True)
                left.discard(frame.instance[:-2])
            elif isinstance(frame, FunctionLoaded):
                left.discard(frame.instance[:-2])
                ready.append(time.perf_counter() - begin_s)
                parts.update(dict(frame.parts))
                if len(ready) in (1, 8, 20, len(wanted)):
                    mean = {what: round(us / len(ready) / 1e3) for what, us in parts.items()}
                    tell(f"{len(ready)} ready", ready[-1], "s", device_mib=device_mib(), mean_ms=mean, last=frame.instance)
            elif isinstance(frame, ExecutorUsage):
                usage = frame
                if not left and not usage.graphs_missing:
                    settled_s = settled_s or time.perf_counter()
                    if time.perf_counter() - settled_s > 3:
                        break
        said = {"graphs": usage.graphs, "missing": usage.graphs_missing, "weights_mib": usage.weights_mib}
        spent = (settled_s or time.perf_counter()) - begin_s
        tell("graphs captured", spent, "s", **said, not_ready=sorted(left))
        torch.cuda.synchronize()
        tell("memory", device_mib(), "MiB", torch=by_pool(), host=host_mib(os.getpid()), threads=threading.active_count())
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        tell("memory without workspaces of cuBLAS", device_mib(), "MiB", torch=by_pool())
        folder.close()
        os._exit(0)

    slicer = open_slicer("green")
    loop = ExecutorLoop(setup, FrameChannel(theirs, to_executor_reader()), slicer, open_executor(slicer, folder=folder.path))
    threading.Thread(target=gateway).start()
    loop.serve()


# --------------------------------------------------------------------------- server


def serve(bench: Bench, start: str, *options: str) -> None:
    import asyncio

    from benchmarks.gpu.dense_app import names

    count, standing = int(os.environ.get("LAMINA_MODELS", "40")), int(os.environ.get("LAMINA_STANDING", "40"))
    wanted = names(count)[:standing]
    idle_mib, begin_s = device_mib(), time.perf_counter()

    async def answers(port: int) -> list[float]:
        async def one(name: str) -> float:
            while True:
                wire = post(f"/v1/functions/{name}", IMAGE, "application/octet-stream", patient=True)
                status, body, _ = await ask(port, wire)
                if status == 200:
                    return time.perf_counter() - begin_s
                print(name, status, body[:200], flush=True)
                await asyncio.sleep(0.5)

        return sorted(await asyncio.wait_for(asyncio.gather(*map(one, wanted)), 180))

    shape = ("--env", f"LAMINA_MODELS={count}", "--env", f"LAMINA_STANDING={standing}")
    with served("--ingress", "3", *shape, *options, app=APP) as (url, port, pid):
        said_s = time.perf_counter() - begin_s
        times = asyncio.run(answers(port))
        loads = loads_of(url)
        marks = {f"{part:.0%}": round(times[int(part * (len(times) - 1))], 1) for part in (0.1, 0.5, 0.9)}
        bench.report.add(f"{start} start: first answer", times[0], "s", most=8, listening_s=round(said_s, 2), **marks)
        most = 25 if start == "first" else 12 if start.startswith("second") else None
        bench.report.add(f"{start} start: all have answered", times[-1], "s", **({"most": most} if most else {}), mean_ms=loads)
        alone_mib = device_mib() - idle_mib
        until(url, 16 if start == "first" else 8)
        settled = {"graphs": status(url).get("graphs"), "standing_by": standing_by(url)}
        weights_mib = int(status(url)["weights_mib"])
        host, used = host_mib(pid), device_mib() - idle_mib
        beside = (used - weights_mib) / len(wanted)
        bench.report.add(
            f"{start} start: device beside weights, each",
            beside,
            "MiB",
            most=100,
            all_mib=used,
            before_the_standby_mib=alone_mib,
            weights_mib=weights_mib,
            **settled,
        )
        bench.report.add(f"{start} start: host", sum(host.values()) / 1024, "GiB", most=8, **host)
        for rate in (800.0, 1600.0) if not start.startswith("second") else (1600.0,):
            paths = {f"/v1/functions/{name}": rate / len(wanted) for name in wanted}
            found = load(port, paths, SECONDS, seed=5)
            in_time = sum(code == 200 and took <= GOAL_S for _, code, took in found)
            times_ms = [took * 1e3 for _, code, took in found if code == 200]
            codes = dict(Counter(code for _, code, _ in found))
            ms = {f"p{part:g}_ms": round(percentile(times_ms, part / 100), 1) for part in (50, 99)} if times_ms else {}
            more = {**ms, "statuses": str(codes), **{key: status(url).get(key) for key in ("graphs", "eager_batches")}}
            bench.report.add(
                f"{start} start: {rate:.0f} calls/s of all, within 100 ms", 100 * in_time / len(found), "%", least=99, **more
            )
        bench.report.add(f"{start} start: device after calls", device_mib() - idle_mib, "MiB", host=host_mib(pid))


def status(url: str) -> dict[str, Any]:
    from benchmarks.gpu.faults import executor as usage_of

    return usage_of(url)


def standing_by(url: str) -> int:
    found = status(url).get("standing_by")
    return len(found) if isinstance(found, list) else int(found or 0)


def loads_of(url: str) -> dict[str, float]:
    """Where the time of all loads went, in milliseconds, on average."""
    loads = status(url).get("loads_ms") or {}
    sums: Counter[str] = Counter()
    for parts in loads.values():
        sums.update(parts)
    return {what: round(took / max(1, len(loads)), 1) for what, took in sums.items()}


def until(url: str, limit_s: float) -> None:
    """Until no graph is missing and the standby has stopped growing, or for so long."""
    ends_s, before = time.perf_counter() + limit_s, -1
    while time.perf_counter() < ends_s:
        now = standing_by(url)
        if not status(url).get("graphs_missing") and now and now == before:
            return
        before = now
        time.sleep(3)


if __name__ == "__main__":
    {"anatomy": anatomy, "executor": executor}[sys.argv[1]]()
