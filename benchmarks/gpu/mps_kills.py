"""F12: an MPS client is killed in the middle of its work again and again. What does its neighbour feel, and of what?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import median, percentile

_CLIENT = """
import sys, time
begin = time.time()
import torch
print("imported", time.time(), flush=True)
a = torch.randn(2048, 2048, device="cuda", dtype=torch.half)
for _ in range(20): a @ a
torch.cuda.synchronize()
print("ready", time.time(), flush=True)
ends = time.time() + float(sys.argv[1]); times = []
while time.time() < ends:
    begin = time.perf_counter()
    for _ in range(20): b = a @ a
    torch.cuda.synchronize()
    times.append((time.time(), (time.perf_counter() - begin) * 1e3))
print("times", " ".join(f"{at:.4f}:{ms:.4f}" for at, ms in times))
"""


def run(bench: Bench) -> None:
    """Told apart by what happened at that time: a kill, the import of torch in the next client, its context, or nothing."""
    from lamina.gpu.mps import MpsSlicer

    slicer = MpsSlicer()
    try:
        half = (1 << 25) - 1

        def client(seconds: float) -> tuple[subprocess.Popen[bytes], float, float]:
            """(process, when it had imported torch, when it was ready)"""
            env = {**os.environ, **slicer.environment(half, 4096)}
            started = subprocess.Popen([sys.executable, "-c", _CLIENT, str(seconds)], stdout=subprocess.PIPE, env=env)
            assert started.stdout is not None
            imported, ready = (float(started.stdout.readline().split()[1]) for _ in range(2))
            return started, imported, ready

        def times_of(process: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
            out, _ = process.communicate(timeout=60)
            words = [word.split(b":") for word in out.split()[1:]]
            return [(float(at), float(ms)) for at, ms in words]

        victim, _, began = client(24.0)
        other, imported, ready = client(60.0)
        quiet = (ready, ready + 4.0)
        time.sleep(4)
        spans: dict[str, list[tuple[float, float]]] = {"kill": [], "import": [], "context": [], "beside it": []}
        while time.time() < began + 21:
            killed = time.time()
            slicer.daemon.end_client(other)
            ended = time.time()
            other, imported, ready = client(60.0)
            time.sleep(0.7)
            spans["kill"].append((killed, ended))
            spans["import"].append((ended, imported))
            spans["context"].append((imported, ready))
            spans["beside it"].append((ready, time.time()))
        shaken = times_of(victim)
        slicer.daemon.end_client(other)
        servers = slicer.daemon.servers()
        state = slicer.daemon.ask(f"get_server_status {servers[0]}") if servers else "no server"

        def of(*parts: tuple[float, float]) -> list[float]:
            return [ms for at, ms in shaken if any(begin <= at < end + 0.01 for begin, end in parts)]

        calm = of(quiet)
        whole = of((spans["kill"][0][0], spans["beside it"][-1][1]))
        kills = len(spans["kill"])
        details = {"p50": median(whole) / median(calm), "batches": len(whole), "server": state}
        label = f"F12, {kills} kills of an MPS client: p99 of its neighbour against before"
        bench.report.add(label, percentile(whole, 0.99) / percentile(calm, 0.99), "x", most=1.2, **details)
        for what, parts in spans.items():
            found = of(*parts)
            if found:
                bench.report.add(
                    f"F12: p99 during {what}",
                    percentile(found, 0.99) / percentile(calm, 0.99),
                    "x",
                    p50=median(found) / median(calm),
                    worst_ms=max(found),
                    seconds=sum(end - begin for begin, end in parts),
                    batches=len(found),
                )
        where = Path(os.environ.get("OUT", "out")) / "f12.json"
        where.write_text(json.dumps({"spans": spans, "quiet": quiet, "times": shaken[:: max(1, len(shaken) // 20000)]}))
    finally:
        slicer.close()
