"""A rolling update in the middle of a run, under every policy: no invariant breaks, and nothing of the old version is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from lamina import plugins
from lamina.core.actions import Action, FailCall, Load, Reply, Unload
from lamina.core.events import Deployed, Event
from lamina.sim.run import run
from lamina.sim.scenario import parse
from tests.sim.test_tenants import SCENARIO

AT_US = 2_000_000


@pytest.mark.parametrize("policy", [name for name in plugins.names("policies") if name != "planned"])  # that one needs a plan
def test_a_new_version_takes_over_under_every_policy(policy: str) -> None:
    text = SCENARIO.format(policy=policy, noisy=20).replace("rate = 400", "rate = 80").replace('"8s"', '"5s"')
    scenario = parse(text.replace('tenant = "quiet"', "").replace('tenant = "noisy"', ""), Path("renewal.toml"))
    ends: dict[type[Action], int] = {Reply: 0, FailCall: 0}
    old: set[str] = set()
    told = no_room = False

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        nonlocal told, no_room
        told = told or (isinstance(event, Deployed) and now_us == AT_US)
        for action in actions:
            if isinstance(action, Load) and not told:
                old.add(action.instance)
            elif isinstance(action, Unload):
                old.discard(action.instance)
                no_room = no_room or now_us == AT_US  # it has given its only instance the whole device
            elif type(action) in ends and now_us >= AT_US:
                ends[type(action)] += 1

    second = Deployed(tuple(replace(spec, version="2") for spec in scenario.functions))
    run(scenario, faults=[(AT_US, second)], watch=watch, check=True)
    assert not old
    assert no_room or ends[FailCall] == 0, f"{ends[FailCall]} of {ends[Reply]} calls were lost"
