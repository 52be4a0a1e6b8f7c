"""Bandwidth rule, whatever the policy: batches beside each other take no more memory bandwidth than it allows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lamina import plugins
from lamina.core.actions import Action, Load, StartBatch
from lamina.core.events import BatchFinished, Event
from lamina.predict.interference import BandwidthInterference
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload as Calls
from lamina.sim.workload import steps
from tests.policies.gpus import UNITS, S, a_model, goal, gpus, profile

DEMAND = {("reader", "gpu"): 1.0, ("writer", "gpu"): 0.9, ("thinker", "gpu"): 0.0}
SHARE = {"reader": 0.4, "writer": 0.4, "thinker": 0.2}
LIMIT = 0.7


class Beside:
    """Adds up what runs at the same time, from events and actions alone."""

    def __init__(self) -> None:
        self.running: dict[int, StartBatch] = {}
        self.booked: dict[int, StartBatch] = {}
        self.devices: dict[str, list[str]] = {}  #: where each function was loaded
        self.most = 0.0  #: that neighbours have asked for
        self.together = 0  #: most that ran at once

    def watch(self, now_us: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, BatchFinished) and self.running.pop(event.batch_id, None):
            follower = self.booked.pop(event.batch_id, None)
            if follower is not None:
                self.running[follower.batch_id] = follower
        for action in actions:
            if isinstance(action, StartBatch):
                (self.booked if action.behind else self.running)[action.behind or action.batch_id] = action
            elif isinstance(action, Load):
                self.devices.setdefault(action.function, []).append(action.device)
        for device in {batch.device for batch in self.running.values()}:
            here = [batch for batch in self.running.values() if batch.device == device]
            asked = [DEMAND[batch.function, "gpu"] * batch.mask.bit_count() / UNITS for batch in here]
            if sum(part > 0 for part in asked) > 1:
                self.most = max(self.most, sum(asked))
            self.together = max(self.together, len(here))


def scenario(policy: str, devices: int = 1) -> Scenario:
    return Scenario(
        name="beside",
        devices=tuple(gpus(devices)),
        functions=tuple(a_model(name, share=share, slo=goal(9)) for name, share in SHARE.items()),
        profiles=tuple(profile(name) for name in SHARE),
        loads=tuple(Calls(target=name, segments=steps([(S // 2, 400.0)]), cv=1.0, start_us=5 * S) for name in SHARE),
        policy=policy,
        options={},
        seed=5,
        interference=BandwidthInterference(DEMAND, LIMIT),
    )


def watched(scenario: Scenario) -> Beside:
    seen = Beside()
    run(scenario, watch=seen.watch)
    return seen


@pytest.mark.parametrize("policy", plugins.names("policies"))
def test_neighbours_never_ask_for_more_than_the_limit(policy: str):
    assert watched(scenario(policy)).most <= LIMIT + 1e-9


@pytest.mark.parametrize("policy", ["edf", "fifo", "frontier"])
def test_a_function_without_demand_runs_beside_any_other(policy: str):
    assert watched(scenario(policy)).together > 1


@pytest.mark.parametrize("policy", ["edf", "fifo", "frontier"])
def test_where_demands_are_unknown_there_is_no_limit(policy: str):
    assert watched(replace(scenario(policy), interference=None)).most > LIMIT


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_they_stand_apart_where_there_is_another_device(policy: str):
    devices = watched(scenario(policy, devices=3)).devices
    assert devices["reader"][0] != devices["writer"][0]
