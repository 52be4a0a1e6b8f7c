"""A slow machine shrinks its own share of the work, and no other's."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina import policies
from lamina.core.actions import Load, StartBatch
from lamina.core.events import BatchFinished, CallArrived, Deployed, DeviceJoined, Event, InstanceReady, Tick
from lamina.core.scheduling.completions import LEAST_PACE, MIN_OBSERVATIONS, PACE_SMOOTHING, SLOWER, DevicePace
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Batch
from lamina.policies import new_controller
from lamina.predict.online import OnlinePredictor
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, Slo

USUAL_US = 10_000


def served(policy: str, slow: dict[str, float], everywhere: float = 1.0, nodes: tuple[str, ...] = ("a", "b", "c")) -> tuple:
    """Calls to a function on several machines, some of which take so many times as long from 2 s on; who served, in virtual
    time."""
    predictor = OnlinePredictor()
    controller = new_controller(policies.build(policy), predictor)
    heap: list[tuple[int, int, Event]] = []
    order = 0

    def at(us: int, event: Event) -> None:
        nonlocal order
        order += 1
        heappush(heap, (us, order, event))

    for node in nodes:
        spec = DeviceSpec(id=f"{node}.cpu", kind="cpu", units=1, memory_mib=1_000, family="cpu", node=node, owned=True)
        at(0, DeviceJoined(spec))
    scale = ScaleSpec(min=len(nodes), max=len(nodes))
    at(0, Deployed((FunctionSpec(name="f", scale=scale, slo=Slo(latency_us=100_000, on_miss="serve")),)))
    for number in range(2_000):
        at(100_000 + number * 6_000, CallArrived(Call(f"c{number}", "f", 0, deadline_us=100_000 + number * 6_000 + 100_000)))
    for tick in range(1, 1_300):
        at(tick * 10_000, Tick())
    shares: Counter[str] = Counter()
    while heap:
        now_us, _, event = heappop(heap)
        for action in controller.handle(now_us, event):
            if isinstance(action, Load):
                at(now_us + 1_000, InstanceReady(action.instance))
            elif isinstance(action, StartBatch):
                node = action.device.partition(".")[0]
                factor = everywhere * slow.get(node, 1.0) if now_us > 2_000_000 else 1.0
                us = int(USUAL_US * factor) * len(action.jobs)
                at(now_us + us + 300, BatchFinished(action.batch_id, us))
                if now_us > 6_000_000:
                    shares[node] += len(action.jobs)
    return shares, predictor, controller.state.devices


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_a_slow_machine_teaches_the_others_nothing_and_gets_less_to_do(policy: str):
    shares, predictor, devices = served(policy, {"b": 8.0})
    assert predictor.latency_us("f", "cpu", 1, 1) < 2 * USUAL_US
    assert devices["b.cpu"].way_us > devices["a.cpu"].way_us
    assert devices["a.cpu"].way_us < USUAL_US / 4 and devices["c.cpu"].way_us < USUAL_US / 4
    assert shares["b"] < 0.5 * min(shares["a"], shares["c"])


def test_a_function_that_becomes_slower_everywhere_is_learnt():
    _, predictor, devices = served("edf", {}, everywhere=1.7)
    assert predictor.latency_us("f", "cpu", 1, 1) > 1.5 * USUAL_US
    assert max(device.way_us for device in devices.values()) < USUAL_US / 4


def test_a_machine_alone_is_not_slow_beside_itself():
    _, predictor, _ = served("edf", {"a": 3.0}, nodes=("a",))
    assert predictor.latency_us("f", "cpu", 1, 1) > 2.5 * USUAL_US


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.sampled_from(["stay", "leave", "come"])), max_size=80))
@example([("a", 1, "leave")] * MIN_OBSERVATIONS + [("c", 60, "stay")] * MIN_OBSERVATIONS)  # which chance seldom finds
def test_the_fastest_other_is_found_without_looking_at_all(steps: list[tuple[str, int, str]]):
    """Against all paces looked at, while devices leave and come back."""
    pace, devices, paces = DevicePace(), dict[str, Device](), dict[str, tuple[int, float]]()
    specs = {name: DeviceSpec(id=name, kind="even" if name in "bd" else "odd", units=1, memory_mib=1) for name in "abcd"}
    for name, took_us, move in steps:
        devices.setdefault(name, Device(specs[name]))
        seen, before = paces.get(name, (0, 0.0))
        paces[name] = (seen + 1, before + max(PACE_SMOOTHING, 1 / (seen + 1)) * (took_us / 10 - before))
        others = [
            paces[other][1]
            for other in devices
            if other != name and specs[other].kind == specs[name].kind and paces.get(other, (0, 0.0))[0] >= MIN_OBSERVATIONS
        ]
        is_slow = seen + 1 >= MIN_OBSERVATIONS and bool(others) and paces[name][1] > SLOWER * max(LEAST_PACE, min(others))
        batch = Batch(1, cast(Any, None), devices[name], 1, [], 10)
        assert pace.usual_us(batch, devices, took_us) == (min(took_us, 10) if is_slow else took_us)
        if move == "leave":
            del devices[name]
