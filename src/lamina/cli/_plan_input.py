"""Input of `lamina plan`: gpu-let's files, a scenario, or a list of tasks with profiles. All become one value.

Of a scenario, the peak demand of each function counts: rates of workloads that may coincide are added up, each at its peak, for a
plan that holds then holds always. A recorded trace counts with its busiest minute.
"""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from msgspec import structs

from lamina import plugins
from lamina.core.workflow.flow import Flow, function_flow
from lamina.errors import BadValue, did_you_mean, unreadable_file
from lamina.planner.function_goals import function_goals_us, function_rates
from lamina.planner.partitioning.catalogue import Catalogue, PlannerRules, PlanTask
from lamina.planner.partitioning.linear_interference import SliceInterference
from lamina.planner.partitioning.plan import OfflinePlanner
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload
from lamina.types import Slo

if TYPE_CHECKING:
    from lamina.predict.profile import Profile
    from lamina.sim.scenario import Scenario
    from lamina.types import DeviceSpec

OWN = "frontier"
"""The name of our own packing; the others are published planners."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    planner: OfflinePlanner
    catalogue: Catalogue
    tasks: list[PlanTask]
    kinds: list[str]  #: of GPUs there are to choose from
    own: list[str] = field(default_factory=list)  #: GPUs the input names itself
    prices: Mapping[str, float] = field(default_factory=dict)  #: of a whole GPU a second; 1 where it says nothing
    scenario: Scenario | None = None  #: to play the plan in
    world: ModuleType | None = None  #: what makes one from the catalogue instead

    @property
    def rates(self) -> dict[str, float]:
        return {self.name_of(task): task.rate for task in self.tasks}

    def name_of(self, task: PlanTask) -> str:
        return self.catalogue.models[task.model].name

    def functions_of(self, targets: Iterable[str]) -> set[str]:
        """Functions that calls of these functions and workflows reach."""
        flows = {flow.name: flow.functions for flow in self.scenario.flows} if self.scenario is not None else {}
        return {function for target in targets for function in flows.get(target, (target,))}


def published_planners() -> dict[str, ModuleType]:
    """Planners of published systems by name, with the module that builds each (`published/<paper>/offline.py`)."""
    return {name: module for module in plugins.published("offline") for name in module.NAMES}


def check_policy(name: str) -> None:
    names = (*published_planners(), OWN)
    if name not in names:
        hint = did_you_mean(name, names, f"there are {', '.join(names)}")
        raise BadValue(f"--policy {name!r}: no such policy can plan", hint=hint)


def _packer(
    fine: Catalogue,
    two: Catalogue,
    rules: PlannerRules,
    beside_fine: SliceInterference | None = None,
    beside_two: SliceInterference | None = None,
) -> OfflinePlanner:
    """Our own packing, with published planners as rivals: it never takes more devices than they do."""
    from lamina.planner.fleet.packing import FleetPacker

    rivals = [rival for module in plugins.published("offline") for rival in module.rivals(two, rules, beside_two)]
    return FleetPacker(fine, rules, beside_fine, rivals)


# ------------------------------------------------------------------ gpu-let's files


def from_glet(
    tasks: Path, policy: str, folder: Path, sched_config: Path | None, device_config: Path | None, network: float, compat: bool
) -> PlanInput:

    if policy == OWN and compat:
        raise BadValue("--compat: the original has no 'frontier'", hint="leave --compat out, or plan with gpulet")
    name = "gpulet" if policy == OWN else policy
    module = published_planners()[name]
    catalogue, rules, own = module.read_files(name, folder, sched_config, device_config, network * 1e9 / 2**30, compat)
    planner: OfflinePlanner
    if policy == OWN:
        planner = _packer(catalogue, catalogue, rules)
    else:
        planner = module.build_planner(catalogue, rules, compat=compat)
    return PlanInput(planner, catalogue, read_tasks(tasks, catalogue), list(catalogue.kinds), own, world=module.world)


# ----------------------------------------------------------------------- a scenario


def from_scenario(scenario: Scenario, policy: str, network: float) -> PlanInput:
    """Its functions at the peak of their loads, within their goals, on devices of its kinds."""
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
        PlannerRules() if policy == OWN else published_planners()[policy].rules_for(policy),
        latency_ratio=1.0,
        network_gbits=network * 1e9 / 2**30 if network else float("inf"),
    )
    rules = replace(rules, interference=rules.interference and model is not None)
    planner: OfflinePlanner
    if policy == OWN:
        fine = build_catalogue(specs, kinds, table.latency_us, all_cuts)
        beside = [PairwiseInterference(each, model) if model is not None else None for each in (fine, two)]
        planner = _packer(fine, two, rules, *beside)
    else:
        interference = PairwiseInterference(two, model) if model is not None else None
        planner = published_planners()[policy].build_planner(two, rules, interference)
    tasks = [PlanTask(number, rates[spec.name], goals_us[spec.name] / 1000) for number, spec in enumerate(specs)]
    prices = {kind: device.price_per_s for kind, device in kinds.items()}
    return PlanInput(planner, two, tasks, list(kinds), prices=prices, scenario=scenario)


# ------------------------------------------------------------ a list, with profiles


def from_profiles(tasks: Path, folder: Path, policy: str, network: float) -> PlanInput:
    """Functions by name, as measured."""
    from lamina.predict.device_presets import preset
    from lamina.predict.profile import read_all

    profiles = read_all(folder)
    if not profiles:
        raise BadValue(f"--profiles {folder}: no profiles there", hint="a folder with the profiler's .json files")
    return from_known_profiles(tasks, profiles, policy, network, preset, f"--profiles {folder}")


def from_known_profiles(
    tasks: Path,
    profiles: Sequence[Profile],
    policy: str,
    network: float,
    devices: Callable[[str], DeviceSpec] | Mapping[str, DeviceSpec],
    where: str,
) -> PlanInput:
    """Functions by name, with these profiles: a scenario in all but its file. `devices` by kind; `where` is for errors."""
    from lamina.sim.scenario import Scenario
    from lamina.sim.workload import Workload, steps
    from lamina.types import NEVER_US, FunctionSpec, Slo

    device_of = devices if callable(devices) else devices.__getitem__
    profiles = [one for one in profiles if one.points]
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
        raise BadValue(f"{where}: no device has a profile of every task", hint="measure them on one kind")
    scenario = Scenario(
        name=tasks.stem,
        devices=(),
        functions=tuple(functions),
        profiles=tuple(used),
        loads=tuple(Workload(target=name, segments=steps([(NEVER_US, rate)])) for name, rate, _ in rows if rate),
        templates={kind: device_of(kind) for kind in sorted(everywhere)},
    )
    return from_scenario(scenario, policy, network)


# ------------------------------------------------------------------------ task lists

_COLUMNS = {"model": ("model", "id", "name", "model_id"), "rate": ("rate", "rps"), "slo": ("slo", "slo_ms", "slo(ms)")}


Row = tuple[str, float, float]
"""Name, requests a second, milliseconds."""


def read_tasks(file: Path, catalogue: Catalogue) -> list[PlanTask]:
    """Models by number or name."""
    numbers = {model.name: model.id for model in catalogue.models.values()}
    rows = read_rows(file, list(numbers), {str(number): name for name, number in numbers.items()})
    return [PlanTask(numbers[name], rate, slo_ms) for name, rate, slo_ms in rows]


def read_rows(file: Path, names: Sequence[str], also: Mapping[str, str] | None = None) -> list[Row]:
    """Lines of `model,rate,SLO`: what is called how (`also`: other names of the same), requests a second, milliseconds.

    The first line may be the number of tasks, as in gpu-let, or name the columns in any order.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_file(file, error, "a CSV of model,rate,SLO lines") from None
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(csv.reader(lines), 1)]
    rows = [(number, row[:-1] if row[-1:] == [""] else row) for number, row in rows if any(row) and not row[0].startswith("#")]
    if not rows:
        raise BadValue(f"{file}: no tasks", hint="a line for each: model,rate,SLO")
    order, announced = (0, 1, 2), None
    first = rows[0][1]
    if len(first) == 1 and first[0].isdigit():
        announced, rows = int(first[0]), rows[1:]
    elif _is_header(first):
        order, rows = _order(file, first), rows[1:]
    if announced is not None and announced != len(rows):
        raise BadValue(f"{file}:1: {announced} tasks announced, {len(rows)} follow", hint="correct the number or leave it out")
    known = {name: name for name in names} | dict(also or {})
    tasks = [_task(f"{file}:{number}", row, order, known, names) for number, row in rows]
    seen: set[str] = set()
    for (number, _), (name, _, _) in zip(rows, tasks, strict=True):
        if name in seen:
            raise BadValue(f"{file}:{number}: model {name!r} is there twice", hint="add up the rates")
        seen.add(name)
    return tasks


