"""Rows of figures, each beside its floor or goal; printed as they come and kept as JSON with the machine they are from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Row:
    what: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)

    def add(
        self, what: str, value: float, unit: str, *, least: float | None = None, most: float | None = None, **details: Any
    ) -> None:
        goal, met = "", None
        if least is not None:
            goal, met = f">= {least:g}", value >= least
        elif most is not None:
            goal, met = f"<= {most:g}", value <= most
        self.rows.append(Row(what, value, unit, goal, met, details))
        mark = {None: " ", True: "+", False: "-"}[met]
        more = "  ".join(f"{key}={_short(item)}" for key, item in details.items())
        print(f"{mark} {what:58} {_short(value):>9} {unit:9} {goal:>10}   {more}", flush=True)

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")


def _short(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        "",
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "load_average": os.getloadavg()[0],
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }
