"""Profile construction from measured runs: medians, tails, spread, handover, and provenance."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lamina
from lamina.predict import profile as profiles
from lamina.predict.interference import bandwidth_demand
from lamina.predict.profile import Handover, Point, Profile, Traits
from lamina.profiler.bench import Bench, GridPoint, ReportsHandover, ReportsTraits
from lamina.profiler.measurement import MeasurementOutcome
from lamina.profiler.measurement_log import MeasurementLog, VisitRecord
from lamina.profiler.surrogate import MEDIAN_EFFICIENCY, STALL_RATIO, without_stalls

ENOUGH_RUNS = 200
"""For a 99th percentile of one's own. With fewer, a point has the tail of all points together, times its median."""


QUANTILES = 41
"""From the least to the most: one for every 2.5 %."""
LEAST_RUNS = 16
"""To say how times spread. Fewer, and one slow run would look like a habit."""


def to_points(runs: Mapping[GridPoint, Sequence[float]]) -> list[Point]:
    kept = {place: without_stalls(values) for place, values in runs.items() if _has_complete_row(place, runs)}
    medians = {place: statistics.median(values) for place, values in kept.items()}
    tail = _p99([us / medians[place] for place, values in kept.items() for us in values])
    points = []
    for place in sorted(kept, key=lambda place: (place[1], place[0])):
        p99_us = _p99(kept[place]) if len(kept[place]) >= ENOUGH_RUNS else medians[place] * tail
        points.append(Point(batch=place[0], units=place[1], p50_us=round(medians[place], 1), p99_us=round(p99_us, 1)))
    return points


def to_spread(runs: Mapping[GridPoint, Sequence[float]]) -> list[float]:
    """Of all runs over the median of their place: quantiles, so that a simulation can draw from them."""
    kept = [without_stalls(values) for values in runs.values()]
    ratios = [us / statistics.median(values) for values in kept for us in values if len(values) > 1]
    if len(ratios) < LEAST_RUNS:
        return []
    inside = statistics.quantiles(ratios, n=QUANTILES - 1, method="inclusive")
    return [round(ratio, 4) for ratio in (min(ratios), *inside, max(ratios))]


def fit_handover(seen: Sequence[tuple[int, float]]) -> Handover | None:
    """Linear fit over the batch size. Means and not medians, without stalls: a batch behind it waits for all of it."""
    if not seen:
        return None
    limit_us = STALL_RATIO * statistics.median(us for _, us in seen)
    kept = [(size, us) for size, us in seen if us <= limit_us] or list(seen)
    if len({size for size, _ in kept}) == 1:
        return Handover(round(max(0.0, statistics.fmean(us for _, us in kept)), 1))
    line = statistics.linear_regression([size for size, _ in kept], [us for _, us in kept])
    return Handover(round(max(0.0, line.intercept), 1), round(max(0.0, line.slope), 2))


def pace_drift(visits: Sequence[VisitRecord]) -> float | None:
    """How far the machine's pace was another one when a place was visited again, as a part of the time: one standard deviation,
    less what repeats of one moment explain. None where no place was."""
    places: dict[GridPoint, list[list[float]]] = {}
    for visit in visits:
        places.setdefault((visit.batch, visit.units), []).append([math.log(us) for us in without_stalls(visit.us)])
    between, chance = [], []
    for seen in places.values():
        medians = [statistics.median(logs) for logs in seen]
        if len(medians) < 2:
            continue
        between.append(statistics.variance(medians))
        chance += [MEDIAN_EFFICIENCY**2 * statistics.variance(logs) / len(logs) for logs in seen if len(logs) > 1]
    if not between:
        return None
    return math.sqrt(max(0.0, statistics.fmean(between) - (statistics.fmean(chance) if chance else 0.0)))


def build_profile(
    function: str, bench: Bench, outcome: MeasurementOutcome, record: MeasurementLog, target: float, app: Path
) -> Profile:
    """Of all sessions in the record; `outcome` is that of the last."""
    every = [us for values in outcome.runs.values() for us in values]
    stalls = len(every) - sum(len(without_stalls(values)) for values in outcome.runs.values())
    meta: dict[str, Any] = {
        **bench.device_info(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(app.parent),
        "lamina": lamina.__version__,
        "runs": len(every),
        "stalls": stalls,
        "disturbed": sum(ended.disturbed for ended in record.sessions),
        "device_s": round(sum(every) / 1e6, 2),
        "spent_s": round(sum(ended.spent_s for ended in record.sessions), 1),
        "unsure": round(outcome.uncertainty, 4),
        "target": target,
    }
    if (wander := pace_drift(record.visits)) is not None:
        times_s = [visit.at_s for visit in record.visits if visit.at_s]
        meta |= {"wandering": round(wander, 4), "over_s": max(times_s, default=0) - min(times_s, default=0)}
    points = to_points(outcome.runs)
    traits: Traits | None = bench.traits() if isinstance(bench, ReportsTraits) else None
    meta["bandwidth"] = (
        "from the bytes its operators move, as if nothing were cached"
        if traits is not None
        else "not measured: it takes the device's own counters, which need rights a worker does not have"
    )
    return Profile(
        function=function,
        device=bench.device.kind,
        points=points,
        spread=to_spread(outcome.runs),
        traits=traits,
        handover=bench.handover() if isinstance(bench, ReportsHandover) else None,
        bandwidth=round(bandwidth_demand(traits, bench.device.kind, points), 4) if traits is not None else 0.0,
        load_us=statistics.median_low(record.loads_us) if record.loads_us else 0,
        memory_mib=max((ended.memory_mib for ended in record.sessions), default=0),
        meta=meta,
    )


def write_atomically(profile: Profile, path: Path) -> None:
    """Whole or not at all: a server may be reading."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    profiles.write(profile, fresh)
    fresh.replace(path)


def digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:12]


def git_commit(folder: Path) -> str:
    """Of the checkout the app lies in, with a + for changes that are in no commit; empty where there is none."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _has_complete_row(place: GridPoint, runs: Mapping[GridPoint, Sequence[float]]) -> bool:
    """A number of units with one batch size, where others have more, would be read as a line through nothing."""
    widths = {units: len({batch for batch, count in runs if count == units}) for _, units in runs}
    return widths[place[1]] > 1 or max(widths.values()) == 1


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
