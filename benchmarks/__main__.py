"""`python -m benchmarks [NAME ...]`: all of them, or those named. Writes results/bench-NAMES.json."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from benchmarks.report import Report

ALL = ("simulator", "controller", "planner", "echo", "batching", "startup")
LONG = (
    *("overload", "host_overload", "host_tenants", "chaos", "handover", "ingress", "crash", "workflows", "oip", "hostile"),
    *("cluster", "deciding"),
)


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    for name in names:
        if name not in (*ALL, *LONG):
            sys.exit(f"no benchmark {name!r}; there are {', '.join((*ALL, *LONG))}")
    report = Report()
    print(f"load average before: {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores\n")
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"-- {name}: {(module.__doc__ or name).strip().splitlines()[0]}")
        module.run(report)
    path = Path("results") / f"bench-{'all' if names == list(ALL) else '-'.join(names)}.json"
    report.write(path)
    missed = [row.what for row in report.rows if row.met is False]
    print(f"\n{len(report.rows)} figures in {path}" + (f"; goals missed: {'; '.join(missed)}" if missed else "; all goals met"))


if __name__ == "__main__":
    main()
