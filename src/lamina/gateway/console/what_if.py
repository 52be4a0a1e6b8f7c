"""What-if of the console: the simulator on what a server has learnt, with other rates, goals or devices, in a process of its own.

    python -m lamina.gateway.console.what_if < question > answer

The process has a low priority and a time limit, and at most one runs at a time: a plan must not cost calls their promises.
Attainment and cost are simulated, and said to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from typing import Any

import msgspec
from msgspec import Struct, structs

from lamina import plugins
from lamina.errors import BadValue, LaminaError, Refused
from lamina.gateway.routes.profiles import ServerSnapshot
from lamina.predict.interference import bandwidth_interference
from lamina.sim.hardware_model import WayModel
from lamina.sim.scenario import Scenario
from lamina.sim.scenario_writer import to_toml
from lamina.sim.workload import Workload, steps
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec

MAX_CALLS = 20_000
"""Of one simulation: some seconds of a core."""

LIMIT_S = 60.0
MAX_DEVICES = 64
MAX_WAITING = 3
SEED = 2
WARM_US = 1_000_000


class ServerChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be different. Left out: as it is."""

    scale: float = 1.0  #: of all rates
    rates: dict[str, float] = {}  #: calls a second by target, before `scale`
    goals_ms: dict[str, float] = {}  #: latencies of SLOs by target
    devices: dict[str, int] = {}  #: number by kind
    policy: str = ""
    seconds: float = 20.0  #: of calls

    def check(self, snapshot: ServerSnapshot) -> None:
        """Raises `BadValue` for what no server could be like."""
        targets = {one.name for one in snapshot.functions} | {flow.name for flow in snapshot.flows}
        kinds = {device.kind for device in snapshot.devices}
        positive = {"scale": self.scale, "seconds": self.seconds}
        positive |= {f"goals_ms.{name}": value for name, value in self.goals_ms.items()}
        for field, value in positive.items():
            if not 0 < value < 1e6 or not math.isfinite(value):
                raise BadValue(f"{field[:80]}: {value!r} is not a number above 0", hint="leave it out for what is there")
        for name in (*self.rates, *self.goals_ms):
            if name not in targets:
                raise BadValue(f"target: no {name[:80]!r} is deployed", hint="GET /v1/functions and /v1/workflows list them")
        for name, rate in self.rates.items():
            if not 0 <= rate < 1e6 or not math.isfinite(rate):
                raise BadValue(f"rates.{name[:80]}: {rate!r} is no rate", hint="calls a second, from 0 on")
        for kind, count in self.devices.items():
            if kind not in kinds:
                raise BadValue(f"devices: no {kind[:80]!r} is here", hint=f"there is {', '.join(sorted(kinds))}")
            if not 0 <= count <= MAX_DEVICES:
                raise BadValue(f"devices.{kind}: {count} is not from 0 to {MAX_DEVICES}")
        if not 1 <= self.seconds <= 120:
            raise BadValue(f"seconds: {self.seconds:g} is not from 1 to 120")
        if self.policy and self.policy not in (known := plugins.names("policies")):  # no path of a file
            raise BadValue(f"policy: there is no {self.policy[:80]!r}", hint=f"one of {', '.join(known)}")


class WhatIfQuestion(Struct, frozen=True):
    snapshot: ServerSnapshot
    change: ServerChange


