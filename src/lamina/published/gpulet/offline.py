"""Offline planners of gpu-let's paper for `lamina plan`, which finds them by file name (`published/<paper>/offline.py`).

`NAMES` are the values of `--policy`; `build_planner` makes one, `rivals` those that compete with the product's own packing,
and `read_files` takes catalogue and rules from a folder with the layout of gpu-let's repository.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lamina.errors import BadValue
from lamina.planner.partitioning.catalogue import Catalogue, PlannerRules
from lamina.planner.partitioning.linear_interference import SliceInterference
from lamina.published.gpulet import world
from lamina.published.gpulet.data_files import SchedConfig, read_catalogue, read_sched_config
from lamina.published.gpulet.planner import NETWORK_GBITS, RULES_BY_POLICY, GpuletPlanner
from lamina.published.gpulet.quirks import COMPAT, REPAIRED

__all__ = ["NAMES", "build_planner", "read_files", "rivals", "rules_for", "world"]

CONFIGS = {
    "gpulet": "config-gpulet-int.json",
    "gpulet-noint": "config-gpulet-noint.json",
    "greedy_part": "config-greedy_part.json",
    "timesharing": "config-timesharing_only.json",
}
NAMES = tuple(CONFIGS)


class GpuletFiles(NamedTuple):
    catalogue: Catalogue
    rules: PlannerRules
    gpus: list[str]  #: kind of every GPU that the configuration names


def rules_for(name: str) -> PlannerRules:
    return RULES_BY_POLICY[name]


def build_planner(
    catalogue: Catalogue, rules: PlannerRules, interference: SliceInterference | None = None, *, compat: bool = False
) -> GpuletPlanner:
    """With `compat` it plans exactly as the original, quirks and all."""
    return GpuletPlanner(catalogue, rules, COMPAT if compat else REPAIRED, interference)


def rivals(catalogue: Catalogue, rules: PlannerRules, interference: SliceInterference | None = None) -> list[GpuletPlanner]:
    """Elastic partitioning and time sharing, by the same rules but for what makes them what they are."""
    names = ("gpulet" if rules.interference else "gpulet-noint", "timesharing")
    return [
        build_planner(catalogue, replace(rules, partitioning=own.partitioning, interference=own.interference), interference)
        for own in (RULES_BY_POLICY[name] for name in names)
    ]


def read_files(
    name: str, folder: Path, sched_config: Path | None, device_config: Path | None, network_gbits: float, compat: bool
) -> GpuletFiles:
    """Catalogue and rules; `network_gbits` 0: no limit, and the testbed's with `compat`."""
    config = _config(name, folder, sched_config)
    catalogue = read_catalogue(folder, device_config or folder / "device-config.json")
    limit = network_gbits or (NETWORK_GBITS if compat else float("inf"))
    gpus = sorted(gpu.type for gpu in config.gpus for _ in range(gpu.num))
    unknown = set(gpus) - set(catalogue.kinds)
    if unknown:
        raise BadValue(f"scheduler configuration: no kind {min(unknown)!r}", hint=f"there are {', '.join(catalogue.kinds)}")
    return GpuletFiles(catalogue, replace(config.rules, network_gbits=limit), gpus)


def _config(name: str, folder: Path, file: Path | None) -> SchedConfig:
    """The file that was named, gpu-let's own for that policy, or its flags without a file."""
    usual = folder / "SchedConfigs" / CONFIGS[name]
    if file is not None or usual.is_file():
        return read_sched_config(file or usual)
    rules = RULES_BY_POLICY[name]
    return SchedConfig(part=rules.partitioning, interference=rules.interference, self_tuning=1 if rules.self_tuning else None)
