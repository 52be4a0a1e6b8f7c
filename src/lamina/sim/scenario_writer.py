"""Scenario writer: a scenario as TOML, to be kept, changed by hand and simulated again (`scenario.py` reads it).

Profiles become grids over batch sizes and units. A workflow of steps, maps and joins is written as it is; one with choices, waits
or branches of a state language is written as calls of its functions, as often as a run brings them, with a comment that says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from lamina.core.workflow.flow import Each, Flow, Pass, Task
from lamina.predict.profile import Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec, Slo


def to_toml(scenario: Scenario) -> str:
    """The scenario as text. Loads are written at the rate of their first segment."""
    flows = {flow.name: flow for flow in scenario.flows}
    loads: dict[str, float] = {}
    comments: list[str] = []
    for load in scenario.loads:
        flow = flows.get(load.target)
        if flow is None or _is_writable(flow):
            loads[load.target] = loads.get(load.target, 0.0) + _rate(load)
            continue
        comments.append(f"# {flow.name} has steps that this file cannot say: its functions are called as often as its runs do")
        for function, times in flow.expected_jobs.items():
            loads[function] = loads.get(function, 0.0) + times * _rate(load)
    written = [flow for flow in scenario.flows if _is_writable(flow) and flow.name in loads]
    lines = ["[scenario]", f"name = {_text(scenario.name)}", f"seed = {scenario.seed}"]
    if scenario.duration_us < NEVER_US:
        lines.append(f"duration = {_text(f'{scenario.duration_us / 1e6:g}s')}")
    lines += [f"policy = {_text(scenario.policy)}", *comments]
    for kind, count in Counter(device.kind for device in scenario.devices).items():
        device = next(one for one in scenario.devices if one.kind == kind)
        lines += ["", *_device(device), f"count = {count}"]
        way = scenario.ways.get(kind)
        lines += [f'way = {{ time = "{way.us}us", spread = {way.spread:g} }}'] if way is not None else []
    used = {name for target in loads for name in (flows[target].functions if target in flows else (target,))}
    profiles: dict[str, list[Profile]] = {}
    for one in scenario.profiles:
        if one.points:
            profiles.setdefault(one.function, []).append(one)
    for spec in scenario.functions:
        found = profiles.get(spec.name)
        if spec.name in used and found:
            lines += ["", *_function(spec, found, scenario.segments_us.get(spec.name, 0))]
    for flow in written:
        lines += ["", "[[workflow]]", f"name = {_text(flow.name)}", *_slo(flow.slo), _body(flow)]
    for target, rate in loads.items():
        lines += ["", "[[load]]", f"target = {_text(target)}", f"rate = {rate:.6g}"]
    return "\n".join(lines) + "\n"


def _rate(load: Workload) -> float:
    return load.segments[0].to_per_s if load.segments else 1.0


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a basic string of TOML has the escapes of JSON


def _device(device: DeviceSpec) -> list[str]:
    lines = ["[[device]]", f"kind = {_text(device.kind)}", f"units = {device.units}", f'memory = "{device.memory_mib}MiB"']
    lines += [f'family = "{device.family}"', f'price = "{device.price_per_s:g}/s"']
    return lines + (["owned = true"] if device.owned else [])


def _slo(slo: Slo) -> list[str]:
    if not slo.latency_us:
        return []
    latency = f'latency = "{slo.latency_us}us", target = {slo.target:g}, on_miss = "{slo.on_miss}"'
    return [f"slo = {{ {latency} }}"]


def _function(function: FunctionSpec, profiles: list[Profile], segment_us: int) -> list[str]:
    scale = function.scale
    lines = ["[[function]]", f"name = {_text(function.name)}", f"max_batch = {function.max_batch}", f'gpu = "{function.gpu}"']
    lines += [f"share = {function.share:.6g}"] if function.share else []
    lines += [f"cores = {function.cores}"] if function.cores > 1 else []
    lines += [f'memory = "{function.memory_mib}MiB"'] if function.memory_mib else []
    lines += _slo(function.slo)
    lines += [f'scale = {{ min = {scale.min}, max = {scale.max}, idle = "{scale.idle_us}us" }}']
    lines += [f'segment = "{segment_us}us"'] if segment_us else []
    lines += ["home = true", f"lend = {str(function.lend).lower()}"] if function.home else []
    for profile in profiles:
        lines += _profile(profile)
    return lines


def _profile(profile: Profile) -> list[str]:
    table = ProfileTable([profile])
    batches = sorted({point.batch for point in profile.points})
    lines = [f"[function.profile.{_text(profile.device)}]", f"batch = {batches}"]
    lines += [f'load = "{profile.load_us}us"'] if profile.load_us else []
    lines += [f"bandwidth = {profile.bandwidth:.4g}"] if profile.bandwidth else []
    for units in sorted({point.units for point in profile.points}):
        times = [table.median_us(profile.function, profile.device, batch, units) / 1000 for batch in batches]
        lines.append(f"p50_ms.{units} = [{', '.join(f'{max(ms, 0.001):.4g}' for ms in times)}]")
    return lines


def _is_writable(flow: Flow) -> bool:
    return all(
        isinstance(node, Task | Pass) or (isinstance(node, Each) and _is_writable(node.body)) for node in flow.nodes.values()
    )


def _body(flow: Flow) -> str:
    if flow.competing:
        return f"compete = [{', '.join(_text(task.function) for task in flow.bodies)}]"
    return f"step = [{', '.join(_steps(flow))}]"


def _steps(flow: Flow) -> Iterator[str]:
    before: dict[str, list[str]] = {name: [] for name in flow.nodes}
    for name, node in flow.nodes.items():
        for later in node.next:
            before[later].append(name)
    for name, node in flow.nodes.items():
        fields = [f"name = {_text(name)}"]
        if isinstance(node, Task):
            fields.append(f"function = {_text(node.function)}")
        elif isinstance(node, Each):
            fields.append(f"each = {{ expect = {node.expected_items:g}, steps = [{', '.join(_steps(node.body))}] }}")
        if before[name]:
            fields.append(f"after = [{', '.join(map(_text, dict.fromkeys(before[name])))}]")
        yield f"{{ {', '.join(fields)} }}"
