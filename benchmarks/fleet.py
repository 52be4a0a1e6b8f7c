"""A fleet in the simulator: 1,000 GPUs on 125 machines, 10,000 functions, 20,000 calls a second; ways, and machines that fail.

All of it is simulated: the controller and its policy are the real ones, devices and networks are models. Times of decisions are
processor time of this process on one core, per event that the controller handles.

Machines fail as seeded events. Every machine sends a beat each 100 ms, which arrives after its own delay; the node registry of
the server looks at them every 50 ms and says which machines are silent, lost and back, as it does for real agents. A cut of the
network hides the beats of one machine for a while. While the leader changes no machine gets anything.

    python -m benchmarks.fleet --out results/fleet.json           # all of it: some minutes
    python -m benchmarks.fleet --gpus 125 --seconds 1             # one size
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from benchmarks.report import machine
from lamina.cluster.node_registry import BEAT_US, LOOK_US, NodePhase, NodeRegistry
from lamina.core.controller import Controller
from lamina.core.events import DeviceJoined, DeviceLost, DeviceSuspended, Event, InstanceFound
from lamina.drivers.virtual import simulate
from lamina.lab.decision_times import TimedController
from lamina.lab.experiments.scale import EndingCounts, PreloadedScaling, exponent, make
from lamina.policies import build, new_controller
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel, WayModel
from lamina.sim.run import random_stream, setup_events
from lamina.sim.scenario import Scenario
from lamina.types import Call, DeviceSpec, Slo, call_for

GPUS_A_NODE = 8
FUNCTIONS_A_GPU, RATE_A_GPU = 10, 20.0
READY_US = 5_000_000
"""All instances are loaded by then."""

SIZES = (64, 125, 250, 500, 1_000)
WAYS_MS = (0.0, 0.2, 1.0, 3.0)
WAYS_GPUS, WAYS_RATE_A_GPU = 16, 1_000.0
"""Of the ways: a load at which bookings and batches matter, on fewer GPUs."""

FAILING_GPUS = 125
SLO_US = 50_000
POPULARITY = 0.9
"""Exponent of Zipf's law: at 1 a tenth of all calls would be for one function of ten thousand."""


def fleet(gpus: int, seed: int, way_ms: float = 0.0) -> Scenario:
    """Functions of three kinds with an SLO of 50 ms, popular ones on more than one device; GPUs in machines of eight."""
    base = make(gpus * FUNCTIONS_A_GPU, gpus, seed)
    devices = tuple(replace(device, node=f"n{number // GPUS_A_NODE}") for number, device in enumerate(base.devices))
    functions = tuple(replace(spec, slo=Slo(latency_us=SLO_US), scale=replace(spec.scale, max=64)) for spec in base.functions)
    ways = {"h200": WayModel(int(way_ms * 1_000), 0.2)} if way_ms else {}
    return replace(base, devices=devices, functions=functions, ways=ways)


def weights(functions: int) -> list[float]:
    return [(rank + 1) ** -POPULARITY for rank in range(functions)]


def places(scenario: Scenario) -> list[tuple[str, str]]:
    """(function, device): each function on one device at least, and popular ones on as many as their share of the calls asks for,
    over different machines."""
    share = weights(len(scenario.functions))
    total, gpus = sum(share), scenario.devices
    copies = [max(1, min(64, len(gpus), math.ceil(len(gpus) * one / total * 2))) for one in share]
    stride = GPUS_A_NODE + 1  # the next copy is on another machine
    found, at = [], 0
    for spec, count in zip(scenario.functions, copies, strict=True):
        for _ in range(count):
            found.append((spec.name, gpus[at % len(gpus)].id))
            at += stride
        at += 1
    return list(dict.fromkeys(found))


def calls(scenario: Scenario, rate_per_s: float, seconds: float, timed: TimedController) -> Iterator[Call]:
    """Poisson calls; the first tenth fills the devices and is not timed."""
    dice = random.Random(f"fleet/{scenario.seed}")
    cumulated = list(accumulate(weights(len(scenario.functions))))
    at_us, last_us = float(READY_US), READY_US + seconds * 1e6
    number, began = 0, False
    while (at_us := at_us + dice.expovariate(rate_per_s) * 1e6) < last_us:
        if not began and at_us > READY_US + seconds * 1e5:
            timed.begin()
            began = True
        spec = scenario.functions[min(bisect(cumulated, dice.random() * cumulated[-1]), len(scenario.functions) - 1)]
        yield call_for(f"c{number}", spec.name, int(at_us), spec.slo)
        number += 1