def scenario_of(snapshot: ServerSnapshot, name: str, where: str) -> Scenario:
    """A server as a scenario: each target is called at the rate of the last minute. `where` names the server in errors."""
    called = {target: rate for target, rate in snapshot.rates.items() if rate > 0}
    if not called:
        raise BadValue(f"{where}: no call was answered there in the last minute", hint="give a file with rates as well")
    known = {one.function for one in snapshot.profiles if one.points}
    flows = {flow.name: flow.functions for flow in snapshot.flows}
    if unknown := sorted({name for target in called for name in flows.get(target, (target,))} - known):
        raise BadValue(f"{where}: nothing is known yet of {', '.join(unknown)}", hint="call it a few times first")
    return Scenario(
        name=name,
        devices=tuple(snapshot.devices),
        functions=tuple(one for one in snapshot.functions if one.name in known),
        flows=tuple(flow for flow in snapshot.flows if known.issuperset(flow.functions)),
        profiles=tuple(snapshot.profiles),
        loads=tuple(Workload(target=target, segments=steps([(NEVER_US, rate)])) for target, rate in called.items()),
        duration_us=60_000_000,
        ways=_ways(snapshot),
        interference=bandwidth_interference(snapshot.profiles) if any(one.bandwidth for one in snapshot.profiles) else None,
    )


def _ways(snapshot: ServerSnapshot) -> dict[str, WayModel]:
    """The way to devices of a kind: the shortest measured to one of them, for others of a busy host are longer for a while."""
    kinds: dict[str, int] = {}
    for device in snapshot.devices:
        way_us = snapshot.ways_us.get(device.id, 0)
        kinds[device.kind] = min(kinds.get(device.kind, way_us), way_us)
    return {kind: WayModel(us) for kind, us in kinds.items() if us}


def changed_scenario(snapshot: ServerSnapshot, change: ServerChange) -> Scenario:
    """The server as it would be. Functions that are called are warm, as they are on a server that has served for a while."""
    change.check(snapshot)
    rates = {name: rate * change.scale for name, rate in {**snapshot.rates, **change.rates}.items() if rate > 0}
    if not rates:
        raise BadValue("rates: no target is called", hint="set a rate above 0, or call the server first")
    base = scenario_of(structs.replace(snapshot, rates=rates), "what if", "plan")
    flows = {flow.name: flow.functions for flow in base.flows}
    used = {name for target in rates for name in flows.get(target, (target,))}
    devices = _devices(snapshot.devices, change.devices)
    called = [one for one in base.functions if one.name in used]
    memory_mib = sum(one.memory_mib for one in called)
    return structs.replace(
        base,
        devices=tuple(devices),
        functions=tuple(_function(one, change, _warm_count(one, memory_mib, devices)) for one in called),
        flows=tuple(
            structs.replace(flow, slo=structs.replace(flow.slo, latency_us=_goal_us(flow.name, flow.slo.latency_us, change)))
            for flow in base.flows
            if flow.name in rates
        ),
        profiles=tuple(one for one in base.profiles if one.function in used),
        policy=change.policy or base.policy,
        seed=SEED,
        duration_us=int(change.seconds * 1e6),
    )


def _goal_us(target: str, latency_us: int, change: ServerChange) -> int:
    return int(change.goals_ms[target] * 1000) if target in change.goals_ms else latency_us


def _function(spec: FunctionSpec, change: ServerChange, warm: int) -> FunctionSpec:
    goal_us = _goal_us(spec.name, spec.slo.latency_us, change)
    scale = structs.replace(spec.scale, min=max(warm, spec.scale.min))
    return structs.replace(spec, slo=structs.replace(spec.slo, latency_us=goal_us), scale=scale)


def _warm_count(spec: FunctionSpec, memory_mib: int, devices: list[DeviceSpec]) -> int:
    """Instances of a function that are there from the start: one on every device, where all functions, which need `memory_mib`,
    fit on each."""
    fitting = [device for device in devices if spec.fits_family(device.family)]
    has_room = memory_mib <= min((device.memory_mib for device in fitting), default=0)
    return max(1, min(spec.scale.max, len(fitting))) if has_room else 1


def _devices(have: list[DeviceSpec], wanted: dict[str, int]) -> list[DeviceSpec]:
    made: list[DeviceSpec] = []
    for kind in dict.fromkeys(device.kind for device in have):
        own = [device for device in have if device.kind == kind]
        count = wanted.get(kind, len(own))
        made += own[:count] + [structs.replace(own[0], id=f"{kind}+{number}") for number in range(1, count - len(own) + 1)]
    if not made:
        raise BadValue("devices: none is left", hint="keep at least one")
    return made


