"""Goodput past what the controller's process can do: five models on an emulated H200 behind ingress processes, 25 ms to answer.

The device has room for more, so the host is what is overloaded. Rates rise until a tenth is not in time; then multiples of the
best goodput are offered, as `benchmarks/gpu/peers.py` does on a GPU. Emulated: the gateway, the ingress processes and the
controller are real, and share their cores with the generator.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from benchmarks.apps.five import NAMES
from benchmarks.load import generator
from benchmarks.report import Report
from benchmarks.servers import children_by_parent, cpu_s, lamina

GOAL_US = 25_000
FIRST, RISE, SECONDS = 4_000.0, 1.25, 2.0
BEYOND = {0.5: 0.45, 1.0: 0.9, 1.2: 0.95, 1.5: 0.95, 1.75: 0.93, 5.0: 0.9}
"""Times the best goodput that is offered, and the part of it that is to be had."""

PROFILES = Path(__file__).parents[1] / "profiles" / "h200"


def run(report: Report) -> None:
    ingress = 2 if len(os.sched_getaffinity(0)) >= 6 else 1
    options = ["--emulate", "h200", "--profiles", str(PROFILES), "--ingress", str(ingress), "--store", "none"]
    with tempfile.TemporaryDirectory() as folder, lamina("five.py", *options) as url:
        server = children_by_parent()[os.getpid()][-1]
        files = [_request(Path(folder), url, name) for name in NAMES]
        best, rate, share = 0.0, FIRST, 1.0
        while share >= 0.9:
            goodput, share = _offer(report, url, files, rate, server)
            best, rate = max(best, goodput), rate * RISE
        report.add(f"best goodput behind {ingress} ingress processes", best, "calls/s")
        for times, least in BEYOND.items():
            goodput, _ = _offer(report, url, files, times * best, server)
            report.add(f"  {times:g} times that offered: goodput, of the best", goodput / best, "x", least=least)


def _request(folder: Path, url: str, name: str) -> str:
    """A file with one request, and the first call of it answered."""
    headers = {"content-type": "application/octet-stream", "lamina-deadline-ms": "60000"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/functions/{name}", b"x", headers)).read()
    head = (
        f"POST /v1/functions/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\nContent-Length: 16"
    )
    (folder / name).write_bytes(head.encode() + b"\r\n\r\n" + b"x" * 16)
    return str(folder / name)


def _offer(report: Report, url: str, files: list[str], rate: float, server: int) -> tuple[float, float]:
    """Calls a second in time, and their share."""
    others = children_by_parent().get(server, [])
    before = [sum(map(cpu_s, pids)) for pids in ([server], others)]
    host, _, port = url.removeprefix("http://").partition(":")
    words = [str(generator()), host, port, str(rate), str(SECONDS), "400", "1", *files]
    *lines, last = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    server_s, others_s = (sum(map(cpu_s, pids)) - was for pids, was in zip(([server], others), before, strict=True))
    rows = [tuple(map(int, line.split())) for line in lines]
    took_us = sorted(took for _, status, _, _, took in rows if status == 200)
    in_time = sum(took <= GOAL_US for took in took_us)
    statuses = {code: sum(row[1] == code for row in rows) for code in sorted({row[1] for row in rows})}
    report.add(
        f"  {rate:,.0f} calls/s offered: within 25 ms",
        in_time / SECONDS,
        "calls/s",
        late=len(took_us) - in_time,
        p99_ms=took_us[int(0.99 * len(took_us))] / 1000 if took_us else 0.0,
        statuses=json.dumps(statuses),
        unanswered=int(last.split()[2]),
        controller_cores=server_s / SECONDS,
        ingress_cores=others_s / SECONDS,
    )
    return in_time / SECONDS, in_time / max(1, len(rows))
