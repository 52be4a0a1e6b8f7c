"""Overrides of a function by an operator, whatever its code says: `lamina scale`, `lamina resize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.store import kv
from lamina.store.base import Session
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec

SETTABLE = ("cores", "idle_us", "max", "memory_mib", "min", "share")
_SCOPE = "deploy-terms"


class FunctionOverrides(Struct, frozen=True, kw_only=True):
    """What was overridden of one function; stored as JSON."""

    scale: ScaleSpec | None = None
    cores: int | None = None
    share: float | None = None
    memory_mib: int | None = None
    round: int = 0  #: of changes that take new instances

    def applied_to(self, spec: FunctionSpec) -> FunctionSpec:
        """The function with these overrides."""
        changes = {
            "scale": self.scale,
            "cores": self.cores,
            "share": self.share,
            "memory_mib": self.memory_mib,
            "version": f"{spec.version}+{self.round}" if self.round else None,
        }
        return msgspec.structs.replace(spec, **{name: value for name, value in changes.items() if value is not None})

    def updated(self, spec: FunctionSpec, given: dict[str, Any], devices: Iterable[DeviceSpec]) -> FunctionOverrides:
        """With `given` added to earlier overrides; `spec` is the function as it is now, and must run on `devices`."""
        for key, value in given.items():
            if key not in SETTABLE or not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
                raise BadValue(f"{key[:40]}: {str(value)[:40]} cannot be set", hint=f"there are {', '.join(SETTABLE)}")
            if key != "share" and value != int(value):
                raise BadValue(f"{key}: {value:g} is no whole number", hint="give one")
        scale = ScaleSpec(
            min=int(given.get("min", spec.scale.min)),
            max=int(given.get("max", spec.scale.max)),
            idle_us=int(given.get("idle_us", spec.scale.idle_us)),
        )
        if scale.max < 1 or scale.min > scale.max:
            raise BadValue(f"scale: min {scale.min} and max {scale.max} make no sense", hint="0 <= min <= max")
        if not 0 <= given.get("share", 0) <= 1:
            raise BadValue(f"share: {given['share']:g} is not from 0 to 1", hint="1/4 of a GPU is 0.25")
        if given.get("share") and spec.gpu == "no":
            raise BadValue(f"share: {spec.name!r} does not run on GPUs", hint="write gpu= into its decorator, or set cores")
        if "cores" in given:
            _check_cores(int(given["cores"]), spec, devices)
        is_resized = "memory_mib" in given or (spec.home and ("share" in given or "cores" in given))
        return FunctionOverrides(
            scale=scale,
            cores=int(given["cores"]) if "cores" in given else self.cores,
            share=float(given["share"]) if "share" in given else self.share,
            memory_mib=int(given["memory_mib"]) if "memory_mib" in given else self.memory_mib,
            round=self.round + is_resized,
        )


def _check_cores(cores: int, spec: FunctionSpec, devices: Iterable[DeviceSpec]) -> None:
    fitting = [device for device in devices if spec.fits_family(device.family)]
    most = max((device.units if device.family == "cpu" else device.cores for device in fitting), default=0)
    if not most:
        raise BadValue(f"cores: {spec.name!r} runs on GPUs alone", hint="set its share")
    if not 1 <= cores <= most:
        raise BadValue(f"cores: {cores} for {spec.name!r} where a device has up to {most}", hint=f"give 1 to {most}")


def save(db: Session, function: str, terms: FunctionOverrides, now_us: int) -> None:
    kv.put(db, _SCOPE, function, "terms", msgspec.json.encode(terms), now_us)


def load_all(db: Session) -> dict[str, FunctionOverrides]:
    found = kv.entries(db, _SCOPE, limit=100_000)
    return {entry.key: msgspec.json.decode(entry.value, type=FunctionOverrides) for entry in found}
