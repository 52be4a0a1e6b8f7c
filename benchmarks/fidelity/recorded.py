"""A live run on a GPU, kept: what was measured, who called when, which batches ran, what was answered.

A file is JSON in columns, whole numbers where there may be differences, so that it packs to a few bits a number; with the
suffix .xz it is packed. `data/live-h200` holds three of them.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.fidelity.cases import REFUSED
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.live import Batch, Found, Runs
from lamina.core.actions import Reply
from lamina.engines.shadow_batches import BatchTiming
from lamina.predict.profile import Handover
from lamina.types import Call, DeviceSpec, FunctionSpec


class Phase(NamedTuple):
    """One load."""

    who: tuple[str, ...]
    load: float
    calls: list[Call]  #: in order of arrival
    latencies_us: list[int]  #: of each; `REFUSED`: it was not answered
    about: dict[str, Any]  #: of the host: how late its timers were, how long it decided
    batches: list[Batch]
    host: Host


class Recording(NamedTuple):
    about: dict[str, Any]  #: date, driver, commit
    device: DeviceSpec
    functions: tuple[FunctionSpec, ...]
    company: dict[
        str, dict[int, list[float]]
    ]  #: slowdowns by function, batch size, number of busy neighbours; empty: not measured
    handovers: list[dict[str, Handover]]  #: seen while warming up, by company; empty: not measured
    rounds: list[dict[str, Runs]]  #: before the first company, between, after the last
    phases: list[Phase]


def phase_of(who: tuple[str, ...], load: float, found: Found) -> Phase:
    latency_us = {end.call_id: end.latency_us if isinstance(end, Reply) else REFUSED for end in found.ends}
    about = {name: value for name, value in found.told.items() if name not in ("answered", "p50_ms", "p99_ms", "attainment")}
    return Phase(who, load, found.calls, [latency_us[call.id] for call in found.calls], about, found.batches, found.host)


def write(path: Path, recording: Recording) -> None:
    raw = msgspec.json.encode(
        recording._asdict()
        | {"rounds": [{name: _round(runs) for name, runs in one.items()} for one in recording.rounds]}
        | {"phases": [_phase(phase) for phase in recording.phases]}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(raw, preset=9) if path.suffix == ".xz" else raw)


def read(path: Path) -> Recording:
    raw = path.read_bytes()
    data = msgspec.json.decode(lzma.decompress(raw) if path.suffix == ".xz" else raw)
    return Recording(
        about=data["about"],
        device=msgspec.convert(data["device"], DeviceSpec),
        functions=msgspec.convert(data["functions"], tuple[FunctionSpec, ...]),
        company=msgspec.convert(data["company"], dict[str, dict[int, list[float]]], strict=False),
        handovers=msgspec.convert(data["handovers"], list[dict[str, Handover]]),
        rounds=[{name: _runs(kept) for name, kept in one.items()} for one in data["rounds"]],
        phases=[_played(kept) for kept in data["phases"]],
    )


def _round(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"batch": batch, "units": units, "device_us": [one.device_us for one in took], "wall_us": [one.wall_us for one in took]}
        for (batch, units), took in runs.items()
    ]


def _runs(kept: list[dict[str, Any]]) -> Runs:
    return {
        (one["batch"], one["units"]): [BatchTiming(*took) for took in zip(one["device_us"], one["wall_us"], strict=True)]
        for one in kept
    }


def _phase(phase: Phase) -> dict[str, Any]:
    place = {name: number for number, name in enumerate(phase.who)}
    batches = sorted(phase.batches, key=lambda batch: batch.begun_us)
    return {
        "who": phase.who,
        "load": phase.load,
        "about": phase.about,
        "slo_us": {call.target: call.deadline_us - call.arrived_us for call in phase.calls},
        "call_function": [place[call.target] for call in phase.calls],
        "call_gap_us": _gaps([call.arrived_us for call in phase.calls]),
        "latency_us": phase.latencies_us,
        "batch_function": [place[batch.function] for batch in batches],
        "batch_size": [batch.size for batch in batches],
        "batch_gap_us": _gaps([batch.begun_us for batch in batches]),
        "batch_wall_us": [batch.ended_us - batch.begun_us for batch in batches],
        "batch_device_us": [batch.device_us for batch in batches],
        "batch_booked": [int(batch.booked) for batch in batches],
        "host_late_us": phase.host.usual_us,
        "host_away_gap_us": _gaps([since_us for since_us, _ in phase.host.away]),
        "host_away_us": [until_us - since_us for since_us, until_us in phase.host.away],
    }


def _played(kept: dict[str, Any]) -> Phase:
    who, slo_us = tuple(kept["who"]), kept["slo_us"]
    arrivals = zip(kept["call_function"], accumulate(kept["call_gap_us"]), strict=True)
    calls = [
        Call(f"{number}", who[place], at_us, at_us + slo_us[who[place]], at_us + slo_us[who[place]])
        for number, (place, at_us) in enumerate(arrivals)
    ]
    begun = accumulate(kept["batch_gap_us"])
    columns = [kept[f"batch_{name}"] for name in ("function", "size", "wall_us", "device_us", "booked")]
    batches = [
        Batch(who[place], size, begun_us, begun_us + wall_us, device_us, bool(booked))
        for begun_us, place, size, wall_us, device_us, booked in zip(begun, *columns, strict=True)
    ]
    since = accumulate(kept["host_away_gap_us"])
    away = [(since_us, since_us + us) for since_us, us in zip(since, kept["host_away_us"], strict=True)]
    return Phase(who, kept["load"], calls, kept["latency_us"], kept["about"], batches, Host(kept["host_late_us"], away))


def _gaps(times_us: Sequence[int]) -> list[int]:
    return [second - first for first, second in pairwise([0, *times_us])]
