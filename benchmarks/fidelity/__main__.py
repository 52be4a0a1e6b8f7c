"""See `benchmarks.fidelity`."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from pathlib import Path

from benchmarks.fidelity import cpu, emulated, gpu
from benchmarks.fidelity.cases import SEED

RESULT = Path("results/prediction-fidelity.json")


def main() -> None:
    words = sys.argv[1:] or ["emulated", "cpu"]
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "emulated" in words:
        found["emulated"] = emulated.compared()
    if "cpu" in words:
        found["cpu"] = [row for name in cpu.WORDS for row in asyncio.run(cpu.live(name))]
    if "gpu" in words:
        found["gpu"] = gpu.compared(Path(words[words.index("gpu") + 1]))
    found["made"] = {
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
        "seconds": {"emulated": emulated.SECONDS, "cpu": cpu.PARTS * cpu.SECONDS, "gpu": gpu.SECONDS},
        "load_average": round(os.getloadavg()[0], 2),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
