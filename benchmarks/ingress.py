"""HTTP in several processes: answers a second with 1, 2, 4, ... ingress processes in front of one controller.

Worth a look only where there are cores for all of them: 8 ingress processes, the controller, 3 workers and 4 generators.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

from benchmarks.load import Result, closed
from benchmarks.report import Report
from benchmarks.servers import lamina

SECONDS = 4.0
GENERATORS = 4
CONNECTIONS = 32  # of each generator
BODIES = {
    name: [round(0.001 * n, 7) + 0.1234567 for n in range(count)]
    for name, count in (("one number", 1), ("2,000 numbers (22 kB)", 2_000), ("8,000 numbers (88 kB)", 8_000))
}


def run(report: Report) -> None:
    most = 8 if len(os.sched_getaffinity(0)) >= 16 else 2
    counts = [0, *(count for count in (1, 2, 4, 8) if count <= most)]
    for name, numbers in BODIES.items():
        rates = {}
        for count in counts:
            with lamina("length.py", "--ingress", str(count), "--store", "none") as url:
                found = _together(f"{url}/v1/functions/length", json.dumps(numbers))
            rates[count] = rate = sum(one.rate for one in found)
            p50_ms, p99_ms = (max(getattr(one, key) for one in found) for key in ("p50_ms", "p99_ms"))
            errors = sum(one.errors for one in found)
            where = f"{count} ingress processes" if count else "in the controller's process"
            report.add(f"{name}, HTTP {where}", rate, "answers/s", p50_ms=p50_ms, p99_ms=p99_ms, errors=errors)
        least = 4.0 if most == 8 and len(numbers) > 5_000 else None
        report.add(f"{name}: {most} ingress processes to one", rates[most] / rates[1], "x", least=least)


def _together(url: str, body: str) -> list[Result]:
    with ThreadPoolExecutor(GENERATORS) as pool:
        return list(pool.map(lambda _: closed(url, body, CONNECTIONS, SECONDS), range(GENERATORS)))
