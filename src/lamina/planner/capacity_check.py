"""Capacity check at deployment: do all instances that must always be loaded fit?

Each such instance is put on the device where it fits best, largest first: memory, and units where it owns its slice. If one
does not fit, the error says which, what it lacks, and what could be had instead. The same for every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lamina.core.workflow.flow import Flow
from lamina.errors import NoCapacity
from lamina.types import DeviceSpec, FunctionSpec


@dataclass(slots=True)
class _FreeDevice:
    spec: DeviceSpec
    units: int
    memory_mib: int
    instances: Counter[str] = field(default_factory=Counter)  #: by function

    def has_slot(self, spec: FunctionSpec) -> bool:
        """Whether one more instance of the function would get a slice here; further ones would only wait for each other."""
        limit = self.spec.limits.batches_per_instance
        if not limit:
            return spec.home or not self.instances[spec.name]
        return self.instances[spec.name] < spec.busy_instances_on(self.spec)


def check_capacity(devices: Iterable[DeviceSpec], standing: Iterable[FunctionSpec], coming: Iterable[FunctionSpec]) -> None:
    """`standing` is there already and stays; `coming` is to be added. Raises `NoCapacity`."""
    free = [_FreeDevice(device, device.units, device.memory_mib) for device in devices]
    coming = list(coming)
    for spec in coming:
        _check_alone(spec, free)
    for spec in standing:
        for _ in range(spec.scale.min):
            _place(spec, free)  # it was let in before; what it takes is gone
    order = sorted(coming, key=lambda spec: (-_units(spec, free), -spec.memory_mib, spec.name))
    for spec in order:
        for number in range(spec.scale.min):
            if not _place(spec, free):
                raise _no_capacity(spec, number, free)


def absent_bodies(flows: Iterable[Flow], specs: Mapping[str, FunctionSpec], devices: Iterable[DeviceSpec]) -> set[str]:
    """Bodies of competing functions that no device here can host, where another body of theirs can be: they are not missed."""
    found: set[str] = set()
    families = {device.family for device in devices}
    for flow in flows:
        hosted = {name for name in flow.functions if name in specs and any(map(specs[name].fits_family, families))}
        if flow.competing and hosted:
            found |= {*flow.functions} - hosted
    return found


def _check_alone(spec: FunctionSpec, free: list[_FreeDevice]) -> None:
    """Could it run here at all, were everything empty?"""
    fitting = [one for one in free if spec.fits_family(one.spec.family)]
    if not fitting:
        kinds = ", ".join(sorted({one.spec.kind for one in free})) or "none"
        raise NoCapacity(
            f"{spec.name!r} needs a GPU; the devices here are {kinds}", hint="let it run without: gpu=GPU(..., required=False)"
        )
    largest = max(one.spec.memory_mib for one in fitting)
    if spec.memory_mib > largest:
        raise NoCapacity(
            f"{spec.name!r} needs {spec.memory_mib} MiB on one device; the largest here has {largest} MiB",
            hint=f"best offer: memory up to {largest} MiB",
        )


def _units(spec: FunctionSpec, free: list[_FreeDevice]) -> int:
    return max((spec.units_on(one.spec) for one in free if spec.fits_family(one.spec.family)), default=0) if spec.home else 0


def _place(spec: FunctionSpec, free: list[_FreeDevice]) -> bool:
    """Best fit: on the device that is left with least, so that large blocks stay free for those that need them."""
    places = []
    for one in free:
        units = spec.units_on(one.spec) if spec.home else 0
        fits = spec.fits_family(one.spec.family) and one.has_slot(spec)
        if fits and units <= one.units and spec.memory_mib <= one.memory_mib:
            places.append((one.units - units, one.memory_mib, one.spec.id, one, units))
    if not places:
        return False
    *_, best, units = min(places, key=lambda place: place[:3])
    best.units -= units
    best.memory_mib -= spec.memory_mib
    best.instances[spec.name] += 1
    return True


def _no_capacity(spec: FunctionSpec, placed: int, free: list[_FreeDevice]) -> NoCapacity:
    fitting = [one for one in free if spec.fits_family(one.spec.family)]
    if not any(one.has_slot(spec) for one in fitting):
        return NoCapacity(
            f"no room for instance {placed + 1} of {spec.scale.min} of {spec.name!r}: the devices here have slices for {placed}",
            hint=f"best offer: min={placed}",
        )
    units = max((one.units for one in fitting), default=0)
    memory = max((one.memory_mib for one in fitting), default=0)
    wish = min(spec.units_on(one.spec) for one in fitting) if spec.home else 0
    lacks = []
    if wish > units:
        lacks.append(f"{wish} units of its own (most left on one device: {units})")
    if spec.memory_mib > memory:
        lacks.append(f"{spec.memory_mib} MiB (most left on one device: {memory})")
    if not lacks:
        lacks.append("both its units and its memory on one and the same device")
    offers = [f"min={placed}"] if placed else []
    offers += [f"up to {units} units and {memory} MiB"] if units and memory else []
    return NoCapacity(
        f"no room for instance {placed + 1} of {spec.scale.min} of {spec.name!r}: it lacks {' and '.join(lacks)}",
        hint=f"best offer: {' or '.join(offers)}" if offers else "nothing is left: remove something, or add a device",
    )
