"""Two trees of the project, measured in turns on the same cores: `python -m benchmarks.before_after OLD [--rounds N] [NAME ...]`.

OLD is an unpacked tree of another commit (`git archive COMMIT src benchmarks scenarios profiles`). Each round runs the
benchmarks of the old tree and then those of this one, so that what else the machine does falls on both; of all rounds the best
value of a row counts. Writes results/bench-before-after.json, or `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import machine

NAMES = ("simulator", "controller", "planner")
PER_S = ("calls/s", "events/s", "times", "requests/s")
"""Units of which more is better; of all others less is."""


def measure(tree: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Rows by name, of the benchmarks of one tree."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "benchmarks", "scenarios", "profiles"):
            (Path(folder) / part).symlink_to(tree / part)
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([f"{folder}/src", folder, *before.split(os.pathsep)])
        subprocess.run(
            [sys.executable, "-m", "benchmarks", *names], cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=True
        )
        found = json.loads((Path(folder) / "results" / f"bench-{'-'.join(names)}.json").read_text())
    return {row["what"]: row for row in found["rows"]}


def better(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    if one is None:
        return other
    return max(one, other, key=lambda row: row["value"] if row["unit"] in PER_S else -row["value"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("old", type=Path)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results") / "bench-before-after.json")
    options = parser.parse_intermixed_args()
    trees = {"before": options.old.resolve(), "after": Path.cwd()}
    best: dict[str, dict[str, dict[str, Any]]] = {side: {} for side in trees}
    for _ in range(options.rounds):
        for side, tree in trees.items():
            print(f"==== {side}", flush=True)
            for what, row in measure(tree, options.names).items():
                best[side][what] = better(best[side].get(what), row)
    rows = []
    for what, after in best["after"].items():
        if before := best["before"].get(what):
            ratio = after["value"] / before["value"] if before["value"] else float("nan")
            rows.append({"what": what, "unit": after["unit"], "before": before["value"], "after": after["value"], "ratio": ratio})
            print(f"{what:62} {before['value']:>12,.4g} {after['value']:>12,.4g} {after['unit']:9} {ratio:6.2f}")
    about = machine() | {"command": f"python -m benchmarks.before_after OLD {' '.join(options.names)}"}
    options.out.write_text(json.dumps({"machine": about, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
