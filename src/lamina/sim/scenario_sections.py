"""Reader of `[[function]]`: resources, SLO, scaling, and latency profile.

A profile is a file of the profiler, or a grid per kind of device; `load` is how long a cold start takes.

    load = "800ms"
    [function.profile.h200]
    batch = [1, 4, 16]
    p50_ms.1 = [2.9, 4.7, 11.5]    # on one unit
    p50_ms.4 = [1.4, 1.9, 3.6]     # on four
    p99_ms.4 = [1.5, 2.0, 3.8]     # where it is known
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.predict.profile import Point, Profile
from lamina.predict.profile import read as read_profile
from lamina.sim.toml_fields import Field, read_present, required
from lamina.types import DeviceSpec, FunctionSpec, QuotaSpec, ScaleSpec, Slo

_KEYS = ("name", "max_batch", "cores", "share", "gpu", "memory", "home", "lend", "slo", "scale", "quota")
_MORE = ("input", "idempotent", "max_queue", "load", "profile")


def read_functions(
    section: Field, devices: dict[str, DeviceSpec], folder: Path
) -> tuple[tuple[FunctionSpec, ...], tuple[Profile, ...]]:
    functions: dict[str, FunctionSpec] = {}
    profiles: list[Profile] = []
    for row in section.items():
        fields = row.table(*_KEYS, *_MORE)
        spec = _function(row, fields)
        if spec.name in functions:
            raise fields["name"].error(f"there are two functions called {spec.name!r}", "give them different names")
        where = required(row, fields, "profile", "a file, or a table [function.profile.h200]")
        mine = read_profiles(where, spec.name, folder)
        if "load" in fields:
            mine = [replace(profile, load_us=fields["load"].time_us()) for profile in mine]
        if "memory" not in fields:
            spec = replace(spec, memory_mib=max((profile.memory_mib for profile in mine), default=0))
        functions[spec.name] = spec
        _check(row, fields, spec, mine, devices)
        profiles += mine
    return tuple(functions.values()), tuple(profiles)


def _function(row: Field, fields: dict[str, Field]) -> FunctionSpec:
    values: dict[str, Any] = read_present(
        fields,
        max_batch=("max_batch", lambda field: field.integer(1)),
        cores=("cores", lambda field: field.integer(1)),
        share=("share", Field.share),
        gpu=("gpu", lambda field: field.one_of("no", "may", "must")),
        memory=("memory_mib", Field.memory_mib),
        home=("home", Field.boolean),
        lend=("lend", Field.boolean),
        slo=("slo", read_slo),
        scale=("scale", _scale),
        quota=("quota", _quota),
        input=("input_kib", Field.kib),
        idempotent=("idempotent", Field.boolean),
        max_queue=("max_queue", lambda field: field.integer(1)),
    )
    if "share" in fields:
        values.setdefault("gpu", "must")
        if values["gpu"] == "no":
            raise fields["share"].error("a share of a GPU it does not use", 'leave it out, or write gpu = "may"')
    return FunctionSpec(name=required(row, fields, "name").text(), **values)


def read_slo(field: Field) -> Slo:
    """ "50ms", or a table where more is to be said."""
    if not isinstance(field.value, dict):
        return Slo(latency_us=field.time_us(1))
    fields = field.table("latency", "target", "on_miss", "timeout")
    return Slo(
        **read_present(
            fields,
            latency=("latency_us", lambda inner: inner.time_us(1)),
            target=("target", Field.share),
            on_miss=("on_miss", lambda inner: inner.one_of("shed", "serve")),
            timeout=("timeout_us", lambda inner: inner.time_us(1)),
        )
    )


def _scale(field: Field) -> ScaleSpec:
    fields = field.table("min", "max", "idle")
    scale = ScaleSpec(
        **read_present(fields, min=("min", Field.integer), max=("max", lambda f: f.integer(1)), idle=("idle_us", Field.time_us))
    )
    if scale.min > scale.max:
        raise field.error(f"min {scale.min} is above max {scale.max}", "lower one or raise the other")
    return scale


def _quota(field: Field) -> QuotaSpec:
    """0.5, or a table of request, limit and window."""
    if not isinstance(field.value, dict):
        return QuotaSpec(limit=field.share())
    fields = field.table("request", "limit", "window")
    read: dict[str, tuple[str, Callable[[Field], Any]]] = {
        "request": ("request", Field.share),
        "limit": ("limit", Field.share),
        "window": ("window_us", lambda inner: inner.time_us(1)),
    }
    quota = QuotaSpec(**read_present(fields, **read))
    if quota.request > quota.limit:
        raise field.error(f"request {quota.request:g} is above limit {quota.limit:g}", "lower one or raise the other")
    return quota


def read_profiles(field: Field, function: str, folder: Path) -> list[Profile]:
    if isinstance(field.value, dict):
        return [_grid(grid, function, kind) for kind, grid in field.table().items()]
    files = list(field.items()) if isinstance(field.value, list) else [field]
    profiles = []
    for file in files:
        try:
            profiles.append(replace(read_profile(folder / file.text()), function=function))
        except BadValue as error:
            raise file.error(error.message, error.hint) from None
    return profiles


def _grid(field: Field, function: str, kind: str) -> Profile:
    fields = field.table("load", "batch", "p50_ms", "p99_ms", "bandwidth")
    batches = [batch.integer(1) for batch in required(field, fields, "batch").items()]
    medians = _rows(required(field, fields, "p50_ms", "p50_ms.4 = [...]: milliseconds on 4 units, per batch size"), batches)
    tails = _rows(fields["p99_ms"], batches) if "p99_ms" in fields else {}
    points = [
        Point(batch=batch, units=units, p50_us=ms * 1000, p99_us=tails[units][place] * 1000 if units in tails else 0.0)
        for units, times in medians.items()
        for place, (batch, ms) in enumerate(zip(batches, times, strict=True))
    ]
    if not points:
        raise field.error("no point is given", "batch = [1, 8] and p50_ms.4 = [1.5, 4.0], say")
    return Profile(
        function=function,
        device=kind,
        points=points,
        load_us=fields["load"].time_us() if "load" in fields else 0,
        bandwidth=fields["bandwidth"].share() if "bandwidth" in fields else 0.0,
    )


def _rows(field: Field, batches: list[int]) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = {}
    for key, row in field.table().items():
        if not key.isdecimal() or not int(key):
            raise row.error(f"{key!r} is not a number of units", f"{field.path[-1]}.4 = [...]: milliseconds on 4 units")
        rows[int(key)] = [ms.number(above=True) for ms in row.items()]
        if len(rows[int(key)]) != len(batches):
            raise row.error(f"{len(row.value)} times for {len(batches)} batch sizes", "one time for each number in batch")
    return rows


def _check(
    row: Field, fields: dict[str, Field], spec: FunctionSpec, profiles: list[Profile], devices: dict[str, DeviceSpec]
) -> None:
    """Check that a device can run it, else every call would fail; and that there is a profile, else it would take no time."""
    hosts = [device for device in devices.values() if spec.fits_family(device.family)]
    if not hosts:
        raise row.error(f"{spec.name} can run on no device here", 'gpu = "may" or "must" lets it run on a GPU')
    if all(spec.memory_mib > device.memory_mib for device in hosts):
        raise fields.get("memory", row).error(
            f"{spec.memory_mib} MiB fit on no device here", "lower it, or give a device more memory"
        )
    measured = {profile.device for profile in profiles}
    for device in hosts:
        if device.kind not in measured:
            raise fields["profile"].error(
                f"there is none for {device.kind!r}",
                f"add [function.profile.{device.kind}], or set gpu to keep it off there",
            )
