"""Idle reprofiling: a server measures a function again by itself, when its profile is stale and the server is idle.

Until then, and where there is never an idle moment, the predictor's ratio stands in: it scales the profile, whose shape may
be wrong. What is measured are the slices the function was seen on, with batches of one, two, four and so on up
to its largest. It needs sample inputs, and an idempotent function. Nothing is written: the files are the user's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lamina import encoding
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import Instance
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.shadow_batches import Leaves, ShadowRunner
from lamina.errors import LaminaError
from lamina.predict import online
from lamina.predict.profile import Profile
from lamina.predict.reprofile import Place, rescale_profile
from lamina.sdk.sample_inputs import Inputs

log = logging.getLogger("lamina")

QUIET_S = 3.0
"""Nobody was served for so long: a pause inside a burst is shorter."""

RUNS = 3
"""Of each place, after one that does not count."""

AGAIN_S = 60.0
"""Before a function is looked at once more; each time it takes twice as long, since some machines never settle."""

Key = tuple[str, str]


@dataclass(slots=True)
class IdleReprofiler:
    loop: RealtimeDriver
    samples: Callable[[], dict[str, list[Inputs]]]  #: called when they are needed: making them may take a while
    quiet_s: float = QUIET_S
    _given: dict[str, list[Leaves]] | None = None
    _not_before_s: dict[Key, float] = field(default_factory=dict)
    _pause_s: dict[Key, float] = field(default_factory=dict)

    def begin(self) -> None:
        rehearsal = self.loop.shadow_runner
        assert rehearsal is not None and isinstance(self.loop.controller.predictor, online.OnlinePredictor)
        rehearsal.task = asyncio.get_running_loop().create_task(self._watch(rehearsal, self.loop.controller.predictor))

    async def _watch(self, rehearsal: ShadowRunner, predictor: online.OnlinePredictor) -> None:
        quiet_since_s = self._now_s()
        while True:
            await asyncio.sleep(self.quiet_s / 3)
            if not self._is_quiet():
                quiet_since_s = self._now_s()
            elif self._now_s() - quiet_since_s >= self.quiet_s:
                try:
                    await self._reprofile_stale(rehearsal, predictor)
                except Exception:  # a server does not end because it cannot measure
                    log.exception("measuring again failed")

    def _is_quiet(self) -> bool:
        state = self.loop.controller.state
        return not state.runs and not state.batches

    def _now_s(self) -> float:
        return self.loop.now_us() / 1e6

    async def _reprofile_stale(self, rehearsal: ShadowRunner, predictor: online.OnlinePredictor) -> None:
        stale = predictor.stale_profiles()
        for function, kind in dict.fromkeys((one.function, one.kind) for one in stale):
            key = (function, kind)
            instance, given = self._instance(function, kind), self._leaves().get(function)
            profile = predictor.base.profile(function, kind)
            if instance is None or profile is None or not given or self._now_s() < self._not_before_s.get(key, 0.0):
                continue
            units = sorted({one.units for one in stale if (one.function, one.kind) == key})
            runs = await self._measured(rehearsal, instance, given, units)
            if runs is None:
                return  # somebody came: later
            self._pause_s[key] = 2 * self._pause_s.get(key, AGAIN_S / 2)
            self._not_before_s[key] = self._now_s() + self._pause_s[key]
            if runs:
                self._renew(predictor, profile, runs)

    def _renew(self, predictor: online.OnlinePredictor, profile: Profile, runs: dict[Place, list[float]]) -> None:
        new = rescale_profile(profile, runs, measured_again=datetime.now(UTC).isoformat(timespec="seconds"))
        before_us = sum(predictor.base.median_us(profile.function, profile.device, *place) for place in runs)
        predictor.replace_profile(new)
        after_us = sum(predictor.base.median_us(profile.function, profile.device, *place) for place in runs)
        words = "the profile of %s on %s was stale and has been measured again: %.2f times what it said"
        log.info(words, profile.function, profile.device, after_us / before_us)

    async def _measured(
        self, rehearsal: ShadowRunner, instance: Instance, given: list[Leaves], units: list[int]
    ) -> dict[Place, list[float]] | None:
        """Measured times; None if it had to stop, empty if the function fails on its samples."""
        device = self.loop.controller.state.devices[instance.device]
        most, found = self.loop.controller.state.functions[instance.function].spec.max_batch, dict[Place, list[float]]()
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
                        took = await rehearsal.run(instance.id, instance.function, instance.device, mask, batch)
                    except LaminaError as error:
                        log.warning("%s", error)
                        return {}
                    if turn:
                        found.setdefault((size, count), []).append(float(max(1, took.device_us)))
        return found

    def _instance(self, function: str, kind: str) -> Instance | None:
        """A warm instance to run on; none of a function that is not idempotent."""
        state = self.loop.controller.state
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
