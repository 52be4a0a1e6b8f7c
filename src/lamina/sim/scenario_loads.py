"""Reader of `[[load]]`: target, arrival process, tenant and priority of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.sim import workload
from lamina.sim.scenario_sections import read_slo
from lamina.sim.toml_fields import Field, read_present, required
from lamina.sim.workload import RateSegment, Workload
from lamina.types import NEVER_US

_COMMON = ("target", "shape", "start", "duration", "slo", "tenant", "priority")
SHAPES: dict[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "constant": ("rate",),
    "steps": ("stages", "cv"),
    "ramp": ("stages", "cv", "from"),
    "trace": ("file", "speedup", "loop"),
    "hasgpu": ("file", "speedup", "cv"),
}
"""What each shape wants to know, beside what all of them do."""


def read_load(row: Field, targets: set[str], folder: Path) -> Workload:
    fields = row.table(*_COMMON, *sorted({key for keys in SHAPES.values() for key in keys}))
    target = required(row, fields, "target")
    if target.text() not in targets:
        raise target.unknown_name(f"there is no function or workflow {target.value!r}", targets)
    shape = fields["shape"].one_of(*SHAPES) if "shape" in fields else "poisson"
    for key, field in fields.items():
        if key not in _COMMON and key not in SHAPES[shape]:
            raise field.error(f"means nothing for a {shape} load", f"it takes {', '.join(SHAPES[shape])}")
    common: dict[str, Any] = read_present(
        fields,
        start=("start_us", Field.time_us),
        slo=("slo", read_slo),
        tenant=("tenant", Field.text),
        priority=("priority", lambda field: field.integer(-1000)),
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