# ----------------------------------------------------------------------------------------- machines that fail


class Beats:
    """Beats of all machines as they arrive at the leader, and the changes that its registry makes of them."""

    def __init__(self, devices: tuple[DeviceSpec, ...], loaded: list[tuple[str, str]], seed: int) -> None:
        self._dice = random.Random(f"beats/{seed}")
        self._nodes: dict[str, list[DeviceSpec]] = {}
        for device in devices:
            self._nodes.setdefault(device.node, []).append(device)
        self._loaded: dict[str, list[str]] = {}
        for function, where in loaded:
            self._loaded.setdefault(where, []).append(function)

    def cuts(self, count: int, begin_us: int, end_us: int) -> dict[str, list[tuple[int, int]]]:
        """Cuts of the network by machine: 0.2 to 3 s long."""
        found: dict[str, list[tuple[int, int]]] = {}
        for _ in range(count):
            at_us = self._dice.randrange(begin_us, end_us)
            found.setdefault(self._dice.choice(sorted(self._nodes)), []).append(
                (at_us, at_us + self._dice.randrange(200, 3_000) * 1_000)
            )
        return found

    def events(self, cuts: dict[str, list[tuple[int, int]]], end_us: int) -> list[tuple[int, Event]]:
        """What the controller is told, in order of time."""
        registry, found = NodeRegistry(), []
        epochs: dict[str, int] = {}
        arrivals = sorted(
            (at_us + int(self._dice.expovariate(1 / 500)), node)
            for node in self._nodes
            for at_us in range(self._dice.randrange(BEAT_US), end_us, BEAT_US)
            if not any(begin <= at_us < end for begin, end in cuts.get(node, ()))
        )
        for node in self._nodes:
            epochs[node] = registry.hello(0, node, 1)[0]
            registry.opened(0, node, epochs[node])
        at = 0
        for now_us in range(0, end_us, LOOK_US):
            while at < len(arrivals) and arrivals[at][0] <= now_us:
                when_us, node = arrivals[at]
                at += 1
                if not registry.is_current(
                    node, epochs[node]
                ):  # it was lost: its agent says hello again, with what it has loaded
                    epochs[node] = registry.hello(when_us, node, 1)[0]
                    registry.opened(when_us, node, epochs[node])
                    found += [(when_us, event) for event in self._back(node)]
                for change in registry.beat(when_us, node, epochs[node]):
                    found += [(when_us, DeviceSuspended(device.id, False)) for device in self._nodes[change.node]]
            for change in registry.look(now_us):
                devices = self._nodes[change.node]
                if change.after is NodePhase.SUSPECT:
                    found += [(now_us, DeviceSuspended(device.id)) for device in devices]
                elif change.after is NodePhase.LOST:
                    found += [(now_us, DeviceLost(device.id, blames=False)) for device in devices]
        return found

    def new_leader(self, at_us: int, takes_us: int) -> list[tuple[int, Event]]:
        """A change of the leader: for a while no machine gets anything, then each joins again, within 0.2 s, with what it has."""
        found: list[tuple[int, Event]] = []
        for devices in self._nodes.values():
            back_us = at_us + takes_us + self._dice.randrange(200_000)
            found += [(at_us, DeviceSuspended(device.id)) for device in devices]
            found += [(back_us, DeviceSuspended(device.id, False)) for device in devices]
        return sorted(found, key=lambda pair: pair[0])

    def _back(self, node: str) -> Iterator[Event]:
        for device in self._nodes[node]:
            yield DeviceJoined(device)
            for number, function in enumerate(self._loaded.get(device.id, [])):
                yield InstanceFound(f"{device.id}-old-{number}", device.id, function)


class Away:
    """Calls that no server could answer in time while the leader changes: no machine that has their function is back in time."""

    def __init__(self, changes: list[tuple[int, Event]], loaded: list[tuple[str, str]]) -> None:
        self.hopeless = 0
        self._began_us = changes[0][0]
        back = {event.device: at_us for at_us, event in changes if isinstance(event, DeviceSuspended) and not event.suspended}
        self._back_us: dict[str, int] = {}  #: by function: when the first of its machines is
        for function, device in loaded:
            self._back_us[function] = min(self._back_us.get(function, back[device]), back[device])

    def watch(self, stream: Iterator[Call]) -> Iterator[Call]:
        for call in stream:
            arrived_us = call.arrived_us
            self.hopeless += self._began_us <= arrived_us and arrived_us + SLO_US <= self._back_us[call.target]
            yield call

    def share(self, ends: EndingCounts) -> float:
        return round(ends.good / max(1, ends.all - self.hopeless), 5)


