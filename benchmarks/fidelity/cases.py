"""What is offered to whom, and what the simulator makes of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.fidelity.host import Host, Seen
from lamina import policies
from lamina.core.actions import Reply
from lamina.core.controller import Controller
from lamina.core.events import Deployed, DeviceJoined, Event
from lamina.drivers.driver import Ending
from lamina.drivers.virtual import simulate
from lamina.planner.interference import InterferenceModel
from lamina.policies import new_controller
from lamina.predict import online
from lamina.predict.profile import Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.types import Call, DeviceSpec

SEED = 3
SEEDS = range(SEED, SEED + 7)
REFUSED = -1
WARM_US = 1_000_000
"""Simulated before the first call: live, the instances that must stand are loaded before it too."""


class Case(NamedTuple):
    deployed: Deployed
    device: DeviceSpec
    profiles: list[Profile]
    calls: list[Call]
    policy: str
    interference: InterferenceModel | None = None
    believed: list[Profile] | None = None  #: what the server knew when it began, where that is something else
    host: Host = Host()
    timed: bool = False  #: the ends of batches are timers of the host: they are emulated
    pace: Callable[[int], float] | None = None  #: of the machine over time: profiled times are multiplied by it


def poisson(rates: dict[str, float], slos_us: dict[str, int], seconds: float, seed: int = SEED) -> list[Call]:
    made = []
    for name, rate in rates.items():
        rng, at_s = random.Random(f"{seed}/{name}"), 0.0
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            at_us = round(at_s * 1e6)
            made.append(Call("", name, at_us, at_us + slos_us[name], at_us + slos_us[name]))
    made.sort(key=lambda call: call.arrived_us)
    return [moved(call, f"{seed}-{number}", 0) for number, call in enumerate(made)]


def moved(call: Call, name: str, by_us: int) -> Call:
    return Call(name, call.target, call.arrived_us + by_us, call.deadline_us + by_us, call.expires_us + by_us)


@dataclass(slots=True)
class Paced(HardwareModel):
    """On a machine whose pace changes."""

    pace: float = 1.0

    def batch_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        return round(HardwareModel.batch_us(self, function, kind, batch, units, cores) * self.pace)


def world_of(case: Case, seed: int = SEED) -> Paced:
    return Paced(ProfileTable(case.profiles), random.Random(seed), 0.05, interference=case.interference)


def controller_of(case: Case) -> Controller:
    soft = frozenset({case.device.kind} if case.device.limits.soft else ())
    return new_controller(
        policies.build(case.policy), online.OnlinePredictor(ProfileTable(case.believed or case.profiles, margin=0.1), soft)
    )


def ends_of(case: Case, seed: int = SEED) -> list[Ending]:
    """Simulated."""
    controller, ends = controller_of(case), list[Ending]()
    setup: list[Event] = [DeviceJoined(case.device), case.deployed]
    shifted = [moved(call, call.id, WARM_US) for call in case.calls]
    world = world_of(case, seed)

    def tell(now_us: int) -> None:
        world.pace = case.pace(now_us) if case.pace is not None else 1.0

    executor = Seen(SimulatedExecutor(controller, world, seed=seed), case.host, WARM_US, case.timed, tell)
    on_end = lambda _, end: ends.append(end)  # noqa: E731
    simulate(controller, executor, shifted, setup=setup, on_end=on_end, wakes_us=executor.wakes_us)
    return ends


def told(calls: list[Call], ends: list[Ending]) -> dict[str, float]:
    """Of `calls`, whose ends may come in any order."""
    assert len(ends) == len(calls), (len(ends), len(calls))
    latency_us = {end.call_id: end.latency_us if isinstance(end, Reply) else REFUSED for end in ends}
    return told_of(calls, [latency_us[call.id] for call in calls])


def told_of(calls: Sequence[Call], latencies_us: Sequence[int]) -> dict[str, float]:
    """Of `calls` and how long each took; `REFUSED`: there was no answer."""
    took = sorted(us for us in latencies_us if us != REFUSED) or [0]
    ends = zip(calls, latencies_us, strict=True)
    in_time = sum(us != REFUSED and us <= call.deadline_us - call.arrived_us for call, us in ends)
    return {
        "answered": sum(us != REFUSED for us in latencies_us),
        "p50_ms": took[len(took) // 2] / 1000,
        "p99_ms": took[int(0.99 * len(took))] / 1000,
        "attainment": round(in_time / len(calls), 4),
    }


def simulated(cases: Sequence[Case]) -> dict[str, float]:
    """All cases together; the middle of several seeds, as batches spread by chance. How far they lie apart is told too."""
    return middle([case.calls for case in cases], played(cases))


def played(cases: Sequence[Case]) -> list[list[list[Ending]]]:
    """By seed, by case."""
    return [[ends_of(case, seed) for case in cases] for seed in SEEDS]


def middle(calls: list[list[Call]], ends: list[list[list[Ending]]]) -> dict[str, float]:
    """Calls by case; ends by seed, by case."""
    offered = [call for one in calls for call in one]
    found = [told(offered, [end for one in seed for end in one]) for seed in ends]
    about = {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]}
    for name in ("p50_ms", "p99_ms", "attainment"):
        about |= {f"{name}_least": min(one[name] for one in found), f"{name}_most": max(one[name] for one in found)}
    return about


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What was noted beside latencies, of several parts of one run: the worst timers, the mean of the rest."""
    means = {name: round(statistics.mean(part[name] for part in parts), 2) for name in ("decisions_mean_us", "mean_batch")}
    away_ms = round(sum(part["away_ms"] for part in parts), 1)
    return {"timers_late_p99_ms": max(part["timers_late_p99_ms"] for part in parts), "away_ms": away_ms} | means


def off(expected: dict[str, float], live: dict[str, Any]) -> dict[str, Any]:
    """Live over simulated."""
    return {
        "simulated": expected,
        "live": live,
        "p50 off": round(live["p50_ms"] / expected["p50_ms"] - 1, 4),
        "p99 off": round(live["p99_ms"] / expected["p99_ms"] - 1, 4),
        "attainment off": round(live["attainment"] - expected["attainment"], 4),
    }
