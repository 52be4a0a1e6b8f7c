"""`python -m benchmarks.gpu.plots`: the pictures of docs/explanation/gpu-slices.md, from what lies in results/gpu."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import RESULTS

PLOTS = Path("docs/img")
GOALS = (3, 5, 10)
NAMES = {
    "temporal": "one at a time",
    "mps": "equal MPS shares",
    "streams": "a stream per model",
    "hard slices": "hard slices (3 of 40 or 5 of 24 SMs)",
    "soft slices": "5 soft slices",
    "frontier": "the same, default policy",
}
OURS = ("hard slices", "soft slices", "frontier")


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def capacities(name: str) -> dict[tuple[int, str], float]:
    """By (goal, how the device was shared)."""
    found = {}
    for row in rows(name):
        said = re.match(r"(\d+)x solo, (.*): calls/s", row["what"])
        if said:
            key = (int(said[1]), next(kind for kind in reversed(NAMES) if kind in said[2]))
            found[key] = max(row["value"], found.get(key, 0.0))  # the better of its options
    return found


def bars(axis: Any, found: dict[tuple[int, str], float], title: str) -> None:
    goals = [goal for goal in GOALS if any(goal == key[0] for key in found)]
    kinds = [kind for kind in NAMES if any(kind == key[1] for key in found)]
    width = 0.8 / len(kinds)
    for index, kind in enumerate(kinds):
        places = [goals.index(goal) + (index - (len(kinds) - 1) / 2) * width for goal in goals if (goal, kind) in found]
        values = [found[goal, kind] for goal in goals if (goal, kind) in found]
        colour = f"C{OURS.index(kind)}" if kind in OURS else str(0.45 + 0.15 * index)
        axis.bar(places, values, 0.92 * width, label=NAMES[kind], color=colour)
        for place, value in zip(places, values, strict=True):
            axis.text(place, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(goals)), [f"{goal}x solo" for goal in goals])
    axis.set(title=title, ylabel="calls/s of each model at 99 % in time")
    axis.legend(fontsize=8, loc="upper left")


def behind_http(left: Any, right: Any) -> None:
    """Share in time, and the slowest hundredth, by rate."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows("live"):
        said = re.match(r"HTTP, (\w+), (\d+) calls/s of each model, run [12]: within 25 ms(.*)", row["what"])
        if said:
            found.setdefault(said[1] + said[3], []).append((float(said[2]), row["value"], row["details"]["p99_ms"]))
    for policy, tries in found.items():
        for axis, column in ((left, 1), (right, 2)):
            axis.plot([one[0] for one in tries], [one[column] for one in tries], "o", ms=4, label=policy)
    left.axhline(99, color="k", lw=0.8, ls=":")
    right.axhline(25, color="k", lw=0.8, ls=":")
    left.set(title="Five models behind HTTP on an H200", xlabel="calls/s of each model", ylabel="% within 25 ms, two runs each")
    right.set(title="Their slowest hundredth", xlabel="calls/s of each model", ylabel="p99 of what was answered, ms", ylim=0)
    left.legend(fontsize=7)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.2))
    bars(axis, capacities("five"), "Five models at once on an H200: calls in time by goal and way of sharing")
    figure.tight_layout()
    figure.savefig(PLOTS / "gpu-five.png", dpi=110)

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    behind_http(left, right)
    figure.tight_layout()
    figure.savefig(PLOTS / "gpu-http.png", dpi=110)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), gridspec_kw={"width_ratios": (1, 1.25)})
    found = rows("overhead")
    for place, row in enumerate(reversed(found)):
        low, high = row["details"]["low"], row["details"]["high"]
        left.plot([low, high], [place, place], color="C1" if "eager" in row["what"] else "C0")
        left.plot(row["value"], place, ".", color="C1" if "eager" in row["what"] else "C0")
    left.axvline(1.0, color="k", lw=0.8, ls=":")
    left.axvline(0.0, color="k", lw=0.5)
    left.set_yticks(range(len(found)), [row["what"] for row in reversed(found)], fontsize=7)
    left.set(title="A slice of the whole device against bare torch", xlabel="%, median of turns and its 95 % interval")
    found = rows("clocks")
    names = [row["what"].split(":")[0] for row in reversed(found)]
    clock = [row["details"]["by_clock"] - 1 for row in reversed(found)]
    rest = [row["value"] - row["details"]["by_clock"] for row in reversed(found)]
    right.barh(names, clock, color="0.6", label="lower clock (power)")
    right.barh(names, rest, left=clock, color="C3", label="cache, memory")
    right.tick_params(axis="y", labelsize=7)
    right.set(title="What neighbours cost, and why", xlabel="time alone added")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOTS / "gpu-sharing.png", dpi=110)


if __name__ == "__main__":
    main()