def simulate(scenario: Scenario) -> dict[str, Any]:
    """Play it; attainment, refusals, latency and cost."""
    from lamina.sim.run import run

    begin_us = 3 * max((one.load_us for one in scenario.profiles), default=0) + WARM_US
    loads = tuple(structs.replace(load, start_us=begin_us) for load in scenario.loads)
    played = structs.replace(scenario, loads=loads, duration_us=scenario.duration_us + begin_us, calls=MAX_CALLS)
    summary = run(played)
    total = summary.total
    return {
        "attainment": total.attainment,
        "offered": total.offered,
        "refused": sum(total.refused.values()),
        "failed": sum(total.failed.values()),
        "p99_ms": total.p99_ms,
        "utilisation": total.utilisation,
        "used_per_s": total.used / max(1e-9, total.offered_s),
        "rent_per_s": sum(device.price_per_s for device in scenario.devices),
        "seconds": total.offered_s,
        "targets": [
            {
                "target": row.target,
                "slo_ms": row.slo_ms or None,
                "rate": row.offered / max(1e-9, total.offered_s),
                "attainment": row.attainment,
                "refused": sum(row.refused.values()) / max(1, row.offered),
                "p50_ms": row.p50_ms,
                "p99_ms": row.p99_ms,
                "batch": row.batch_mean,
            }
            for row in summary.targets
        ],
        "devices": [{"device": row.device, "kind": row.kind, "utilisation": row.utilisation} for row in summary.devices],
    }


def answer(question: WhatIfQuestion) -> dict[str, Any]:
    """The server as it is, and as it would be, under the same seed."""
    snapshot, change = question.snapshot, question.change
    as_it_is = structs.replace(change, scale=1.0, goals_ms={}, devices={}, policy="")
    after = changed_scenario(snapshot, change)
    return {
        "now": simulate(changed_scenario(snapshot, as_it_is)),
        "then": simulate(after),
        "policy": after.policy,
        "seed": SEED,
        "how": "simulated",
    }


# --------------------------------------------------------------------------------- the process


class WhatIf:
    """Runs what-ifs in a process of its own, one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None

    def check_room(self) -> None:
        """Raises `Refused` if too many wait: before a snapshot is taken for one more."""
        if self._waiting >= MAX_WAITING:
            raise Refused("other plans are being simulated", hint="try again in a few seconds", reason="busy", retry_after_s=5.0)

    async def ask(self, snapshot: ServerSnapshot, change: ServerChange) -> Any:
        change.check(snapshot)
        self.check_room()
        self._waiting += 1
        try:
            async with self._turn:
                return await self._run(msgspec.json.encode(WhatIfQuestion(snapshot, change)))
        finally:
            self._waiting -= 1

    async def _run(self, question: bytes) -> Any:
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(question), LIMIT_S)
        except TimeoutError:
            raise Refused(
                f"the simulation took more than {LIMIT_S:g} s", hint="fewer targets, lower rates or less time", reason="busy"
            ) from None
        finally:
            self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        try:
            told = msgspec.json.decode(said)
        except msgspec.DecodeError:
            raise BadValue("the simulation ended without an answer", hint="lamina sim --from-server says why") from None
        if "error" in told:
            raise BadValue(told["error"], hint=told.get("hint", ""))
        return told

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def scenario_text(snapshot: ServerSnapshot, change: ServerChange) -> str:
    """The changed server as a scenario file."""
    return to_toml(changed_scenario(snapshot, change))


def main() -> None:
    os.nice(15)
    try:
        told = answer(msgspec.json.decode(sys.stdin.buffer.read(), type=WhatIfQuestion))
    except LaminaError as error:
        told = {"error": error.message, "hint": error.hint}
    sys.stdout.buffer.write(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
