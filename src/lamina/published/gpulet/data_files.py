"""Reader of gpu-let's own files as they are: profiles, memory, and the scheduler's flags.

Everything is taken from one folder with the layout of its repository. What is missing or odd is an error that names the file:
the original goes on with zeros, and a plan made from zeros looks fine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lamina.errors import BadValue, read_user_file
from lamina.planner.partitioning.catalogue import (
    MAX_BATCH,
    PARTS,
    Catalogue,
    GpuKind,
    InterferenceWeights,
    PartProfile,
    PlannedModel,
    PlannerRules,
)

_T = TypeVar("_T")
_NUMBER_BYTES = {"FP32": 4, "INT64": 8}
_FLAT_GATHER_MS = {"1_28_28": 0.4, "14": 1.0}
"""Inputs so small that collecting them takes the same time for every batch."""

_GATHER_SCALE = {"3_224_224": 1.9, "3_300_300": 2.5}
"""What gpu-let makes of the measured times in `batching_overhead/`."""


class GpuCount(msgspec.Struct, frozen=True):
    type: str = msgspec.field(name="Type")
    num: int = msgspec.field(name="Num")


class SchedConfig(msgspec.Struct, frozen=True):
    """A file of `SchedConfigs/`. The keys it has beyond these are never read by the original either."""

    gpus: list[GpuCount] = msgspec.field(name="GPUs", default_factory=list)
    max_models: int = msgspec.field(name="Max Model", default=3)
    part: int = msgspec.field(name="Part", default=1)
    latency_ratio: float = msgspec.field(name="Latency Ratio", default=1.1)
    interference: int = msgspec.field(name="Interference", default=1)
    self_tuning: int | None = msgspec.field(name="Self Tuning", default=None)

    @property
    def rules(self) -> PlannerRules:
        """Self-tuning switches interference off by being mentioned, whatever its value."""
        return PlannerRules(
            partitioning=bool(self.part),
            interference=bool(self.interference) and self.self_tuning is None,
            self_tuning=bool(self.self_tuning),
            max_models=self.max_models,
            latency_ratio=self.latency_ratio,
        )


class _Device(msgspec.Struct, frozen=True):
    type: str
    mem_mb: int
    latency_prof_file: str
    interference_const_file: str
    interference_util_file: str


class _DeviceConfig(msgspec.Struct, frozen=True):
    device_specs: list[_Device]


class _ModelMemory(msgspec.Struct, frozen=True):
    name: str
    mem: int


class _MemoryConfig(msgspec.Struct, frozen=True):
    models: list[_ModelMemory]


class _Proxy(msgspec.Struct, frozen=True):
    name: str
    proxy_id: int
    input_dim: list[int]
    input_type: str


class _ProxyConfig(msgspec.Struct, frozen=True):
    models: list[_Proxy] = msgspec.field(name="Models")


def read_sched_config(file: Path) -> SchedConfig:
    config = _json(file, SchedConfig)
    if config.latency_ratio < 1:
        raise BadValue(f"{file}: Latency Ratio {config.latency_ratio:g} is below 1", hint="1 plans with latencies as they are")
    return config


def read_catalogue(folder: Path, device_config: Path) -> Catalogue:
    memory_mb = {row.name: row.mem for row in _json(folder / "mem-config.json", _MemoryConfig).models}
    models = {}
    for proxy in _json(folder / "proxy_config.json", _ProxyConfig).models:
        if proxy.name not in memory_mb:
            raise BadValue(f"{folder / 'mem-config.json'}: no memory for model {proxy.name!r}", hint="add it, in MB")
        if proxy.input_type not in _NUMBER_BYTES:
            raise BadValue(f"{folder / 'proxy_config.json'}: {proxy.name}: input_type {proxy.input_type!r}", hint="FP32 or INT64")
        size = math.prod(proxy.input_dim) * _NUMBER_BYTES[proxy.input_type]
        gather = _gather(folder, "_".join(map(str, proxy.input_dim)))
        models[proxy.proxy_id] = PlannedModel(proxy.proxy_id, proxy.name, memory_mb[proxy.name], size, *gather)
    devices = _json(device_config, _DeviceConfig).device_specs
    return Catalogue(models, {device.type: _kind(folder, device, models) for device in devices})


def _gather(folder: Path, shape: str) -> tuple[float, tuple[float, ...]]:
    if shape in _FLAT_GATHER_MS:
        return _FLAT_GATHER_MS[shape], (0.0, *(1.0 for _ in range(MAX_BATCH)))
    file = folder / "batching_overhead" / f"{shape}.txt"
    by_batch = {_whole(file, row[0]): _number(file, row[1]) for row in _rows(file)}
    if not by_batch.keys() >= set(range(1, MAX_BATCH + 1)):
        raise BadValue(f"{file}: batches are missing", hint=f"one line for each of 1 to {MAX_BATCH}: batch,ms")
    return _GATHER_SCALE.get(shape, 1.9), (0.0, *(by_batch[batch] for batch in range(1, MAX_BATCH + 1)))


def _kind(folder: Path, device: _Device, models: Mapping[int, PlannedModel]) -> GpuKind:
    latency = _latency(_latency_file(folder, device))
    l2, dram = _traffic(folder / device.interference_util_file)
    file = folder / device.interference_const_file
    rows = list(_rows(file))
    if len(rows) < 2 or len(rows[1]) < 5:
        raise BadValue(f"{file}: no five weights", hint="a header line, then l2 own, l2 other, dram own, dram other, constant")
    profiles = {}
    for model in models.values():
        family = "lenet1" if model.name.startswith("lenet") and model.name not in latency else model.name
        if family in latency:
            bench = _bench(model.name, l2)
            profiles[model.id] = PartProfile(latency[family], l2.get(bench, {}), dram.get(bench, {}))
    return GpuKind(device.type, device.mem_mb, InterferenceWeights(*(_number(file, text) for text in rows[1][:5])), profiles)


def _bench(name: str, known: Mapping[str, Any]) -> str:
    """Utilisation was measured once for all LeNets, and one file calls SSD by half its name."""
    if name not in known and name.startswith("lenet"):
        return "lenet"
    return name if name in known else name.partition("-")[0]


def _latency_file(folder: Path, device: _Device) -> Path:
    """The file the configuration names, or one of the same layout in `surrogate_latency/`: the measured ones are not public."""
    places = [folder / device.latency_prof_file, folder / "surrogate_latency" / f"{device.type}.csv"]
    for file in places:
        if file.is_file():
            return file
    raise BadValue(f"device {device.type!r}: no latency table", hint=f"put model,part,batch,ms lines into {places[0]}")


def _latency(file: Path) -> dict[str, dict[tuple[int, int], float]]:
    table: dict[str, dict[tuple[int, int], float]] = {}
    for row in _rows(file, least=4):
        table.setdefault(row[0], {})[_whole(file, row[2]), _whole(file, row[1])] = _number(file, row[3])
    for model, entries in table.items():
        for key in ((batch, part) for part in PARTS for batch in (1, MAX_BATCH)):
            if key not in entries:
                raise BadValue(
                    f"{file}: {model}: no latency for batch {key[0]} at {key[1]} %", hint="every part needs batches 1 and 32"
                )
    return table


def _traffic(file: Path) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    l2: dict[str, dict[int, float]] = {}
    dram: dict[str, dict[int, float]] = {}
    for row in list(_rows(file, least=6))[1:]:
        batch = _whole(file, row[1])
        l2.setdefault(row[0], {})[batch] = _number(file, row[4]) / 100
        dram.setdefault(row[0], {})[batch] = _number(file, row[5]) / 100
    return l2, dram


# ------------------------------------------------------------------- small things


def _json(file: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(_bytes(file), type=kind)
    except msgspec.ValidationError as error:
        raise BadValue(f"{file}: {error}", hint="compare it with gpu-let's own file of that name") from None
    except msgspec.DecodeError as error:
        raise BadValue(f"{file}: not JSON: {error}") from None


def _bytes(file: Path) -> bytes:
    return read_user_file(file, "--glet-dir is a folder with the files of gpu-let's repository")


def _rows(file: Path, least: int = 2) -> Iterator[list[str]]:
    """Comma-separated lines; many of the originals end in a comma, some in a blank line."""
    for row in csv.reader(_bytes(file).decode(errors="replace").splitlines()):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if len(cells) < least:
            raise BadValue(f"{file}: {','.join(cells)!r} has too few fields", hint=f"{least} are needed")
        yield cells


def _whole(file: Path, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadValue(f"{file}: {text!r} is not a whole number") from None


def _number(file: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValue(f"{file}: {text!r} is not a number") from None
