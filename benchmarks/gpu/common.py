"""What the measurements share: one slicer, models loaded once, rows that are printed as they come and kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from benchmarks.gpu import zoo
from benchmarks.report import Report

WHOLE = 0x7FFF
RESULTS = Path("results/gpu")


class Kept(Report):
    """Rows that are in a file as soon as they are known: a run that is cut off keeps what it had."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._machine = path, machine()

    def add(self, what: str, value: float, unit: str, **details: Any) -> None:
        super().add(what, value, unit, **details)
        rows = [asdict(row) for row in self.rows]
        self._path.write_text(json.dumps({"machine": self._machine, "rows": rows}, indent=1) + "\n")


class Bench:
    """Everything that is made once."""

    def __init__(self) -> None:
        self.report = Report()

    @cached_property
    def slicer(self) -> Any:
        from lamina.gpu.slicers.green import GreenSlicer

        return GreenSlicer()

    @cached_property
    def plain(self) -> Any:
        import torch

        return torch.cuda.Stream()

    @lru_cache(maxsize=64)  # noqa: B019 - there is one, and it lives as long as the process
    def model(self, name: str) -> Any:
        return zoo.build(name)

    def executor(self, weights_mib: int = 0) -> Any:
        from lamina.gpu.executor import open_executor

        return open_executor(self.slicer, weights_mib=weights_mib)

    def graph(self, name: str, batch: int, stream: Any) -> tuple[Any, Any]:
        """(graph, what it needs kept alive)"""
        from benchmarks.gpu.lanes import capture

        model = self.model(name)
        inputs = model.make_input(batch)
        graph, output = capture(lambda: model.module(inputs), stream, warm=2)
        return graph, (inputs, output)


def drain(executor: Any, count: int, limit_s: float = 20.0) -> list[Any]:
    found: list[Any] = []
    ends_s = time.perf_counter() + limit_s
    while len(found) < count:
        found += executor.poll()
        if time.perf_counter() > ends_s:
            raise TimeoutError(f"{count - len(found)} batches never came back")
    for one in found:
        if one.error is not None:
            raise one.error
    return found


def machine() -> dict[str, Any]:
    """Asked from outside: to open the device here would be one process more on it."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    is_twin = os.environ.get("LAMINA_GPU") == "null"
    said = "twin, none" if is_twin else subprocess.run(query, capture_output=True, text=True, check=False).stdout
    device, _, driver = said.strip().partition(", ")
    return {
        "device": device,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": os.environ.get("LAMINA_COMMIT", ""),
    }
