"""Input of `lamina plan`: gpu-let's files, a scenario, or a list of tasks with profiles. All become one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lamina.errors import BadValue, did_you_mean
from lamina.planner.partitioning.catalogue import NETWORK_GBITS, RULES_BY_POLICY, Catalogue, PlanTask
from lamina.planner.partitioning.plan import GpuletPlanner, PartitionPlan
from lamina.published.gpulet.quirks import COMPAT, REPAIRED

if TYPE_CHECKING:
    from lamina.published.gpulet.data_files import SchedConfig
    from lamina.sim.scenario import Scenario
    from lamina.types import DeviceSpec

CONFIGS = {
    "gpulet": "config-gpulet-int.json",
    "gpulet-noint": "config-gpulet-noint.json",
    "greedy_part": "config-greedy_part.json",
    "timesharing": "config-timesharing_only.json",
}
NAMES = (*CONFIGS, "frontier")


class FleetPlanner(Protocol):
    def plan(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan: ...
    def plan_fewest_gpus(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], most: int
    ) -> tuple[tuple[str, ...], PartitionPlan]: ...
    def largest_scale(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> float: ...


@dataclass(frozen=True, slots=True)
class PlanInput:
    planner: FleetPlanner
    catalogue: Catalogue
    tasks: list[PlanTask]
    kinds: list[str]  #: of GPUs there are to choose from
    own: list[str] = field(default_factory=list)  #: GPUs the input names itself
    prices: Mapping[str, float] = field(default_factory=dict)  #: of a whole GPU a second; 1 where it says nothing
    scenario: Scenario | None = None  #: to play the plan in; None: made from the catalogue

    @property
    def rates(self) -> dict[str, float]:
        return {self.catalogue.models[task.model].name: task.rate for task in self.tasks}


def check_policy(name: str) -> None:
    if name not in NAMES:
        hint = did_you_mean(name, NAMES, f"there are {', '.join(NAMES)}")
        raise BadValue(f"--policy {name!r}: no such policy can plan", hint=hint)


# ------------------------------------------------------------------ gpu-let's files


def from_glet(
    tasks: Path, policy: str, folder: Path, sched_config: Path | None, device_config: Path | None, network: float, compat: bool
) -> PlanInput:
    from lamina.cli._plan_tasks import read_tasks
    from lamina.published.gpulet.data_files import read_catalogue

    if policy == "frontier" and compat:
        raise BadValue("--compat: the original has no 'frontier'", hint="leave --compat out, or plan with gpulet")
    config = _config("gpulet" if policy == "frontier" else policy, folder, sched_config)
    catalogue = read_catalogue(folder, device_config or folder / "device-config.json")
    limit = network * 1e9 / 2**30 if network else NETWORK_GBITS if compat else float("inf")
    rules = replace(config.rules, network_gbits=limit)
    planner: FleetPlanner
    if policy == "frontier":
        from lamina.planner.fleet.packing import FleetPacker

        planner = FleetPacker(catalogue, catalogue, rules)
    else:
        planner = GpuletPlanner(catalogue, rules, COMPAT if compat else REPAIRED)
    own = sorted(gpu.type for gpu in config.gpus for _ in range(gpu.num))
    unknown = set(own) - set(catalogue.kinds)
    if unknown:
        raise BadValue(f"scheduler configuration: no kind {min(unknown)!r}", hint=f"there are {', '.join(catalogue.kinds)}")
    return PlanInput(planner, catalogue, read_tasks(tasks, catalogue), list(catalogue.kinds), own)


def _config(policy: str, folder: Path, file: Path | None) -> SchedConfig:
    """The file that was named, gpu-let's own for that policy, or its flags without a file."""
    from lamina.published.gpulet.data_files import SchedConfig, read_sched_config

    usual = folder / "SchedConfigs" / CONFIGS[policy]
    if file is not None or usual.is_file():
        return read_sched_config(file or usual)
    rules = RULES_BY_POLICY[policy]
    return SchedConfig(part=rules.partitioning, interference=rules.interference, self_tuning=1 if rules.self_tuning else None)


# ----------------------------------------------------------------------- a scenario


