"""`python -m benchmarks.gpu.plots`: the pictures of docs/explanation/gpu-slices.md, from what lies in results/gpu."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.figures import COLOURS, INK, RIVAL, use_style
from benchmarks.gpu.common import RESULTS

PLOTS = Path("docs/img")
GOALS = (3, 5, 10)
NAMES = {
    "temporal": "one model at a time",
    "mps": "MPS, equal shares",
    "streams": "a CUDA stream per model",
    "hard slices": "Lamina, hard slices",
    "soft slices": "Lamina, soft slices, planned by hand",
    "frontier": "Lamina, soft slices, default policy",
}
SHADES = {"temporal": "#d0d0d0", "mps": "#b0b0b0", "streams": "#8a8a8a"}


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


def five(plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(9, 4.4))
    found = capacities("five")
    kinds = [kind for kind in NAMES if any(kind == key[1] for key in found)]
    width = 0.82 / len(kinds)
    ours = [kind for kind in kinds if kind not in SHADES]
    for index, kind in enumerate(kinds):
        goals = [goal for goal in GOALS if (goal, kind) in found]
        places = [GOALS.index(goal) + (index - (len(kinds) - 1) / 2) * width for goal in goals]
        colour = SHADES.get(kind) or COLOURS[ours.index(kind)]
        bars = axis.bar(places, [found[goal, kind] for goal in goals], 0.92 * width, label=NAMES[kind], color=colour)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, color=INK)
    axis.set_xticks(range(len(GOALS)), [f"SLO {goal} times the time alone" for goal in GOALS])
    axis.set(title="Five models at once on one H200: capacity by SLO", ylabel="calls/s of each model, 99 % in time")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left")
    return figure


def peers(plt: Any) -> Any:
    """Goodput by offered load, Lamina beside LitServe."""
    figure, axis = plt.subplots(figsize=(9, 4.2))
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows("peers"):
        said = re.match(r"(\w+), (\d+) calls/s of each model offered", row["what"])
        if said:
            found.setdefault(said[1], []).append((float(said[2]), row["value"]))
    most = max(offered for one in found.values() for offered, _ in one)
    axis.plot([0, most], [0, most], color="#bbbbbb", lw=1, ls=(0, (4, 3)))
    axis.text(0.93 * most, 0.95 * most, "offered", color="#888888", ha="right", rotation=0)
    names = {"lamina": ("Lamina", COLOURS[0]), "litserve": ("LitServe, CUDA graphs by hand", RIVAL)}
    for server, points in ((server, sorted(points)) for server, points in found.items()):
        label, colour = names[server]
        axis.plot([0, *(x for x, _ in points)], [0, *(y for _, y in points)], "o-", color=colour, lw=2.2, ms=5, label=label)
        best = max(points, key=lambda point: point[1])
        axis.annotate(f"{best[1]:.0f}", best, xytext=(0, 8), textcoords="offset points", ha="center", color=colour, weight="bold")
    axis.set(
        title="Five models on one H200 behind HTTP: answered within 25 ms",
        xlabel="calls/s of each model, offered",
        ylabel="calls/s of each model, in time",
        xlim=0,
        ylim=0,
    )
    axis.legend(loc="upper left")
    return figure


def behind_http(plt: Any) -> Any:
    """Share in time, and the slowest hundredth, by rate."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in rows("live"):
        said = re.match(r"HTTP, (\w+), (\d+) calls/s of each model, run [12]: within 25 ms$", row["what"])
        if said:
            tries = found.setdefault(said[1], {}).setdefault(float(said[2]), [])
            tries.append((row["value"], row["details"]["p99_ms"]))
    for policy, by_rate in found.items():
        rates = sorted(by_rate)
        for axis, column in ((left, 0), (right, 1)):
            worst = (min, max)[column]
            axis.plot(
                rates, [worst(one[column] for one in by_rate[rate]) for rate in rates], "o-", ms=4, label=f"policy {policy}"
            )
    left.axhline(99, color=INK, lw=0.8, ls=":")
    right.axhline(25, color=INK, lw=0.8, ls=":")
    left.set(title="Five models behind HTTP: the worse of two runs", xlabel="calls/s of each model", ylabel="% within 25 ms")
    right.set(title="Their slowest hundredth", xlabel="calls/s of each model", ylabel="p99 of answers, ms", ylim=0)
    left.legend()
    return figure


def sharing(plt: Any) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": (1, 1.2)})
    found = rows("overhead")
    for place, row in enumerate(reversed(found)):
        low, high = row["details"]["low"], row["details"]["high"]
        colour = COLOURS[1] if "eager" in row["what"] else COLOURS[0]
        left.plot([low, high], [place, place], color=colour)
        left.plot(row["value"], place, "o", ms=4, color=colour)
    left.axvline(1.0, color=INK, lw=0.8, ls=":")
    left.axvline(0.0, color=INK, lw=0.5)
    left.set_yticks(range(len(found)), [row["what"] for row in reversed(found)], fontsize=8)
    left.set(title="A slice of the whole device against bare torch", xlabel="%, median of turns and its 95 % interval")
    found = rows("clocks")
    names = [row["what"].split(":")[0] for row in reversed(found)]
    clock = [row["details"]["by_clock"] - 1 for row in reversed(found)]
    rest = [row["value"] - row["details"]["by_clock"] for row in reversed(found)]
    right.barh(names, clock, color="#9a9a9a", label="lower clock (power)")
    right.barh(names, rest, left=clock, color=COLOURS[1], label="cache, memory")
    right.tick_params(axis="y", labelsize=8)
    right.grid(axis="y", visible=False)
    right.set(title="What neighbours cost, and why", xlabel="added to the time alone")
    right.legend()
    return figure


PICTURES = {
    "gpu-five": (five, "five"),
    "peers": (peers, "peers"),
    "gpu-http": (behind_http, "live"),
    "gpu-sharing": (sharing, "clocks"),
}


def main() -> None:
    use_style()
    import matplotlib.pyplot as plt

    for name, (draw, needs) in PICTURES.items():
        if (RESULTS / f"{needs}.json").exists():
            draw(plt).savefig(PLOTS / f"{name}.png")


if __name__ == "__main__":
    main()
