"""`python -m benchmarks.prediction [PART ...]`: how good the predictors are, and how fast.

All parts by default, see `PARTS`. What is found goes into results/prediction.json part by part, with the commit, the date and
the seconds each took; parts not asked for stay as they are, so a run that was interrupted goes on by naming the rest. Then
the plots of docs/img are made. Functions that are predicted are never among those learnt from. `lightgbm` is needed for
`v100`, `v100:SEED` and the comparison of learners, matplotlib for the plots.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prediction import h200, learners, neighbours, own, profiling, speed, unseen, v100
from benchmarks.prediction.plots import plots
from benchmarks.report import machine

RESULT = Path("results/prediction.json")
V100_SEEDS = (0, 1, 2, 3)  #: all but the first were looked at once, when the method was settled

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "h200": h200.h200,
    "traced": h200.traced,
    "learners": learners.learners,
    "neighbours": neighbours.neighbours,
    "profiling": profiling.profiling,
    "speed": speed.speed,
    "v100": v100.run,
    **{f"v100:{seed}": partial(unseen.unseen_models, seed) for seed in V100_SEEDS},
    **{f"own:{seed}": partial(own.own_probes, seed) for seed in V100_SEEDS},
}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    for name in names:
        if name not in PARTS:
            sys.exit(f"no part {name!r}; there are {', '.join(PARTS)}")
    for name in names:
        begin_s = time.monotonic()
        made = rounded(PARTS[name]())
        found = json.loads(RESULT.read_text()) if RESULT.exists() else {}  # now: another part may have been made meanwhile
        about = {key: machine()[key] for key in ("commit", "date", "cpu", "cores", "python")}
        found[name] = made | {"made": about | {"numpy": np.__version__, "seconds": round(time.monotonic() - begin_s)}}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    plots(json.loads(RESULT.read_text()))


def rounded(value: Any) -> Any:
    """Four digits: nothing here is known better."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(float(value), 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
