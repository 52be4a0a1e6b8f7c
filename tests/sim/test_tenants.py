"""A tenant at ten times its quota must not move another's p99 by more than a quarter."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina import plugins
from lamina.core.actions import Action, Reply, StartBatch
from lamina.core.events import BatchFinished, CallArrived, Event
from lamina.sim.run import run
from lamina.sim.scenario import parse

pytestmark = pytest.mark.slow

WARM_US = 2_000_000  #: what arrives sooner waits for instances, and tells nothing

SCENARIO = """
[scenario]
name = "tenants"
duration = "8s"
seed = 5
policy = "{policy}"

[[device]]
kind = "h200"

[[function]]
name = "f"
share = "1/4"
max_batch = 8
memory = "700MiB"
scale = {{ min = 1, max = 4 }}
load = "100ms"
slo = "60ms"
[function.profile.h200]
batch    = [  1,   8]
p50_ms.4 = [2.5, 6.0]

[[load]]
target = "f"
rate = 400
tenant = "quiet"

[[load]]
target = "f"
rate = {noisy}
tenant = "noisy"
"""


def quiet_times(policy: str, noisy: int, quota: int) -> tuple[list[int], int]:
    """Latencies of the quiet tenant once all is warm, sorted; and how many calls of the noisy one were answered."""
    owners: dict[str, str] = {}
    times: list[int] = []
    noisy_answers = 0

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        nonlocal noisy_answers
        if type(event) is CallArrived and now_us >= WARM_US:
            owners[event.call.id] = event.call.tenant
        for action in actions:
            if type(action) is Reply and action.call_id in owners:
                if owners[action.call_id] == "quiet":
                    times.append(action.latency_us)
                else:
                    noisy_answers += 1

    text = SCENARIO.format(policy=policy, noisy=noisy)
    if quota:
        text += f'[[tenant]]\nname = "noisy"\nrate = {quota}\n'
    run(parse(text if quota else text.replace('"8s"', '"4s"'), Path("tenants.toml")), watch=watch)
    return sorted(times), noisy_answers


@pytest.mark.parametrize("policy", ["edf", "fifo", "frontier"])
def test_ten_times_the_quota_moves_no_other_p99_by_more_than_a_quarter(policy: str) -> None:
    (within, _), (beyond, noisy) = quiet_times(policy, 400, 400), quiet_times(policy, 4_000, 400)
    assert len(beyond) == pytest.approx(len(within), rel=0.005), "and none of its calls is lost"
    assert beyond[int(0.99 * len(beyond))] <= 1.25 * within[int(0.99 * len(within))]
    assert noisy == pytest.approx(400 * 6, rel=0.05), "it gets what is its own"


@pytest.mark.parametrize("policy", [name for name in plugins.names("policies") if name != "planned"])  # that one needs a plan
def test_every_policy_shares_without_breaking_a_rule(policy: str) -> None:
    """Two tenants, one with priorities, and all invariants are checked after every event."""
    text = SCENARIO.format(policy=policy, noisy=300).replace('"8s"', '"1s"').replace("rate = 400", "rate = 100\npriority = 2")
    owners: dict[str, str] = {}
    answered: dict[str, int] = {"quiet": 0, "noisy": 0}

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        if type(event) is CallArrived:
            owners[event.call.id] = event.call.tenant
        for action in actions:
            if type(action) is Reply:
                answered[owners[action.call_id]] += 1

    run(parse(text, Path("tenants.toml")), watch=watch, check=True)
    assert answered["quiet"] > 0 and answered["noisy"] > 0


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_a_flood_without_any_quota_costs_a_quiet_tenant_none_of_its_calls(policy: str) -> None:
    alone, _ = quiet_times(policy, 1, 0)
    flooded, _ = quiet_times(policy, 4_800, 0)
    assert len(flooded) >= 0.995 * len(alone)


LONG_WORK = """
[scenario]
name = "long"
duration = "60s"
seed = 1
policy = "{policy}"

[[device]]
kind = "h200"

[[function]]
name = "short"
share = 1
scale = {{ min = 1, max = 1 }}
segment = "1ms"
[function.profile.h200]
batch     = [1]
p50_ms.15 = [200]

[[function]]
name = "long"
share = 1
scale = {{ min = 1, max = 1 }}
segment = "1ms"
[function.profile.h200]
batch     = [1]
p50_ms.15 = [800]

[[tenant]]
name = "a"
weight = 1

[[tenant]]
name = "b"
weight = 3

[[load]]
target = "short"
shape = "closed"
clients = 3
tenant = "a"

[[load]]
target = "long"
shape = "closed"
clients = 3
tenant = "b"
"""


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_long_work_of_two_tenants_that_gives_way_shares_a_device_by_their_weights(policy: str) -> None:
    """Batch by batch: neither has the other's units before its batch has ended."""
    functions: dict[int, str] = {}
    device_us = {"short": 0, "long": 0}

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        if type(event) is BatchFinished:
            device_us[functions[event.batch_id]] += event.device_us
        for action in actions:
            if type(action) is StartBatch:
                assert action.gives_way and not action.overlaps
                functions[action.batch_id] = action.function

    run(parse(LONG_WORK.format(policy=policy), Path("long.toml")), watch=watch)
    assert device_us["long"] / sum(device_us.values()) == pytest.approx(0.75, abs=0.02)