def from_scenario(scenario: Scenario, policy: str, network: float) -> PlanInput:
    """Its functions at the peak of their loads, within their goals, on devices of its kinds."""
    from lamina.cli._peak_demand import peak_demand
    from lamina.planner.fleet.packing import FleetPacker
    from lamina.planner.partitioning.device_catalogue import PairwiseInterference, all_cuts, build_catalogue, halving_cuts
    from lamina.predict.profile_table import ProfileTable

    table = ProfileTable(list(scenario.profiles), scenario.margin, scenario.interference)
    known = scenario.templates or {device.kind: device for device in scenario.devices}

    def alone_us(name: str) -> float:
        able = [spec for spec in known.values() if table.latency_us(name, spec.kind, 1, spec.units)]
        return min((table.latency_us(name, spec.kind, 1, spec.units) for spec in able), default=1)

    rates, goals_us = peak_demand(scenario, alone_us)
    specs = [spec for spec in scenario.functions if rates.get(spec.name, 0.0) > 0]
    kinds: dict[str, DeviceSpec] = {
        kind: device for kind, device in known.items() if all(spec.fits_family(device.family) for spec in specs)
    } or dict(known)
    two = build_catalogue(specs, kinds, table.latency_us, halving_cuts)
    model = scenario.interference
    rules = replace(
        RULES_BY_POLICY["gpulet" if policy == "frontier" else policy],
        latency_ratio=1.0,
        network_gbits=network * 1e9 / 2**30 if network else float("inf"),
    )
    rules = replace(rules, interference=rules.interference and model is not None)
    planner: FleetPlanner
    if policy == "frontier":
        fine = build_catalogue(specs, kinds, table.latency_us, all_cuts)
        beside = [PairwiseInterference(each, model) if model is not None else None for each in (fine, two)]
        planner = FleetPacker(fine, two, rules, *beside)
    else:
        planner = GpuletPlanner(two, rules, REPAIRED, PairwiseInterference(two, model) if model is not None else None)
    tasks = [PlanTask(number, rates[spec.name], goals_us[spec.name] / 1000) for number, spec in enumerate(specs)]
    prices = {kind: device.price_per_s for kind, device in kinds.items()}
    return PlanInput(planner, two, tasks, list(kinds), prices=prices, scenario=scenario)


# ------------------------------------------------------------ a list, with profiles


def from_profiles(tasks: Path, folder: Path, policy: str, network: float) -> PlanInput:
    """Functions by name, as measured: a scenario in all but its file."""
    from lamina.cli._plan_tasks import read_rows
    from lamina.predict.device_presets import preset
    from lamina.predict.profile import read_all
    from lamina.sim.scenario import Scenario
    from lamina.sim.workload import Workload, steps
    from lamina.types import NEVER_US, FunctionSpec, Slo

    profiles = read_all(folder)
    if not profiles:
        raise BadValue(f"--profiles {folder}: no profiles there", hint="a folder with the profiler's .json files")
    by_name = {name: [one for one in profiles if one.function == name] for name in {one.function for one in profiles}}
    rows = read_rows(tasks, sorted(by_name))
    wanted = {name for name, _, _ in rows}
    used = [one for one in profiles if one.function in wanted]
    functions = [
        FunctionSpec(
            name=name,
            max_batch=max(point.batch for one in by_name[name] for point in one.points),
            gpu="may",
            memory_mib=max(one.memory_mib for one in by_name[name]),
            slo=Slo(latency_us=int(slo_ms * 1000)),
        )
        for name, _, slo_ms in rows
    ]
    everywhere = set.intersection(*({one.device for one in by_name[name]} for name in wanted))
    if not everywhere:
        raise BadValue(f"--profiles {folder}: no device has a profile of every task", hint="measure them on one kind")
    scenario = Scenario(
        name=tasks.stem,
        devices=(),
        functions=tuple(functions),
        profiles=tuple(used),
        loads=tuple(Workload(target=name, segments=steps([(NEVER_US, rate)])) for name, rate, _ in rows if rate),
        templates={kind: preset(kind) for kind in sorted(everywhere)},
    )
    return from_scenario(scenario, policy, network)