# --------------------------------------------------------------------------------------------------- one run


def resident_mib() -> float:
    """Memory of this process, which plays one size alone."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    gpus: int,
    seconds: float,
    seed: int,
    *,
    rate_a_gpu: float = RATE_A_GPU,
    way_ms: float = 0.0,
    cuts: int = 0,
    leader_s: float = 0.0,
    policy: str = "frontier",
) -> dict[str, Any]:
    before_mib = resident_mib()
    scenario = fleet(gpus, seed, way_ms)
    table = ProfileTable(list(scenario.profiles), margin=scenario.margin)
    controller = new_controller(build(policy), table)
    loaded = places(scenario)
    controller._scale = cast(Any, PreloadedScaling(controller._scale, list(loaded)))
    timed = TimedController(controller)
    world = HardwareModel(table, random_stream(seed, "world"), scenario.noise, ways=scenario.ways)
    executor = SimulatedExecutor(controller, world, seed=seed)
    end_us = READY_US + int(seconds * 1e6)
    beats = Beats(scenario.devices, loaded, seed)
    faults = beats.events(beats.cuts(cuts, READY_US, end_us), end_us + 4_000_000) if cuts else []
    away = None
    if leader_s:
        changes = beats.new_leader(READY_US + int(seconds * 5e5), int(leader_s * 1e6))
        faults += changes
        away = Away(changes, loaded)
    ends = EndingCounts()
    stream = calls(scenario, rate_a_gpu * gpus, seconds, timed)
    if away is not None:
        stream = away.watch(stream)
    simulate(
        cast(Controller, timed),
        executor,
        stream,
        setup=setup_events(scenario),
        faults=sorted(faults, key=lambda pair: pair[0]),
        on_end=ends,
        until_us=end_us,
    )
    memory_mib = max(0.0, resident_mib() - before_mib)
    return {
        "gpus": gpus,
        "machines": -(-gpus // GPUS_A_NODE),
        "functions": len(scenario.functions),
        "instances": len(loaded),
        "calls_per_s": rate_a_gpu * gpus,
        "seconds": seconds,
        "seed": seed,
        "policy": policy,
        "way_ms": way_ms,
        "cuts": cuts,
        "leader_s": leader_s,
        "calls": ends.all,
        "in_time": round(ends.good / max(1, ends.all), 5),
        **({"hopeless": away.hopeless, "in_time_of_others": away.share(ends)} if away is not None else {}),
        "event_us": timed.event.mean_us,
        "event_p99_us": timed.event.quantile_us(0.99),
        "admit_us": timed.admit.mean_us,
        "admit_p99_us": timed.admit.quantile_us(0.99),
        "call_us": round(timed.event.total_us / max(1, timed.calls), 1),
        "scale_us": timed.scale.mean_us,
        "memory_mib": round(memory_mib, 1),
    }


MEASURES = ("event_us", "event_p99_us", "admit_us", "admit_p99_us", "call_us", "scale_us", "memory_mib")


def growth(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Exponents of decision times over the size of the fleet."""
    return {name: exponent([(row["gpus"], row[name]) for row in rows]) for name in MEASURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="frontier")
    parser.add_argument("--ways", action="store_true", help="the ways and the failures too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for gpus in given.gpus:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            rows.append(alone.submit(measure, gpus, given.seconds, given.seed, policy=given.policy).result())
        print(json.dumps(rows[-1]), flush=True)
    found: dict[str, Any] = {"machine": machine(), "sizes": rows, "exponents": growth(rows) if len(rows) > 1 else {}}
    print(json.dumps(found["exponents"]), flush=True)
    if given.ways:
        common: dict[str, Any] = {"seconds": given.seconds, "seed": given.seed, "policy": given.policy}
        loaded = {"gpus": WAYS_GPUS, "rate_a_gpu": WAYS_RATE_A_GPU, **common}
        found["ways"] = [measure(**loaded, way_ms=way_ms) for way_ms in WAYS_MS]
        failing = {"gpus": FAILING_GPUS, "way_ms": 0.2, **common}
        found["failures"] = [measure(**failing, cuts=10), measure(**{**failing, "seconds": 3.0}, leader_s=0.7)]
        for row in found["ways"] + found["failures"]:
            del row["memory_mib"]  # of a process that has played others before
            print(json.dumps(row), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
