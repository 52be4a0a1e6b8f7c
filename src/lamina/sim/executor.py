"""Devices that exist only as profiles: how long a batch takes is the profile's median times seeded noise.

Booked batches wait here for the one they are behind, just as an engine holds them; what they do when their turn comes is
not asked of the controller. Questions about data (how many items, which branch) are answered by drawing from the
scenario's odds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.actions import Action, AddDevice, Kill, Load, Resolve, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, DeviceJoined, Event, InstanceLost, InstanceReady, Resolved
from lamina.core.flow import Choice, Each
from lamina.predict.table import Table
from lamina.types import DeviceSpec


@dataclass(slots=True)
class Executor:
    controller: Controller  #: read only: which flow a question is about, which kind a device is
    table: Table
    rng: random.Random
    noise: float = 0.05  #: sigma of the logarithm of the true time over the profiled one
    cold_noise: float = 0.1
    boot_us: int = 30_000_000  #: from asking for a device to having it
    templates: dict[str, DeviceSpec] = field(default_factory=dict)  #: kinds that can be asked for
    cold_starts: int = 0
    _ends: dict[int, int] = field(default_factory=dict)  #: running batch -> when it ends
    _devices: int = 0

    def perform(self, now_us: int, action: Action) -> Iterable[tuple[int, Event]]:
        match action:
            case StartBatch():
                return self._start(now_us, action)
            case Load():
                return self._load(now_us, action)
            case Resolve():
                return self._resolve(now_us, action)
            case Kill():
                return ((now_us, InstanceLost(action.instance, action.reason)),)
            case AddDevice():
                return self._add(now_us, action)
            case Unload():
                return ()
            case _:
                return ()

    def _start(self, now_us: int, action: StartBatch) -> Iterable[tuple[int, Event]]:
        start_us = now_us
        if action.after:
            start_us = max(now_us, self._ends.get(action.after, now_us))
        kind = self.controller.state.devices[action.device].spec.kind
        median_us = self.table.typical_us(action.function, kind, len(action.jobs), action.mask.bit_count())
        took_us = max(1, round(median_us * self._wobble(self.noise)))
        end_us = start_us + took_us
        self._ends.pop(action.after, None)
        self._ends[action.batch_id] = end_us
        if len(self._ends) > 4096:
            self._ends = {batch: at_us for batch, at_us in self._ends.items() if at_us >= now_us}
        return ((end_us, BatchFinished(action.batch_id, took_us)),)

    def _wobble(self, sigma: float) -> float:
        return math.exp(sigma * self.rng.gauss(0.0, 1.0)) if sigma else 1.0

    def _load(self, now_us: int, action: Load) -> Iterable[tuple[int, Event]]:
        self.cold_starts += 1
        kind = self.controller.state.devices[action.device].spec.kind
        load_us = round(self.table.load_us(action.function, kind) * self._wobble(self.cold_noise))
        return ((now_us + load_us, InstanceReady(action.instance, load_us)),)

    def _resolve(self, now_us: int, action: Resolve) -> Iterable[tuple[int, Event]]:
        run = self.controller.state.runs[action.call_id]
        node = run.scopes[action.scope].flow.nodes[action.node]
        value = 0
        if isinstance(node, Each):
            value = self._poisson(node.expect)
        elif isinstance(node, Choice):
            odds = node.odds or (1.0,) * len(node.branches)
            value = self.rng.choices(range(len(node.branches)), odds)[0]
        return ((now_us, Resolved(action.call_id, action.scope, action.node, value)),)

    def _poisson(self, mean: float) -> int:
        """Item counts: at least one, and on average about `mean`."""
        limit, count, product = math.exp(-max(0.0, mean - 1)), 0, self.rng.random()
        while product > limit:
            count += 1
            product *= self.rng.random()
        return 1 + count

    def _add(self, now_us: int, action: AddDevice) -> Iterable[tuple[int, Event]]:
        template = self.templates.get(action.kind)
        if template is None:
            return ()
        self._devices += 1
        spec = DeviceSpec(
            id=f"{action.kind}-added-{self._devices}",
            kind=template.kind,
            units=template.units,
            memory_mib=template.memory_mib,
            family=template.family,
            node=template.node,
            limits=template.limits,
            price_per_s=template.price_per_s,
        )
        return ((now_us + self.boot_us, DeviceJoined(spec)),)
