"""Latency profile of one function on one kind of device: small, text, versioned, never a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from lamina.errors import BadValue, read_user_file

VERSION = 1


class Point(Struct, frozen=True, kw_only=True):
    """Measured latency at one (batch, units)."""

    batch: int
    units: int
    p50_us: float
    p99_us: float = 0.0  #: 0: not measured
    cores: int = 0  #: of the host that it had; 0: not measured by cores


class Traits(Struct, frozen=True):
    """Memory traffic of a function, as neighbours feel it: bytes moved in a batch, and weights that may stay in a cache."""

    parameter_bytes: float
    fixed_bytes: float
    item_bytes: float

    def bytes_moved(self, batch: int) -> float:
        return self.fixed_bytes + self.item_bytes * batch


class Handover(Struct, frozen=True):
    """Handover time of a batch beside its time on the slice: the way to its process, and that of its results back."""

    batch_us: float
    item_us: float = 0.0

    def time_us(self, batch: int) -> float:
        return self.batch_us + self.item_us * batch


class Profile(Struct, frozen=True, kw_only=True):
    function: str
    device: str  #: kind of device
    points: list[Point]
    load_us: int = 0
    memory_mib: int = 0
    bandwidth: float = 0.0  #: part of the peak memory bandwidth it asks for on the whole device; 0: not measured
    traits: Traits | None = None  #: None: not known
    handover: Handover | None = None  #: None: not measured
    spread: list[float] = field(default_factory=list)  #: of runs over their median: quantiles, evenly apart, least to most
    version: int = VERSION
    meta: dict[str, Any] = field(default_factory=dict)  #: driver, date, commit, source


_HINT = "a profile is a JSON file as written by lamina profile"


def read(path: str | Path) -> Profile:
    """A profile file; what is wrong with it is said with its name."""
    content = read_user_file(path, _HINT)
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except msgspec.MsgspecError as error:
        raise BadValue(f"{path}: no profile: {error}", hint=_HINT) from None
    if profile.version != VERSION:
        raise BadValue(f"{path}: version {profile.version} of the profile format", hint=f"this is version {VERSION}")
    return profile


def read_all(folder: str | Path) -> list[Profile]:
    return [read(path) for path in sorted(Path(folder).glob("*.json"))]


def write(profile: Profile, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
