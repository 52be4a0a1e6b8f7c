"""Simulation scenario: devices, functions, workflows, workloads and a policy, as one frozen value; and its TOML form.

The value can be built in code as well (experiments do, with `msgspec.structs.replace`); `read` is for people. Every
field of the file and what it means: `docs/reference/scenarios.md`.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from msgspec import Struct

from lamina import policies
from lamina.core.workflow.flow import Flow, competing_flow
from lamina.errors import BadScenario, LaminaError, UnknownPlugin, unreadable_file
from lamina.planner.interference import InterferenceModel
from lamina.plugins import DEFAULT_POLICY
from lamina.predict.profile import Profile
from lamina.sim.hardware_model import P99_SIGMAS, WayModel
from lamina.sim.scenario_sections import read_devices, read_functions, read_interference, read_load, read_slo, read_tenant
from lamina.sim.scenario_workflows import read_workflow
from lamina.sim.toml_fields import Field, find_lines, read_present, required
from lamina.sim.workload import Workload
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec, Slo, Tenant

_SECTIONS = {
    "scenario": True,
    "policy": False,
    "device": True,
    "function": True,
    "workflow": False,
    "load": True,
    "interference": False,
    "tenant": False,
}
_ABOUT = ("name", "seed", "duration", "calls", "policy", "predictor", "noise", "boot")


class Scenario(Struct, frozen=True, kw_only=True):
    """Everything a run depends on. The same value and the same seed give the same bytes."""

    name: str
    devices: tuple[DeviceSpec, ...]
    functions: tuple[FunctionSpec, ...]
    profiles: tuple[Profile, ...]
    loads: tuple[Workload, ...]
    flows: tuple[Flow, ...] = ()
    policy: str = DEFAULT_POLICY
    options: dict[str, Any] = {}  #: fields of the policy
    predictor: str = "table"  #: or "online": starts from the profiles and learns
    seed: int = 1
    duration_us: int = NEVER_US  #: no call arrives later
    calls: int = 0  #: stop after so many; 0: no such limit
    noise: float = 0.05  #: sigma of the logarithm of a batch's time
    boot_us: int = 30_000_000  #: from asking for a device to having it
    templates: dict[str, DeviceSpec] = {}  #: kinds a policy may ask for, and
    spare_devices: dict[str, int] = {}  #: how many of each
    ways: dict[str, WayModel] = {}  #: by device, or by kind: there and back; left out: none
    segments_us: dict[str, int] = {}  #: by function: its batches give way to others, after so long at most
    tenants: tuple[Tenant, ...] = ()  #: those with limits, or a weight of their own
    interference: InterferenceModel | None = None  #: what batches beside each other do to each other; None: nothing

    def slo_of(self, target: str) -> Slo:
        slos = {function.name: function.slo for function in self.functions} | {flow.name: flow.slo for flow in self.flows}
        return slos[target]

    @property
    def margin(self) -> float:
        """From a median to a 99th percentile under this noise, for profiles that have none."""
        return math.exp(P99_SIGMAS * self.noise) - 1


def read(path: str | Path) -> Scenario:
    """A scenario file; whatever is wrong with it is said with file, line, field and hint."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_file(path, error, "give the path of a scenario, a TOML file") from None
    return parse(text, path)


def parse(text: str, path: str | Path = "scenario.toml") -> Scenario:
    """`path` names the file in errors, and its folder is where other files are looked for."""
    text = text.replace("\r\n", "\n")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        what = str(error).partition(" (at ")[0]
        raise BadScenario(f"{path}:{line}: syntax: {what}", hint="see toml.io for how TOML is written") from None
    return _scenario(Field(str(path), find_lines(text), (), content), Path(path).parent)


