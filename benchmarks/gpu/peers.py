"""Five models on one GPU behind HTTP, Lamina beside LitServe: calls a second in time by what is offered.

Same models, weights, machine and open-loop generator, one after the other. A call counts if it was answered within 25 ms of the
moment it was due. Lamina runs as it comes with six ingress processes; LitServe has six API processes, one worker per model and
CUDA graphs captured by hand (`benchmarks/peers/litserve_five.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.live import GOAL_S, settle
from benchmarks.gpu.server import load, on_cores, once, request, served
from benchmarks.gpu.zoo import FIVE

LAMINA_RATES = os.environ.get("LAMINA_RATES", "400 600 800 1000 1200").split()
RATES = {"lamina": tuple(map(int, LAMINA_RATES)), "litserve": (50, 100, 200, 300, 400, 600)}
BEYOND = {1.2: 0.95, 1.5: 0.95, 1.75: 0.93, 5.0: 0.9}
"""Times the best goodput that is offered, and the part of it that is to be kept."""
SECONDS = 2.0
PROFILES = os.environ.get("LAMINA_PROFILES")
"""A folder for where the threads of server and executor spend their time at the best rate (py-spy, collapsed stacks)."""
KINDS = ("ingress", "executor", "codec", "worker")
LITSERVE_PORT = 8791


def run(bench: Bench) -> None:
    with served("--ingress", "6") as (url, port, pid):
        for name in FIVE:
            once(port, request(name, patient=True))
        settle(url)
        best = _sweep(bench, "lamina", port, pid)
        if PROFILES:
            with _profiled(pid):
                _attempt(bench, "lamina", port, pid, round(best))
        for times, kept in BEYOND.items():
            found = _attempt(bench, "lamina", port, pid, round(times * best))
            if PROFILES and times in (1.5, 5.0):
                with _profiled(pid, f"-{times:g}"):
                    _attempt(bench, "lamina", port, pid, round(times * best))
            bench.report.add(f"lamina, {times:g} times its best offered: goodput kept", round(found / best, 3), "x", least=kept)
    if "litserve" not in os.environ.get("LAMINA_PEERS", "lamina litserve"):
        return
    with _litserve() as (port, pid):
        _sweep(bench, "litserve", port, pid)


def _sweep(bench: Bench, server: str, port: int, pid: int) -> float:
    """The best goodput over all rates."""
    return max(_attempt(bench, server, port, pid, rate) for rate in RATES[server])


def _attempt(bench: Bench, server: str, port: int, pid: int, rate: int) -> float:
    """Calls a second of each model within the goal."""
    before, counted = cpu_seconds(pid), counts(port, server)
    runs = [load(port, dict.fromkeys(FIVE, rate), SECONDS, 10 * seed, 4, server) for seed in (1, 2)]
    after, found = cpu_seconds(pid), [one for run in runs for one in run]
    counted = counts(port, server) - counted
    batches = counted.pop("batches", 0)
    in_time = sum(status == 200 and took <= GOAL_S for _, status, took in found)
    times = sorted(took * 1e3 for _, status, took in found if status == 200)
    goodput = in_time / (2 * SECONDS * len(FIVE))
    bench.report.add(
        f"{server}, {rate} calls/s of each model offered: answered within 25 ms",
        round(goodput, 1),
        "calls/s of each",
        share=round(in_time / len(found), 4),
        p50_ms=percentile(times, 0.5) if times else 0.0,
        p99_ms=percentile(times, 0.99) if times else 0.0,
        statuses=str({code: sum(status == code for _, status, _ in found) for code in sorted({s for _, s, _ in found})}),
        by_run=[round(sum(status == 200 and took <= GOAL_S for _, status, took in run) / SECONDS / len(FIVE)) for run in runs],
        mean_batch=round(counted.pop("jobs", 0) / max(1, batches), 2),
        rejected={name.removeprefix("rejected: "): count for name, count in counted.items()},
        cores={name: round((took - before.get(name, 0.0)) / (2 * SECONDS), 2) for name, took in after.items()},
    )
    return goodput


def counts(port: int, server: str) -> Counter[str]:
    """What Lamina has counted until now: batches, their jobs, and rejections by their reason."""
    found: Counter[str] = Counter()
    if server != "lamina":
        return found
    names = {"lamina_batch_size_count": "batches", "lamina_batch_size_sum": "jobs"}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            if name == "lamina_refusals_total":
                found["rejected: " + labels.partition('reason="')[2].partition('"')[0]] += int(float(value))
            elif name in names:
                found[names[name]] += int(float(value))
    return found


@contextmanager
def _profiled(pid: int, label: str = "") -> Iterator[None]:
    named = {"server": pid} | {kind.split()[0]: int(kind.split()[1]) for kind in cpu_seconds(pid) if kind.startswith("executor ")}
    common = ["py-spy", "record", "--nonblocking", "-t", "-d", str(int(2 * SECONDS)), "-r", "200", "-f", "raw"]
    running = [
        subprocess.Popen(
            [*common, "-o", str(Path(PROFILES or ".", f"{name}{label}.txt")), "-p", str(process)], stdout=subprocess.DEVNULL
        )
        for name, process in named.items()
    ]
    yield
    for process in running:
        process.wait(30)


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of a process and of all below it, by what they are: each, and those of one kind together."""
    children: dict[int, list[int]] = {}
    took: dict[int, float] = {}
    words: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        took[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        kind = "server" if one == pid else next((word for word in KINDS if word in words.get(one, "")), "other")
        found[kind] = found.get(kind, 0.0) + took.get(one, 0.0)
        found[f"{kind} {one}"] = took.get(one, 0.0)
    return found


@contextmanager
def _litserve() -> Iterator[tuple[int, int]]:
    path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
    words = [sys.executable, "-m", "benchmarks.peers.litserve_five", str(LITSERVE_PORT)]
    options = {"start_new_session": True, "preexec_fn": on_cores(clients=False)}
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, **options)
    try:
        ends_s = time.monotonic() + 120
        waiting = list(FIVE)
        while waiting:  # a model answers once its worker has captured its graphs
            try:
                status, body, _ = once(LITSERVE_PORT, request(waiting[0], peer="litserve"))
            except OSError:
                status, body = 0, b""
            if status == 200:
                waiting.pop(0)
            elif time.monotonic() > ends_s:
                raise TimeoutError(f"LitServe does not answer for {waiting[0]}: {status} {body[:200]!r}")
            else:
                time.sleep(0.5)
        yield LITSERVE_PORT, process.pid
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)
