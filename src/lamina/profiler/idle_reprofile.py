"""Idle reprofiling: a server measures a function again by itself, when its profile is stale and the server is idle.

Until then, and where there is never an idle moment, the predictor's ratio stands in: it scales the profile, whose shape may
be wrong. What is measured are the slices the function was seen on, with batches of one, two, four and so on up
to its largest. It needs sample inputs, and an idempotent function. Nothing is written: the files are the user's.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from lamina import encoding
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import Instance
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.shadow_batches import Leaves, ShadowRunner
from lamina.errors import LaminaError
from lamina.predict.online import OnlinePredictor
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.bench import GridPoint
from lamina.sdk.sample_inputs import Inputs

log = logging.getLogger("lamina")

QUIET_S = 3.0
"""No call was served for so long: a pause inside a burst is shorter."""

RUNS = 3
"""Of each point, after one that does not count."""

AGAIN_S = 60.0
"""Before a function is looked at once more; each time it takes twice as long, since some machines never settle."""

Key = tuple[str, str]


@dataclass(slots=True)
class IdleReprofiler:
    driver: RealtimeDriver
    predictor: OnlinePredictor
    shadow_runner: ShadowRunner
    samples: Callable[[], dict[str, list[Inputs]]]  #: called when they are needed: making them may take a while
    quiet_s: float = QUIET_S
    _given: dict[str, list[Leaves]] | None = None
    _not_before_s: dict[Key, float] = field(default_factory=dict)
    _pause_s: dict[Key, float] = field(default_factory=dict)

    def begin(self) -> None:
        self.shadow_runner.run_in_background(self._watch())

    async def _watch(self) -> None:
        quiet_since_s = self._now_s()
        while True:
            await asyncio.sleep(self.quiet_s / 3)
            if not self._is_quiet():
                quiet_since_s = self._now_s()
            elif self._now_s() - quiet_since_s >= self.quiet_s:
                try:
                    await self._reprofile_stale()
                except Exception:  # a server does not end because it cannot measure
                    log.exception("measuring again failed")

    def _is_quiet(self) -> bool:
        state = self.driver.controller.state
        return not state.runs and not state.batches

    def _now_s(self) -> float:
        return self.driver.now_us() / 1e6

    async def _reprofile_stale(self) -> None:
        stale = self.predictor.stale_profiles()
        for function, kind in dict.fromkeys((one.function, one.kind) for one in stale):
            key = (function, kind)
            instance, given = self._instance(function, kind), self._leaves().get(function)
            profile = self.predictor.base.profile(function, kind)
            if instance is None or profile is None or not given or self._now_s() < self._not_before_s.get(key, 0.0):
                continue
            units = sorted({one.units for one in stale if (one.function, one.kind) == key})
            runs = await self._measure(instance, given, units)
            if runs is None:
                return  # a call came: later
            self._pause_s[key] = 2 * self._pause_s.get(key, AGAIN_S / 2)
            self._not_before_s[key] = self._now_s() + self._pause_s[key]
            if runs:
                self._replace_profile(profile, runs)

    def _replace_profile(self, profile: Profile, runs: dict[GridPoint, list[float]]) -> None:
        new = rescale_profile(profile, runs, measured_again=datetime.now(UTC).isoformat(timespec="seconds"))
        before_us = sum(self.predictor.base.median_us(profile.function, profile.device, *place) for place in runs)
        self.predictor.replace_profile(new)
        after_us = sum(self.predictor.base.median_us(profile.function, profile.device, *place) for place in runs)
        words = "the profile of %s on %s was stale and has been measured again: %.2f times what it said"
        log.info(words, profile.function, profile.device, after_us / before_us)

    async def _measure(self, instance: Instance, given: list[Leaves], units: list[int]) -> dict[GridPoint, list[float]] | None:
        """Measured times; None if it had to stop, empty if the function fails on its samples."""
        device = self.driver.controller.state.devices[instance.device]
        most, found = self.driver.controller.state.functions[instance.function].spec.max_batch, dict[GridPoint, list[float]]()
        for count in units:
            home = device.homes.get(instance.id, 0)
            mask = home if home.bit_count() == count else (1 << count) - 1
            if not device.is_valid_slice(mask):
                continue
            for size in batch_sizes(most):
                batch = [given[place % len(given)] for place in range(size)]
                for turn in range(1 + RUNS):
                    if not self._is_quiet() or instance.phase is not InstancePhase.WARM:
                        return None
                    try:
                        took = await self.shadow_runner.run(instance.id, instance.function, instance.device, mask, batch)
                    except LaminaError as error:
                        log.warning("%s", error)
                        return {}
                    if turn:
                        found.setdefault((size, count), []).append(float(max(1, took.device_us)))
        return found

    def _instance(self, function: str, kind: str) -> Instance | None:
        """A warm instance to run on; none of a function that is not idempotent."""
        state = self.driver.controller.state
        known = state.functions.get(function)
        if known is None or not known.spec.idempotent:
            return None
        warm = [one for one in known.instances.values() if one.phase is InstancePhase.WARM]
        return next((one for one in warm if state.devices[one.device].spec.kind == kind), None)

    def _leaves(self) -> dict[str, list[Leaves]]:
        if self._given is None:
            self._given = {name: [_leaves(inputs) for inputs in found] for name, found in self.samples().items()}
        return self._given


def _leaves(inputs: Inputs) -> Leaves:
    return [(("input", name), encoding.encode(value)) for name, value in inputs.items()]


def batch_sizes(most: int) -> list[int]:
    """Batch sizes to measure: one, two, four, and the largest."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return sorted({*found, most})


def rescale_profile(profile: Profile, runs: Mapping[GridPoint, Sequence[float]], **meta: Any) -> Profile:
    """Rescale by `runs` (microseconds): a row of units that was measured as its own points changed, others as all points."""
    before = ProfileTable([profile])
    now_us = {place: statistics.median(us) for place, us in runs.items()}
    ratios = {place: us / before.median_us(profile.function, profile.device, *place) for place, us in now_us.items()}
    rows = {units: statistics.median(r for (_, count), r in ratios.items() if count == units) for _, units in ratios}
    all_over = statistics.median(ratios.values())
    old = {(point.batch, point.units): point for point in profile.points}
    tail = statistics.median(max(1.0, point.p99_us / point.p50_us) if point.p50_us else 1.0 for point in profile.points)
    points = []
    for batch, units in sorted({*old, *now_us}, key=lambda place: (place[1], place[0])):
        known = old.get((batch, units))
        if (batch, units) in now_us:
            us = now_us[batch, units]
            p99_us = us * (known.p99_us / known.p50_us if known and known.p50_us else tail) if not known or known.p99_us else 0.0
            points.append(Point(batch=batch, units=units, p50_us=round(us, 1), p99_us=round(p99_us, 1)))
        elif known is not None:
            ratio = rows.get(units, all_over)
            points.append(replace(known, p50_us=round(known.p50_us * ratio, 1), p99_us=round(known.p99_us * ratio, 1)))
    return replace(profile, points=points, meta=profile.meta | meta)
