"""See `benchmarks.fidelity`. Each kind can be cut short by a policy or a function: `emulated edf`, `cpu clocked`."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.fidelity import cpu, emulated, replay
from benchmarks.fidelity.cases import SEED
from lamina.profiler.build_profile import git_commit

RESULT = Path("results/prediction-fidelity.json")


def main() -> None:
    words = sys.argv[1:] or ["emulated", "cpu"]
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "emulated" in words:
        runs = [run for run in emulated.RUNS if run[0] in words] or emulated.RUNS
        _put(found, "emulated", emulated.compared(runs))
    if "cpu" in words:
        for name in [name for name in cpu.WORDS if name in words] or cpu.WORDS:
            _put(found, "cpu", cpu.rows(name, asyncio.run(cpu.live(name))))
    if "replay" in words:
        if words[-1] == "replay":  # all there are
            found["gpu"] = []
        _put(found, "gpu", replay.rows([Path(word) for word in words[words.index("replay") + 1 :]]))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


def _put(found: dict[str, Any], kind: str, rows: list[dict[str, Any]]) -> None:
    """In place of earlier rows of the same run."""
    for row in rows:
        print(json.dumps(row), flush=True)
    new = {_name(row) for row in rows}
    found[kind] = [row for row in found.get(kind, []) if _name(row) not in new] + rows
    seconds = {"emulated": emulated.REPEATS * emulated.SECONDS, "cpu": cpu.PARTS * cpu.SECONDS, "gpu": "as recorded"}[kind]
    found.setdefault("made", {})[kind] = {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(Path()),
        "seed": SEED,
        "seconds": seconds,
        "load": round(os.getloadavg()[0], 2),
    }


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("run"), row["what"], row["load"]


if __name__ == "__main__":
    main()
