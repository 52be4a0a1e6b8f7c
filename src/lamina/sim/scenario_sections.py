"""Readers of the sections of a scenario file: devices, functions, interference, workloads, tenants.

The profile of a function is a file of the profiler, or a grid per kind of device; `load` is how long a cold start takes.

    load = "800ms"
    [function.profile.h200]
    batch = [1, 4, 16]
    p50_ms.1 = [2.9, 4.7, 11.5]    # on one unit
    p50_ms.4 = [1.4, 1.9, 3.6]     # on four
    p99_ms.4 = [1.5, 2.0, 3.8]     # where it is known

Interference is one of three models:

    model = "bandwidth"            # from `bandwidth` of the profiles
    limit = 0.7

    model = "fitted"               # to measured co-locations; from `traits` of the profiles

    model = "linear"               # gpu-let's
    weights.2080ti = { own_l2 = 0.11, other_l2 = 0.72, own_dram = 0.35, other_dram = 0.09, base = 0.90 }
    use.resnet50.2080ti = { batch = [1, 32], l2 = [0.1, 0.4], dram = [0.1, 0.5] }
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.planner.interference import InterferenceModel
from lamina.planner.partitioning.catalogue import InterferenceWeights
from lamina.predict.device_presets import PRESETS
from lamina.predict.interference import (
    BANDWIDTH_LIMIT,
    LinearInterference,
    MemoryUse,
    bandwidth_interference,
    fitted_interference,
)
from lamina.predict.profile import Point, Profile
from lamina.predict.profile import read as read_profile
from lamina.sim import workload
from lamina.sim.hardware_model import WayModel
from lamina.sim.toml_fields import Field, read_present, required
from lamina.sim.workload import RateSegment, Workload
from lamina.types import (
    NEVER_US,
    OBJECTIVES,
    WHOLE_UNIT,
    DeviceSpec,
    FunctionSpec,
    QuotaSpec,
    ScaleSpec,
    Slo,
    Tenant,
    call_parts,
)

# --------------------------------------------------------------------------- [[device]]: a preset kind, or its units and memory

_DEVICE_VALUES: dict[str, tuple[str, Callable[[Field], Any]]] = {
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
_DEVICE_LIMITS: dict[str, tuple[str, Callable[[Field], Any]]] = {
    "sizes": ("sizes", lambda field: tuple(sorted(size.integer(1) for size in field.items()))),
    "aligned": ("aligned", Field.boolean),
    "per_batch": ("per_batch", Field.boolean),
    "batches_per_instance": ("batches_per_instance", Field.integer),
}
"""Key: where it goes, and how it is read."""

_DEVICE_KEYS = ("kind", "count", "max", "way", *_DEVICE_VALUES)


def read_devices(
    section: Field,
) -> tuple[tuple[DeviceSpec, ...], dict[str, DeviceSpec], dict[str, int], dict[str, WayModel]]:
    """Devices that are there from the start; kinds a policy may ask for more of, and how many; and the way to those of a kind."""
    devices: list[DeviceSpec] = []
    templates: dict[str, DeviceSpec] = {}
    spare: dict[str, int] = {}
    ways: dict[str, WayModel] = {}
    for row in section.items():
        fields = row.table(*_DEVICE_KEYS, *_DEVICE_LIMITS)
        kind = required(row, fields, "kind", f"one of {', '.join(sorted(PRESETS))}, or your own with units and memory").text()
        if kind in templates:
            raise fields["kind"].error(f"{kind!r} is there already", "raise its count, or give the other kind a name of its own")
        spec = _device(row, fields, kind)
        count = fields["count"].integer() if "count" in fields else 1
        devices.extend(replace(spec, id=f"{kind}-{place}") for place in range(count))
        templates[kind] = spec
        spare[kind] = fields["max"].integer(count) - count if "max" in fields else 0
        if "way" in fields:
            ways[kind] = _way(fields["way"])
    if not devices and not any(spare.values()):
        raise section.error("there is no device", "give one a count of at least 1")
    return tuple(devices), templates, spare, ways


def _way(field: Field) -> WayModel:
    """ "3ms", or a table where it varies."""
    if not isinstance(field.value, dict):
        return WayModel(field.time_us())
    fields = field.table("time", "spread")
    spread = fields["spread"].number() if "spread" in fields else 0.0
    return WayModel(required(field, fields, "time", 'such as "3ms"').time_us(), spread)


def _device(row: Field, fields: dict[str, Field], kind: str) -> DeviceSpec:
    preset = PRESETS.get(kind)
    if preset is None:
        for key in ("units", "memory"):
            if key not in fields:
                known = ", ".join(sorted(PRESETS))
                raise row.error(f"{key} is missing: nothing is known about {kind!r}", f"give units and memory, or use {known}")
        preset = DeviceSpec(id="", kind=kind, units=1, memory_mib=0)
    limits, values = read_present(fields, **_DEVICE_LIMITS), read_present(fields, **_DEVICE_VALUES)
    spec = replace(preset, limits=replace(preset.limits, **limits), **values)
    if spec.limits.sizes and spec.limits.sizes[-1] > spec.units:
        raise fields["sizes"].error(f"a slice of {spec.limits.sizes[-1]} units", f"{kind} has {spec.units}: leave it out")
    return spec


# ----------------------------------------------------------------------- [[function]]: resources, SLO, scaling, latency profile

_FUNCTION_KEYS = (
    "name", "max_batch", "cores", "core_part", "concurrency", "share", "gpu", "memory", "home", "lend", "slo", "scale", "quota",
    "input", "idempotent", "max_queue", "objective", "load", "profile", "segment",
)  # fmt: skip


def read_functions(
    section: Field, devices: dict[str, DeviceSpec], folder: Path
) -> tuple[tuple[FunctionSpec, ...], tuple[Profile, ...], dict[str, int]]:
    """Functions, their profiles, and the segments of those that give way."""
    functions: dict[str, FunctionSpec] = {}
    segments: dict[str, int] = {}
    profiles: list[Profile] = []
    for row in section.items():
        fields = row.table(*_FUNCTION_KEYS)
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
        if "segment" in fields:
            segments[spec.name] = fields["segment"].time_us(1)
        _check_function(row, fields, spec, mine, devices)
        profiles += mine
    return tuple(functions.values()), tuple(profiles), segments


def _function(row: Field, fields: dict[str, Field]) -> FunctionSpec:
    values: dict[str, Any] = read_present(
        fields,
        max_batch=("max_batch", lambda field: field.integer(1)),
        cores=("cores", lambda field: field.integer(1)),
        core_part=("parts", lambda field: call_parts(field.share(), 1)),
        concurrency=("concurrency", lambda field: field.integer(1)),
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
        objective=("objective", lambda field: field.one_of(*OBJECTIVES)),
    )
    if "share" in fields:
        values.setdefault("gpu", "must")
        if values["gpu"] == "no":
            raise fields["share"].error("a share of a GPU it does not use", 'leave it out, or write gpu = "may"')
    if values.get("concurrency", 1) > 1:
        values["parts"] = max(1, values.get("parts", WHOLE_UNIT) // values["concurrency"])
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
        return [_profile_grid(grid, function, kind) for kind, grid in field.table().items()]
    files = list(field.items()) if isinstance(field.value, list) else [field]
    profiles = []
    for file in files:
        try:
            profiles.append(replace(read_profile(folder / file.text()), function=function))
        except BadValue as error:
            raise file.error(error.message, error.hint) from None
    return profiles


def _profile_grid(field: Field, function: str, kind: str) -> Profile:
    fields = field.table("load", "batch", "p50_ms", "p99_ms", "bandwidth")
    batches = [batch.integer(1) for batch in required(field, fields, "batch").items()]
    medians = _grid_rows(required(field, fields, "p50_ms", "p50_ms.4 = [...]: milliseconds on 4 units, per batch size"), batches)
    tails = _grid_rows(fields["p99_ms"], batches) if "p99_ms" in fields else {}
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


def _grid_rows(field: Field, batches: list[int]) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = {}
    for key, row in field.table().items():
        if not key.isdecimal() or not int(key):
            raise row.error(f"{key!r} is not a number of units", f"{field.path[-1]}.4 = [...]: milliseconds on 4 units")
        rows[int(key)] = [ms.number(above=True) for ms in row.items()]
        if len(rows[int(key)]) != len(batches):
            raise row.error(f"{len(row.value)} times for {len(batches)} batch sizes", "one time for each number in batch")
    return rows


def _check_function(
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


# ------------------------------------------------------------------- [interference]: how colocated batches slow each other down

_WEIGHTS = ("own_l2", "other_l2", "own_dram", "other_dram", "base")


def read_interference(field: Field, profiles: Iterable[Profile], functions: Iterable[str]) -> InterferenceModel:
    fields = field.table("model", "limit", "weights", "use")
    model = fields["model"].one_of("bandwidth", "fitted", "linear") if "model" in fields else "bandwidth"
    if model == "bandwidth":
        for key in ("weights", "use"):
            if key in fields:
                raise fields[key].error("means nothing for bandwidth", 'model = "linear" takes weights and use')
        limit = fields["limit"].share() if "limit" in fields else BANDWIDTH_LIMIT
        return bandwidth_interference(profiles, limit)
    if model == "fitted":
        for key in ("limit", "weights", "use"):
            if key in fields:
                raise fields[key].error("means nothing for fitted", "it takes the traits of the profiles")
        return fitted_interference(profiles)
    if "limit" in fields:
        raise fields["limit"].error("means nothing for linear", 'model = "bandwidth" takes a limit')
    weights = {
        kind: _weights(row)
        for kind, row in required(field, fields, "weights", "weights.h200 = { own_l2 = ..., base = 1.0 }").table().items()
    }
    known = set(functions)
    use: dict[tuple[str, str], MemoryUse] = {}
    for name, kinds in required(field, fields, "use", "use.NAME.h200 = { batch, l2, dram }").table().items():
        if name not in known:
            raise kinds.unknown_name(f"there is no function {name!r}", known)
        for kind, row in kinds.table().items():
            use[name, kind] = _memory_use(row)
    return LinearInterference(weights, use)


def _weights(row: Field) -> InterferenceWeights:
    fields = row.table(*_WEIGHTS)
    values = []
    for name in _WEIGHTS:
        value = fields[name].value if name in fields else (1.0 if name == "base" else 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields[name].error(f"{value!r} is not a number", "a weight may be negative")
        values.append(float(value))
    return InterferenceWeights(*values)


def _memory_use(row: Field) -> MemoryUse:
    fields = row.table("batch", "l2", "dram")
    batches = [one.integer(1) for one in required(row, fields, "batch").items()]
    columns = []
    for name in ("l2", "dram"):
        column = [one.number() for one in required(row, fields, name).items()]
        if len(column) != len(batches) or not batches:
            raise fields[name].error(f"{len(column)} numbers for {len(batches)} batch sizes", "one for each number in batch")
        columns.append(tuple(column))
    if sorted(set(batches)) != batches:
        raise fields["batch"].error("batch sizes do not grow", "list them from small to large, each once")
    return MemoryUse(tuple(batches), *columns)


# --------------------------------------------------------- [[load]]: target, arrival process, tenant and priority of a workload

_LOAD_KEYS = ("target", "shape", "start", "duration", "slo", "tenant", "priority", "objective")
SHAPES: dict[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "constant": ("rate",),
    "steps": ("stages", "cv"),
    "ramp": ("stages", "cv", "from"),
    "trace": ("file", "speedup", "loop"),
    "closed": ("clients", "think"),
    "hasgpu": ("file", "speedup", "cv"),
}
"""What each shape wants to know, beside what all of them do."""


def read_load(row: Field, targets: set[str], folder: Path) -> Workload:
    fields = row.table(*_LOAD_KEYS, *sorted({key for keys in SHAPES.values() for key in keys}))
    target = required(row, fields, "target")
    if target.text() not in targets:
        raise target.unknown_name(f"there is no function or workflow {target.value!r}", targets)
    shape = fields["shape"].one_of(*SHAPES) if "shape" in fields else "poisson"
    for key, field in fields.items():
        if key not in _LOAD_KEYS and key not in SHAPES[shape]:
            raise field.error(f"means nothing for a {shape} load", f"it takes {', '.join(SHAPES[shape])}")
    common: dict[str, Any] = read_present(
        fields,
        start=("start_us", Field.time_us),
        slo=("slo", read_slo),
        tenant=("tenant", Field.text),
        priority=("priority", lambda field: field.integer(-1000)),
        objective=("objective", lambda field: field.one_of(*OBJECTIVES)),
        speedup=("speedup", lambda field: field.number(above=True)),
        loop=("loop", Field.boolean),
    )
    if "duration" in fields:
        common["stop_us"] = common.get("start_us", 0) + fields["duration"].time_us(1)
    return replace(_shaped(row, fields, shape, folder), target=target.text(), **common)


def _shaped(row: Field, fields: dict[str, Field], shape: str, folder: Path) -> Workload:
    cv = fields["cv"].number() if "cv" in fields else 1.0
    if shape in ("poisson", "gamma", "constant"):
        rate = required(row, fields, "rate", "calls a second").per_s(above=True)
        if shape == "gamma":
            required(row, fields, "cv", "coefficient of variation of the gaps: 1 is Poisson, 4 is very bursty")
        pieces: tuple[RateSegment, ...] = workload.steps([(NEVER_US, rate)])
        return Workload(target="", segments=pieces, cv=0.0 if shape == "constant" else cv)
    if shape == "closed":
        clients = required(row, fields, "clients", "how many wait for an answer before they ask again").integer(1)
        return Workload(target="", clients=clients, think_us=fields["think"].time_us() if "think" in fields else 0)
    if shape in ("steps", "ramp"):
        stages = _stages(required(row, fields, "stages", 'stages = [["10s", 100], ["20s", 300]]'))
        if shape == "steps":
            return Workload(target="", segments=workload.steps(stages), cv=cv)
        return Workload(target="", segments=workload.ramp(stages, fields["from"].per_s() if "from" in fields else 0.0), cv=cv)
    file = required(row, fields, "file", "the path of the trace, from here")
    path = folder / file.text()
    try:
        if shape == "trace":
            next(workload.replay_trace(path), None)
            return Workload(target="", trace=str(path))
        speedup = fields["speedup"].number(above=True) if "speedup" in fields else 1.0
        pieces = tuple(
            RateSegment(round(piece.span_us / speedup), piece.from_per_s * speedup, piece.to_per_s * speedup)
            for piece in workload.read_hasgpu(path)
        )
        return Workload(target="", segments=pieces, cv=cv if "cv" in fields else 0.0)
    except BadValue as error:
        raise file.error(error.message, error.hint) from None


def _stages(field: Field) -> list[tuple[int, float]]:
    stages = []
    for stage in field.items():
        pair = list(stage.items())
        if len(pair) != 2:
            raise stage.error(f"{stage.value!r} is not a stage", 'a stage is a time and a rate: ["10s", 100]')
        stages.append((pair[0].time_us(1), pair[1].per_s()))
    if not any(rate for _, rate in stages):
        raise field.error("no stage has a rate above 0", 'stages = [["10s", 100], ["20s", 300]]')
    return stages


# ------------------------------------------------------------------------------------------------ [[tenant]]: weight and limits

_TENANT_KEYS = ("name", "weight", "rate", "burst", "concurrent", "unit_seconds", "memory")


def read_tenant(row: Field) -> Tenant:
    fields = row.table(*_TENANT_KEYS)
    values: dict[str, Any] = read_present(
        fields,
        weight=("weight", lambda field: field.number(above=True)),
        rate=("rate_per_s", Field.per_s),
        burst=("burst", Field.number),
        concurrent=("concurrent", Field.integer),
        unit_seconds=("unit_s_per_day", Field.number),
        memory=("memory_mib", Field.memory_mib),
    )
    return Tenant(name=required(row, fields, "name").text(), **values)