def _is_header(row: Sequence[str]) -> bool:
    return len(row) >= 3 and not any(_is_number(cell) for cell in row)


def _order(file: Path, header: Sequence[str]) -> tuple[int, int, int]:
    found = []
    for wanted, names in _COLUMNS.items():
        places = [place for place, cell in enumerate(header) if cell.lower() in names]
        if len(places) != 1:
            raise BadValue(f"{file}:1: no column {wanted!r} in {','.join(header)!r}", hint="name the columns model,rate,slo")
        found.append(places[0])
    return found[0], found[1], found[2]


def _task(place: str, row: Sequence[str], order: tuple[int, int, int], known: Mapping[str, str], names: Sequence[str]) -> Row:
    if len(row) <= max(order):
        raise BadValue(f"{place}: {','.join(row)!r} has too few fields", hint="write model,rate,SLO")
    model, rate, slo_ms = (row[column] for column in order)
    if model not in known:
        hint = did_you_mean(model, names, f"there are {', '.join(names)}")
        raise BadValue(f"{place}: model {model!r} is not known", hint=hint)
    return known[model], _positive(place, "rate", rate), _positive(place, "SLO", slo_ms, above=True)


def _positive(place: str, field: str, text: str, *, above: bool = False) -> float:
    value = float(text) if _is_number(text) else -1.0
    if not 0 <= value <= 1e9 or (above and not value):
        raise BadValue(
            f"{place}: {field} {text!r} cannot be", hint="a number of requests a second" if field == "rate" else "milliseconds"
        )
    return int(value) if value == int(value) else value


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


