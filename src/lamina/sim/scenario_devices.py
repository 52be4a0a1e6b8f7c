"""Reader of `[[device]]`: a preset kind, or its units and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from lamina.predict.device_presets import PRESETS
from lamina.sim.toml_fields import Field, read_present, required
from lamina.types import DeviceSpec

_VALUES: dict[str, tuple[str, Callable[[Field], Any]]] = {
    "units": ("units", lambda field: field.integer(1)),
    "memory": ("memory_mib", Field.memory_mib),
    "price": ("price_per_s", Field.per_s),
    "owned": ("owned", Field.boolean),
    "family": ("family", lambda field: field.one_of("cpu", "gpu")),
    "node": ("node", Field.text),
    "cores": ("cores", Field.integer),
    "core_price": ("core_price_per_s", Field.per_s),
    "link_mib_per_s": ("link_mib_per_s", Field.number),
    "link_latency": ("link_latency_us", Field.time_us),
}
_LIMITS: dict[str, tuple[str, Callable[[Field], Any]]] = {
    "sizes": ("sizes", lambda field: tuple(sorted(size.integer(1) for size in field.items()))),
    "aligned": ("aligned", Field.boolean),
    "per_batch": ("per_batch", Field.boolean),
    "batches_per_instance": ("batches_per_instance", Field.integer),
}
"""Key: where it goes, and how it is read."""

_KEYS = ("kind", "count", "max", *_VALUES)


def read_devices(section: Field) -> tuple[tuple[DeviceSpec, ...], dict[str, DeviceSpec], dict[str, int]]:
    """Devices that are there from the start; kinds a policy may ask for more of, and how many."""
    devices: list[DeviceSpec] = []
    templates: dict[str, DeviceSpec] = {}
    spare: dict[str, int] = {}
    for row in section.items():
        fields = row.table(*_KEYS, *_LIMITS)
        kind = required(row, fields, "kind", f"one of {', '.join(sorted(PRESETS))}, or your own with units and memory").text()
        if kind in templates:
            raise fields["kind"].error(f"{kind!r} is there already", "raise its count, or give the other kind a name of its own")
        spec = _device(row, fields, kind)
        count = fields["count"].integer() if "count" in fields else 1
        devices.extend(replace(spec, id=f"{kind}-{place}") for place in range(count))
        templates[kind] = spec
        spare[kind] = fields["max"].integer(count) - count if "max" in fields else 0
    if not devices and not any(spare.values()):
        raise section.error("there is no device", "give one a count of at least 1")
    return tuple(devices), templates, spare


def _device(row: Field, fields: dict[str, Field], kind: str) -> DeviceSpec:
    preset = PRESETS.get(kind)
    if preset is None:
        for key in ("units", "memory"):
            if key not in fields:
                known = ", ".join(sorted(PRESETS))
                raise row.error(f"{key} is missing: nothing is known about {kind!r}", f"give units and memory, or use {known}")
        preset = DeviceSpec(id="", kind=kind, units=1, memory_mib=0)
    limits, values = read_present(fields, **_LIMITS), read_present(fields, **_VALUES)
    spec = replace(preset, limits=replace(preset.limits, **limits), **values)
    if spec.limits.sizes and spec.limits.sizes[-1] > spec.units:
        raise fields["sizes"].error(f"a slice of {spec.limits.sizes[-1]} units", f"{kind} has {spec.units}: leave it out")
    return spec
