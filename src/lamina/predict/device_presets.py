"""Device presets by name, for scenarios, plans and emulation: `h200x2` is two of them."""

from __future__ import annotations

import re

import msgspec

from lamina.errors import BadValue
from lamina.types import DeviceSpec, SliceLimits

PRESETS: dict[str, DeviceSpec] = {
    # 132 SMs cut into 15 atoms of 8, as `gpu/slicers/green.py` does; the 12 left over join in where all 15 are leased
    "h200": DeviceSpec(
        id="h200",
        kind="h200",
        units=15,
        memory_mib=143_000,
        limits=SliceLimits(batches_per_instance=0),
        price_per_s=1.0,
    ),
    # percent points under MPS, as the published profiles count them
    "v100": DeviceSpec(
        id="v100",
        kind="v100",
        units=100,
        memory_mib=16_384,
        limits=SliceLimits(batches_per_instance=0),
        price_per_s=1.0,
    ),
    **{
        kind: DeviceSpec(id=kind, kind=kind, units=units, memory_mib=mib, limits=SliceLimits(batches_per_instance=0))
        for kind, units, mib in (
            ("a100", 13, 81_000),  # 108 SMs
            ("h100", 15, 81_000),  # 132 SMs, as the H200
            ("l4", 7, 23_000),  # 58 SMs
            ("l40s", 17, 46_000),  # 142 SMs
            ("b200", 18, 183_000),  # 148 SMs
        )
    },
    "cpu": DeviceSpec(id="cpu", kind="cpu", family="cpu", units=8, memory_mib=32_768, price_per_s=8e-2),
}
UNMEASURED = frozenset({"a100", "h100", "l4", "l40s", "b200"})
"""Kinds of which only the data sheet is known: SMs in groups of eight, and memory. No profile of ours was measured there."""

_COUNTED = re.compile(r"([a-z0-9_]+?)(?:x(\d{1,5}))?(?:\+(\d{1,3}))?")


def preset(kind: str) -> DeviceSpec:
    if kind not in PRESETS:
        raise BadValue(f"no device kind {kind!r}", hint=f"there are {', '.join(sorted(PRESETS))}")
    return PRESETS[kind]


def parse_devices(text: str) -> list[DeviceSpec]:
    """Devices from "h200x2" or "h200x2,cpu": ids are h200-0, h200-1, cpu-0. "h200+8" has eight cores of its host, which batches
    lease with their slices."""
    made: list[DeviceSpec] = []
    for part in text.split(","):
        found = _COUNTED.fullmatch(part.strip())
        if not found:
            raise BadValue(f"{part!r} is not a number of devices", hint='write "h200" or "h200x2"')
        template = preset(found[1])
        start = sum(device.kind == template.kind for device in made)
        numbers = range(start, start + int(found[2] or 1))
        cores = int(found[3] or 0)
        if cores and template.family == "cpu":
            raise BadValue(f"{part!r}: the units of a CPU are its cores", hint=f'write "{found[1]}"')
        made += [msgspec.structs.replace(template, id=f"{template.kind}-{number}", cores=cores) for number in numbers]
    if not made:
        raise BadValue("no devices", hint='write "h200" or "h200x2"')
    return made
