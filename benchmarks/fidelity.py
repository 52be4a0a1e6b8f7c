"""The simulator against live runs: the same calls at the same times, latencies from profiles alone.

`python -m benchmarks.fidelity [emulated] [cpu]` writes what it found into results/prediction-fidelity.json. `cpu`: profiles a
function of this machine for eight seconds, then serves Poisson arrivals in worker processes for real. `emulated`: published
profiles of a V100 on real timers, through the loop, the controller and the policy that serve. Both then are simulated, and
medians, tails and attainment stand side by side. How late the generator's own timers came is told with it: a machine
busy with something else is no witness.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from lamina import policies, values
from lamina.core.actions import Reply
from lamina.core.controller import Controller
from lamina.core.events import Deployed, DeviceJoined
from lamina.live.emulated import EmulatedEngine, Pretence
from lamina.live.loop import Ending, LiveLoop
from lamina.live.start import open_local
from lamina.live.timer import Timer, clock_us
from lamina.predict import online
from lamina.predict.devices import preset
from lamina.predict.profile import Profile, read_all
from lamina.predict.table import Table
from lamina.predict.world import World
from lamina.profiler import session
from lamina.sdk.load import load_app
from lamina.sim.executor import Executor
from lamina.sim.loop import simulate
from lamina.types import Call, DeviceSpec, FunctionSpec, Scale, Slo

RESULT = Path("results/prediction-fidelity.json")
APP = "benchmarks/apps/digest.py"
LOADS = (0.5, 0.8, 1.1)
"""Of what the function can do in its largest batches."""
SECONDS = {"cpu": 14.0, "emulated": 10.0}
SEED = 3


class Case(NamedTuple):
    deployed: Deployed
    device: DeviceSpec
    profiles: list[Profile]
    calls: list[Call]
    policy: str


def calls(rates: dict[str, float], slos_us: dict[str, int], seconds: float) -> list[Call]:
    made = []
    for name, rate in rates.items():
        rng, at_s = random.Random(f"{SEED}/{name}"), 0.0
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            at_us = round(at_s * 1e6)
            made.append(Call("", name, at_us, at_us + slos_us[name], at_us + slos_us[name]))
    made.sort(key=lambda call: call.arrived_us)
    return [_moved(call, f"c{number}", 0) for number, call in enumerate(made)]


def _moved(call: Call, name: str, by_us: int) -> Call:
    return Call(name, call.target, call.arrived_us + by_us, call.deadline_us + by_us, call.expires_us + by_us)


def _world(case: Case) -> World:
    return World(Table(case.profiles), random.Random(SEED), 0.05)


def _controller(case: Case) -> Controller:
    return Controller(policies.build(case.policy), online.Predictor(Table(case.profiles, margin=0.1)))


def simulated(case: Case) -> dict[str, float]:
    controller, ends = _controller(case), list[Ending]()
    setup = [DeviceJoined(case.device), case.deployed]
    # a second of warm-up: live, the instances that must stand are loaded before the first call too
    shifted = [_moved(call, call.id, 1_000_000) for call in case.calls]
    simulate(
        controller, Executor(controller, _world(case), seed=SEED), shifted, setup=setup, on_end=lambda _, end: ends.append(end)
    )
    return told(case, ends)


def told(case: Case, ends: list[Ending]) -> dict[str, float]:
    goal_us = {call.id: call.deadline_us - call.arrived_us for call in case.calls}
    took = sorted(end.latency_us for end in ends if isinstance(end, Reply))
    in_time = sum(isinstance(end, Reply) and end.latency_us <= goal_us[end.call_id] for end in ends)
    assert len(ends) == len(case.calls), (len(ends), len(case.calls))
    return {
        "answered": len(took),
        "p50_ms": took[len(took) // 2] / 1000,
        "p99_ms": took[int(0.99 * len(took))] / 1000,
        "attainment": in_time / len(ends),
    }


async def live(case: Case, loop: LiveLoop, inputs: dict[str, bytes]) -> dict[str, float]:
    """The calls on the clock on the wall."""
    await loop.start(case.deployed)
    await asyncio.sleep(1.0)
    ends: list[Ending] = []
    done, late_us = asyncio.Event(), list[int]()

    def on_end(end: Ending) -> None:
        ends.append(end)
        if len(ends) == len(case.calls):
            done.set()

    timer = Timer(asyncio.get_running_loop())
    begin_us, offset_us = clock_us(), loop.now_us()

    def submit(call: Call) -> None:
        late_us.append(clock_us() - begin_us - call.arrived_us)
        loop.submit(_moved(call, call.id, offset_us), inputs, on_end)

    for call in case.calls:
        timer.at(begin_us + call.arrived_us, lambda call=call: submit(call))  # type: ignore[misc]
    with overheard(Table(case.profiles)) as seen:
        await asyncio.wait_for(done.wait(), 90)
    timer.close()
    await loop.stop()
    ran_us, profiled_us = (sum(column) for column in zip(*seen, strict=True))
    pace = ran_us / profiled_us
    return told(case, ends) | {"timers_late_p99_ms": sorted(late_us)[int(0.99 * len(late_us))] / 1000, "pace": round(pace, 4)}


@contextmanager
def overheard(table: Table) -> Iterator[list[tuple[float, float]]]:
    """What batches took, and what their profile says, as the predictor learns of it."""
    seen: list[tuple[float, float]] = []
    observe = online.Predictor.observe

    def listen(self: online.Predictor, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        seen.append((device_us, table.typical_us(function, kind, batch, units, cores)))
        observe(self, function, kind, batch, units, device_us, cores)

    online.Predictor.observe = listen  # type: ignore[method-assign]
    yield seen
    online.Predictor.observe = observe  # type: ignore[method-assign]


def cpu() -> list[dict[str, Any]]:
    made = []
    with tempfile.TemporaryDirectory() as folder:
        [target] = session.targets(f"{APP}:digest", [])
        bench = session.open_bench(target, "cpu")
        try:
            profile = session.run(target, bench, session.Options(out=Path(folder), budget_s=8.0), None).profile
        finally:
            bench.close()
        device, app = bench.device, load_app(APP)
        slo_us = app.functions["digest"].spec.slo.latency_us
        full_us = Table([profile]).typical_us("digest", "cpu", 8, 1)
        for load in LOADS:
            due = calls({"digest": load * 8e6 / full_us}, {"digest": slo_us}, SECONDS["cpu"])
            case = Case(app.deployed(), device, [profile], due, "edf")
            started = open_local(APP, policy=policies.build("edf"), profiles=Path(folder))
            found = asyncio.run(live(case, started.loop, {"x": values.encode(1)}))
            made.append(row(f"cpu, 1 of {device.units} cores, edf", load, case, found))
    return made


def emulated() -> list[dict[str, Any]]:
    """Batches of tens of milliseconds, a few hundred calls a second: timers come up to a millisecond late on any machine."""
    made = []
    names = ("convnext_base", "resnet101")
    profiles = [profile for profile in read_all(Path("profiles/v100")) if profile.function in names]
    table, device = Table(profiles), preset("v100")
    full_us = {name: table.typical_us(name, "v100", 8, 25) for name in names}
    slos_us = {name: round(2.5 * us) for name, us in full_us.items()}
    functions = tuple(
        FunctionSpec(name=name, max_batch=8, gpu="must", share=0.25, slo=Slo(latency_us=slos_us[name]), scale=Scale(min=1, max=1))
        for name in names
    )
    for policy, load in (("edf", 0.5), ("edf", 0.8), ("edf", 1.1), ("frontier", 0.8)):
        rates = {name: load * 2 * 8e6 / us for name, us in full_us.items()}  # two of the four quarters each
        case = Case(Deployed(functions), device, profiles, calls(rates, slos_us, SECONDS["emulated"]), policy)
        world = _world(case)
        loop = LiveLoop(_controller(case), EmulatedEngine([device], world), Pretence(world))
        made.append(row(f"emulated v100, {policy}", load, case, asyncio.run(live(case, loop, {}))))
    return made


def row(what: str, load: float, case: Case, found: dict[str, float]) -> dict[str, Any]:
    expected = simulated(case)
    paced = simulated(case._replace(profiles=[_slower(profile, found["pace"]) for profile in case.profiles]))
    made = {
        "what": what,
        "load": load,
        "calls": len(case.calls),
        "simulated": expected,
        "live": found,
        "p50 off": round(found["p50_ms"] / expected["p50_ms"] - 1, 4),
        "p99 off": round(found["p99_ms"] / expected["p99_ms"] - 1, 4),
        "attainment off": round(found["attainment"] - expected["attainment"], 4),
        "simulated at its pace": paced,
        "p50 off at its pace": round(found["p50_ms"] / paced["p50_ms"] - 1, 4),
        "p99 off at its pace": round(found["p99_ms"] / paced["p99_ms"] - 1, 4),
    }
    print(json.dumps(made), flush=True)
    return made


def _slower(profile: Profile, times: float) -> Profile:
    """As if it had been profiled at the pace the machine had during the run: what is left is the simulator's own error."""
    points = [replace(point, p50_us=point.p50_us * times, p99_us=point.p99_us * times) for point in profile.points]
    return replace(profile, points=points)


def main() -> None:
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, run in (("emulated", emulated), ("cpu", cpu)):
        if name in (sys.argv[1:] or ["emulated", "cpu"]):
            found[name] = run()
    found["made"] = {
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
        "seconds": SECONDS,
        "load_average": os.getloadavg()[0],
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
