"""Two tenants at a server whose controller is at its limit: what one of them gets while the other floods, and shares by weights.

The set-up is that of `host_overload.py`, with tokens: five models on an emulated H200 behind ingress processes, 25 ms to answer.
First the best goodput of one tenant; then a tenant that asks for a fifth of it while another offers up to three times of it; then
both offer one and a half times of it, with weights 3 and 1. Generators share their cores with the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.apps.five import NAMES
from benchmarks.host_overload import FIRST, GOAL_US, PROFILES, RISE
from benchmarks.load import generator
from benchmarks.report import Report
from benchmarks.servers import lamina

SECONDS = 3.0
WEIGHTS = {"quiet": 1, "flood": 1, "heavy": 3, "light": 1}
FLOODS = (1.0, 1.5, 3.0)
"""Times the best goodput that the other tenant offers."""

QUIET_PART = 0.2
Rows = list[tuple[int, ...]]


def run(report: Report) -> None:
    ingress = 2 if len(os.sched_getaffinity(0)) >= 6 else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = folder / "store.db"
        tenants = {tenant: _requests(folder, tenant, _token(store, tenant, weight)) for tenant, weight in WEIGHTS.items()}
        options = ["--emulate", "h200", "--profiles", str(PROFILES), "--ingress", str(ingress), "--store", str(store)]
        with lamina("five.py", *options) as url:
            _offer(url, {tenants["quiet"]: 100.0})  # the first calls load
            best, rate, share = 0.0, FIRST, 1.0
            while share >= 0.9:
                [rows] = _offer(url, {tenants["flood"]: rate})
                best, rate, share = max(best, _goodput(rows)), rate * RISE, _share(rows)
            report.add(f"best goodput of one tenant behind {ingress} ingress processes", best, "calls/s")
            for times in FLOODS:
                quiet, flood = _offer(url, {tenants["quiet"]: QUIET_PART * best, tenants["flood"]: times * best})
                _add(report, f"{times:g} times that by another tenant: a fifth of it in time", quiet, flood, 0.95)
            heavy, light = _offer(url, {tenants["heavy"]: 1.5 * best, tenants["light"]: 1.5 * best})
            ratio = _goodput(heavy) / max(1.0, _goodput(light))
            both = (_goodput(heavy) + _goodput(light)) / best
            report.add("both 1.5 times that, weights 3 and 1: ratio of their goodput", ratio, "x", least=2.4, both_of_best=both)


def _add(report: Report, what: str, quiet: Rows, flood: Rows, least: float) -> None:
    took_us = sorted(row[4] for row in quiet if row[1] == 200) or [0]
    report.add(
        what,
        _share(quiet),
        "of the calls",
        least=least,
        p50_ms=took_us[len(took_us) // 2] / 1000,
        p99_ms=took_us[int(0.99 * len(took_us))] / 1000,
        statuses=json.dumps(Counter(row[1] for row in quiet)),
        other_goodput=_goodput(flood),
        other_statuses=json.dumps(Counter(row[1] for row in flood)),
    )


def _goodput(rows: Rows) -> float:
    return sum(row[1] == 200 and row[4] <= GOAL_US for row in rows) / SECONDS


def _share(rows: Rows) -> float:
    return _goodput(rows) * SECONDS / max(1, len(rows))


def _lamina(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "lamina", *words], capture_output=True, text=True, check=True).stdout


def _token(store: Path, tenant: str, weight: float) -> str:
    _lamina("tenant", "set", tenant, "--weight", str(weight), "--store", str(store))
    return _lamina("token", "create", tenant, "--scope", "invoke", "--tenant", tenant, "--store", str(store)).split()[0]


def _requests(folder: Path, tenant: str, token: str) -> tuple[str, ...]:
    """Files with one request each."""
    lines = ("Host: localhost", f"Authorization: Bearer {token}", "Content-Type: application/octet-stream", "Content-Length: 16")
    files = [folder / f"{tenant}-{name}" for name in NAMES]
    for name, file in zip(NAMES, files, strict=True):
        file.write_text("\r\n".join([f"POST /v1/functions/{name} HTTP/1.1", *lines, "", "x" * 16]))
    return tuple(map(str, files))


def _offer(url: str, rates: dict[tuple[str, ...], float]) -> list[Rows]:
    """All at the same time; what each was answered: request, status, due, sent, took."""
    host, _, port = url.removeprefix("http://").partition(":")
    running = [
        subprocess.Popen(
            [str(generator()), host, port, str(rate), str(SECONDS), "300", str(seed), *files], stdout=subprocess.PIPE, text=True
        )
        for seed, (files, rate) in enumerate(rates.items(), 1)
    ]
    said = [process.communicate()[0].splitlines() for process in running]
    return [[tuple(map(int, line.split())) for line in lines[:-1]] for lines in said]