# ----------------------------------------------------------------------- peak demand

_MINUTE_US = 60_000_000
_P99 = 2.33
_MAX_ARRIVALS = 2_000_000
"""Arrivals of a trace that are looked at."""


def peak_per_s(load: Workload) -> float:
    if not load.trace:
        peak = max((max(piece.from_per_s, piece.to_per_s) for piece in load.segments), default=0.0)
        return peak + max(0.0, load.cv - 1) * _P99 * math.sqrt(peak)  # planners add headroom for a Poisson load only
    once = structs.replace(load, loop=False, start_us=0)
    minutes: Counter[int] = Counter()
    last_us = 1
    for at_us in islice(once.arrivals(random.Random(0)), _MAX_ARRIVALS):
        minutes[at_us // _MINUTE_US] += 1
        last_us = max(last_us, at_us)
    return max(minutes.values(), default=0) * 1e6 / min(last_us, _MINUTE_US)


def peak_demand(scenario: Scenario, alone_us: Callable[[str], float]) -> tuple[dict[str, float], dict[str, int]]:
    """Rate a second and latency goal by function. `alone_us`: how long one job takes at best."""
    per_s: dict[str, float] = {}
    slos: dict[str, Slo] = {}
    for load in scenario.loads:
        per_s[load.target] = per_s.get(load.target, 0.0) + peak_per_s(load)
        slo = load.slo or scenario.slo_of(load.target)
        known = slos.setdefault(load.target, slo)
        if slo.latency_us and (not known.latency_us or slo.latency_us < known.latency_us):
            slos[load.target] = slo
    flows: dict[str, Flow] = {flow.name: flow for flow in scenario.flows}
    for spec in scenario.functions:
        flows[spec.name] = function_flow(spec.name, spec.slo)
    called = {target: structs.replace(flows[target], slo=slos[target]) for target in per_s}
    return function_rates(called, per_s), function_goals_us(called.values(), alone_us)
