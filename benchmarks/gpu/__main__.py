"""`python -m benchmarks.gpu [NAME ...]`: all of them, or those named. Each writes results/gpu/NAME.json as soon as it is done."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu.common import RESULTS, Bench, Kept

ALL = (
    "overhead",
    "slices",
    "isolation",
    "clocks",
    "resize",
    "quota",
    "idle",
    "dispatch",
    "swap",
    "handover",
    "elastic",
    "batching",
    "five",
    "live",
    "peers",
    "beside",
    "captures",
    "comings",
    "faults",
    "mps_kills",
    "priority",
    "segments",
    "kernel_graphs",
    "density",
    "restart",
    "isolated",
)


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(ALL)
    folder = next((Path(word[6:]) for word in sys.argv[1:] if word.startswith("--out=")), RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before torch starts the driver
    bench = Bench()
    for name in names:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        print(f"-- {name}: {module.__doc__.strip().splitlines()[0]}", flush=True)
        bench.report, begin_s = Kept(folder / f"{name}.json"), time.monotonic()
        try:
            module.run(bench)
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
        print(f"   {time.monotonic() - begin_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
