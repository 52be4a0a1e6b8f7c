"""How much device time the profiler takes to 5 %: on H200 measurements, replayed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from lamina.predict.device_presets import preset
from lamina.predict.profile import Profile, read_all
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.bench import TimedRun
from lamina.profiler.build_profile import to_points
from lamina.profiler.measurement import AdaptiveMeasurement


class _Replay:
    """A bench that takes as long as was measured on the H200, give or take 2 %; its clock is the device's."""

    device = preset("h200")

    def __init__(self, table: ProfileTable, name: str) -> None:
        self.table, self.name, self.rng, self.now_s = table, name, random.Random(1), 0.0

    def run(self, batch: int, units: int) -> TimedRun:
        us = self.table.median_us(self.name, "h200", batch, units) * self.rng.gauss(1, 0.02)
        self.now_s += us / 1e6
        return TimedRun(us)


def profiling() -> dict[str, Any]:
    """Device time the profiler needs until it claims 5 %, and how far it is off then, on replayed measurements."""
    found: dict[str, Any] = {}
    for profile in read_all(Path("profiles/h200")):
        bench = _Replay(ProfileTable([profile]), profile.function)
        outcome = AdaptiveMeasurement(bench, 64, 0.05, 60.0, clock_s=lambda bench=bench: bench.now_s).run()  # type: ignore[arg-type,misc]
        made = ProfileTable([Profile(function="f", device="h200", points=to_points(outcome.runs))])
        off = [
            abs(
                made.median_us("f", "h200", p.batch, p.units) / bench.table.median_us(profile.function, "h200", p.batch, p.units)
                - 1
            )
            for p in profile.points
        ]
        mean, p90, points = np.mean(off), np.quantile(off, 0.9), len(outcome.runs)
        told = {"device_s": outcome.spent_s, "points": points, "reached": outcome.reached, "mean": mean, "p90": p90}
        found[profile.function] = told
        print(f"  {profile.function}: {points} points in {outcome.spent_s:.1f} s, {mean:.1%} off", flush=True)
    return found