def _scenario(root: Field, folder: Path) -> Scenario:
    top = root.table(*_SECTIONS)
    for section, must in _SECTIONS.items():
        if must and section not in top:
            brackets = "[scenario]" if section == "scenario" else f"[[{section}]]"
            raise root.error(f"{brackets} is missing", "scenarios/quickstart.toml is a small complete one")
    about = top["scenario"].table(*_ABOUT)
    devices, templates, spare, ways = read_devices(top["device"])
    functions, profiles, segments = read_functions(top["function"], templates, folder)
    flows = _flows(top["workflow"], {function.name for function in functions}) if "workflow" in top else ()
    targets = {function.name for function in functions} | {flow.name for flow in flows}
    policy, options = _policy(top, about, folder)
    values: dict[str, Any] = read_present(
        about,
        name=("name", Field.text),
        seed=("seed", Field.integer),
        duration=("duration_us", lambda field: field.time_us(1)),
        calls=("calls", lambda field: field.integer(1)),
        predictor=("predictor", lambda field: field.one_of("table", "online")),
        noise=("noise", Field.number),
        boot=("boot_us", Field.time_us),
    )
    scenario = Scenario(
        **({"name": Path(root.file).stem} | values),
        devices=devices,
        functions=functions,
        profiles=profiles,
        flows=flows,
        loads=tuple(read_load(row, targets, folder) for row in top["load"].items()),
        policy=policy,
        options=options,
        templates=templates,
        spare_devices=spare,
        ways=ways,
        segments_us=segments,
        tenants=tuple(read_tenant(row) for row in top["tenant"].items()) if "tenant" in top else (),
        interference=read_interference(top["interference"], profiles, [one.name for one in functions])
        if "interference" in top
        else None,
    )
    endless = [load for load in scenario.loads if load.is_endless and (load.clients or not scenario.calls)]
    if scenario.duration_us >= NEVER_US and endless:
        hint = 'add duration = "60s"' + ("" if any(load.clients for load in endless) else " or calls = 100000")
        raise top["scenario"].error("this would never end", hint)
    return scenario


def _flows(section: Field, functions: set[str]) -> tuple[Flow, ...]:
    flows: dict[str, Flow] = {}
    for row in section.items():
        fields = row.table("name", "slo", "step", "compete")
        name = required(row, fields, "name")
        if name.text() in flows or name.text() in functions:
            raise name.error(f"{name.value!r} is there already", "functions and workflows share their names")
        slo = read_slo(fields["slo"]) if "slo" in fields else Slo()
        if "compete" in fields:
            flows[name.text()] = _competing(name.text(), slo, fields, functions)
            continue
        steps = required(row, fields, "step", "a workflow is made of [[workflow.step]] tables")
        flows[name.text()] = read_workflow(name.text(), slo, steps, functions)
    return tuple(flows.values())


def _competing(name: str, slo: Slo, fields: dict[str, Field], functions: set[str]) -> Flow:
    """`compete = ["tag_cpu", "tag_gpu"]`: functions that are bodies of one."""
    bodies = {body.text(): body for body in fields["compete"].items()}
    for body, field in bodies.items():
        if body not in functions:
            raise field.unknown_name(f"there is no function {body!r}", functions)
    if len(bodies) < 2 or len(bodies) < len(fields["compete"].value):
        raise fields["compete"].error("at least two different functions compete", "name two functions, or leave it out")
    if "step" in fields:
        raise fields["step"].error("steps beside compete", "leave one of them out")
    return competing_flow(name, list(bodies), slo)


def _policy(top: dict[str, Field], about: dict[str, Field], folder: Path) -> tuple[str, dict[str, Any]]:
    """`policy = "edf"` in [scenario], or a [policy] table with `name` and the policy's own options."""
    fields = top["policy"].table() if "policy" in top else {}
    name = fields.pop("name", about.get("policy"))
    if name is None:
        if fields:
            raise top["policy"].error("name is missing", 'name = "edf", say')
        return DEFAULT_POLICY, {}
    policy = name.text()
    if policy.endswith(".py"):
        policy = str(folder / policy)
    options = {key: field.value for key, field in fields.items()}

    def complain(option: str, what: str, hint: str) -> LaminaError:
        return fields[option].error(what, hint)

    try:
        policies.build(policy, options, complain)
    except UnknownPlugin as error:
        raise name.error(error.message, error.hint) from None
    return policy, options
