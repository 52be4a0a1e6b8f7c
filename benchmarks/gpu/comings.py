"""What is left behind when functions come and go: memory of device and host, threads, files, over many loads and unloads.

Each time all graphs are made, and run once, before the function leaves. Libraries keep what they made when they first met a
shape, so the first rounds may add something; the later ones must not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import median
from benchmarks.gpu.server import APP
from lamina.gpu.protocol import (
    ExecutorSetup,
    ExecutorUsage,
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionUnloaded,
    LoadFunction,
    UnloadFunction,
    from_executor_reader,
)
from lamina.ipc.protocol import FrameChannel, StopProcess
from lamina.values.shm_directory import ShmDirectory

FUNCTIONS = ("shufflenet_v2_x0_5", "resnet50", "bert_base")
ROUNDS, LONGEST_S = 12, 60.0


def run(bench: Bench) -> None:
    folder = ShmDirectory()
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    setup = ExecutorSetup(
        app=APP, device="gpu0", slicer=os.environ.get("LAMINA_SLICER", "green"), folder=folder.path, owner="a", values_owner="b",
        pool_bytes=1 << 26, fd=theirs.fileno(),
    )  # fmt: skip
    argument = msgspec.json.encode(setup).decode()
    process = subprocess.Popen([sys.executable, "-m", "lamina.gpu.executor_main", argument], pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        _come_and_go(bench, FrameChannel(ours, from_executor_reader()), process.pid)
    finally:
        process.terminate()
        process.wait(30)
        folder.close()


def _come_and_go(bench: Bench, channel: FrameChannel, pid: int) -> None:
    at: list[dict[str, int]] = []
    for turn in range(ROUNDS):
        name = FUNCTIONS[turn % len(FUNCTIONS)]
        channel.send(LoadFunction(f"{name}#{turn}", name, 0, time.monotonic_ns() // 1000))
        loaded = _hear(channel, FunctionLoaded, FunctionLoadFailed)
        if isinstance(loaded, FunctionLoadFailed):
            raise RuntimeError(f"{name}: {loaded.error}")
        while (usage := _hear(channel, ExecutorUsage)).graphs_missing or not usage.graphs:
            pass
        channel.send(UnloadFunction(f"{name}#{turn}"))
        _hear(channel, FunctionUnloaded)
        for _ in range(3):  # a second each: it looks for garbage after one
            usage = _hear(channel, ExecutorUsage)
        found = {"load_ms": loaded.load_us // 1000}
        at.append(
            found
            | {"device_mib": usage.device_used_mib, "weights_mib": usage.weights_mib, "graphs": usage.graphs}
            | _held_by(pid)
        )
    channel.send(StopProcess())
    half = at[len(at) // 2]
    for key, unit in (("device_mib", "MiB"), ("host_mib", "MiB"), ("threads", ""), ("files", "")):
        gained = at[-1][key] - half[key]
        bench.report.add(f"{key} gained by rounds {len(at) // 2 + 1} to {len(at)}", gained, unit, rounds=[one[key] for one in at])
    for turn, name in enumerate(FUNCTIONS):
        first_ms, *later_ms = (one["load_ms"] for one in at[turn :: len(FUNCTIONS)])
        bench.report.add(f"{name}: loaded again", median(later_ms), "ms", first_ms=first_ms, all_ms=later_ms)
    bench.report.add("weights and graphs left", at[-1]["weights_mib"] + at[-1]["graphs"], "", most=0.0)


def _held_by(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"host_mib": int(said["VmRSS"].split()[0]) >> 10, "threads": int(said["Threads"]), "files": files}


def _hear(channel: FrameChannel, *kinds: type) -> Any:
    ends_s = time.monotonic() + LONGEST_S
    while time.monotonic() < ends_s:
        while (frame := channel.next_buffered()) is not None:
            if isinstance(frame, kinds):
                return frame
        if not channel.read():
            raise BrokenPipeError("the executor has ended")
    raise TimeoutError(f"no {kinds} in {LONGEST_S:.0f} s")
