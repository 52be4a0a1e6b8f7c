"""Configuration tables: what the predictor says of each function, one table per function.

Published planners take one kind of machine for granted. Where there are several, a function is planned for the first
kind that suits it, accelerators first, and its batches go to devices of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.planner.configs import ConfigArrays, ProfiledConfig, ResourcePrices, config_grid
from lamina.types import DeviceSpec, FunctionSpec

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_CORES = 8


@dataclass(frozen=True, slots=True)
class ConfigKnobs:
    """Sizes that are weighed. Empty: all the function and the device allow, thinned where that would be too many."""

    batches: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    units: tuple[int, ...] = ()

    def batches_of(self, spec: FunctionSpec) -> list[int]:
        usual = sorted({*(batch for batch in BATCHES if batch < spec.max_batch), spec.max_batch})
        return [batch for batch in self.batches or usual if batch <= spec.max_batch] or [1]

    def cores_on(self, device: DeviceSpec) -> list[int]:
        """[0] where cores are not counted."""
        usual = range(1, min(MAX_CORES, device.cores) + 1)
        return [cores for cores in self.cores or usual if cores <= device.cores] or [min(1, device.cores)]

    def units_on(self, device: DeviceSpec) -> list[int]:
        powers = {2**power for power in range(device.units.bit_length())} | {device.units}
        sizes = device.limits.sizes or tuple(sorted(powers))
        wanted = [units for units in self.units or sizes if units in sizes or not device.limits.sizes]
        return [units for units in wanted if units <= device.units] or [min(sizes)]


def sample_device(view: View, spec: FunctionSpec) -> Device | None:
    """The device that stands for all of its kind."""
    found = [device for device in view.devices.values() if can_host(spec, device)]
    return min(found, key=lambda device: device.spec.family != "gpu", default=None)


def can_host(spec: FunctionSpec, device: Device) -> bool:
    return spec.fits_family(device.spec.family) and spec.memory_mib <= device.spec.memory_mib


def build_table(view: View, spec: FunctionSpec, device: Device, knobs: ConfigKnobs) -> ConfigArrays | None:
    """All configurations with a known time; None if there are none."""

    def time_us(batch: int, cores: int, units: int) -> int:
        return view.latency_us(spec.name, device, batch, units, cores)

    sizes = (knobs.batches_of(spec), knobs.cores_on(device.spec), knobs.units_on(device.spec))
    if not any(time_us(batch, cores, units) for batch in sizes[0] for cores in sizes[1] for units in sizes[2]):
        return None
    prices = ResourcePrices(device.spec.core_price_per_s, device.spec.unit_price() * 1e6)
    return config_grid(time_us, *sizes, prices)


@dataclass(slots=True)
class PredictedConfigs:
    """One per function, made when first asked for. `refresh` makes them again and says whether anything has moved."""

    knobs: ConfigKnobs = ConfigKnobs()
    tables: dict[str, ConfigArrays] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  #: which kind of device a function is planned for
    _limited: dict[tuple[str, int], ConfigArrays] = field(default_factory=dict)

    def table_for(self, view: View, function: FunctionState) -> ConfigArrays | None:
        name = function.spec.name
        if name not in self.kinds:
            device = sample_device(view, function.spec)
            if device is None:
                return None
            self.kinds[name] = device.spec.kind
            found = build_table(view, function.spec, device, self.knobs)
            if found is not None:
                self.tables[name] = found
        return self.tables.get(name)

    def up_to(self, function: str, batch: int) -> ConfigArrays:
        """Its configurations with batches no larger than that; there is always one of the smallest batch."""
        key = (function, batch)
        if key not in self._limited:
            whole = self.tables[function]
            self._limited[key] = whole.subset((whole.batch <= max(batch, int(whole.batch.min()))).nonzero()[0])
        return self._limited[key]

    def refresh(self, view: View) -> bool:
        before, asked = self.tables, self.kinds
        self.tables, self.kinds = {}, {}
        for name in asked:
            if name in view.functions:
                self.table_for(view, view.functions[name])
        same = before.keys() == self.tables.keys() and all(_are_equal(before[name], self.tables[name]) for name in before)
        if same:
            self.tables = before  # with all that has been worked out from them
        else:
            self._limited.clear()
        return not same


def nearest_config(rows: Mapping[tuple[int, int, int], ProfiledConfig], sizes: tuple[int, int, int]) -> ProfiledConfig:
    """The measured configuration with the sizes most like these."""
    return rows[min(rows, key=lambda row: (sum(abs(math.log2((a + 1) / (b + 1))) for a, b in zip(row, sizes, strict=True)), row))]


def _are_equal(a: ConfigArrays, b: ConfigArrays) -> bool:
    return len(a) == len(b) and bool((a.time_us == b.time_us).all()) and bool((a.cost == b.cost).all())
