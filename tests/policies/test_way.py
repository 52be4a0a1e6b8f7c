"""The way to devices and back in what policies decide: calls stay in time as long as their SLO leaves room for it."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from lamina.core.actions import Reject
from lamina.core.scheduling.leases import Device
from lamina.planner.blocking import BlockingRule
from lamina.policies import frontier
from lamina.policies.frontier.candidate_slots import free_candidates
from lamina.policies.frontier.config_table import ConfigTables
from lamina.sim import scenario as scenarios
from lamina.sim.hardware_model import WayModel
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.sim.summary import Summary
from lamina.types import DeviceSpec
from tests.policies.test_completion_estimate import estimate_us
from tests.script import BIG_GPU, GPU, Script, a_function

WORLD = """
[scenario]
seed = 2
duration = "600ms"
[[device]]
kind = "h200"
sizes = [3, 6, 9, 12, 15]
[[function]]
name = "resnet"
share = 0.2
max_batch = 32
memory = "1GiB"
load = "10ms"
slo = "12ms"
scale = { min = 1, max = 1 }
[function.profile.h200]
batch = [1, 8, 32]
p50_ms.3 = [1.9, 2.6, 4.9]
p50_ms.6 = [1.6, 2.0, 3.5]
p50_ms.15 = [1.5, 1.7, 2.4]
[[load]]
target = "resnet"
rate = 27000
start = "100ms"
"""
FULL = 27_000  #: calls a second: more than four fifths of what the device can do
policies = pytest.mark.parametrize("policy", ["frontier", "edf"])


def world(rate: float = FULL, **ways_us: int) -> Scenario:
    made = scenarios.parse(WORLD.replace("27000", str(rate)))
    return replace(made, ways={name.replace("_", "-"): WayModel(us) for name, us in ways_us.items()})


def on_two(made: Scenario) -> Scenario:
    [device], [function] = made.devices, made.functions
    function = replace(function, scale=replace(function.scale, min=2, max=2))
    return replace(made, devices=(device, replace(device, id="h200-1")), functions=(function,))


@cache
def attainment(policy: str, rate: int, way_us: int, spread: float = 0.0) -> float:
    made = replace(world(rate), ways={"h200": WayModel(way_us, spread)})
    return run(made, policy).total.attainment


ways = pytest.mark.parametrize("way_us", [200, 1_000, 3_000])


@policies
@ways
@pytest.mark.parametrize("rate", [pytest.param(3_000, id="quiet"), pytest.param(FULL, id="busy", marks=pytest.mark.slow)])
def test_with_a_way_of_up_to_a_quarter_of_the_slo_as_many_are_in_time_as_without(policy: str, rate: int, way_us: int):
    """On average of two ways: just below saturation a tenth of a millisecond moves it by a point, one way or the other."""
    both = (attainment(policy, rate, way_us) + attainment(policy, rate, way_us * 14 // 15)) / 2
    assert both >= attainment(policy, rate, 0) - 0.01


@pytest.mark.slow
@policies
@ways
@pytest.mark.parametrize(("rate", "points"), [(60_000, 1), (80_000, 2)], ids=["busy", "overload"])
def test_on_two_devices_and_in_overload_too(policy: str, rate: int, points: int, way_us: int):
    """In overload the first milliseconds, in which the way is not known yet, leave a queue that is late."""
    assert attainment_on_two(policy, rate, way_us) >= attainment_on_two(policy, rate, 0) - points / 100


@cache
def attainment_on_two(policy: str, rate: int, way_us: int) -> float:
    made = on_two(replace(world(rate), duration_us=1_000_000))
    there = replace(made, ways={"h200": WayModel(way_us)}) if way_us else made
    return run(there, policy).total.attainment


@pytest.mark.slow
@policies
def test_a_way_that_varies_is_planned_with_at_its_longer(policy: str):
    assert attainment(policy, 18_000, 3_000, 0.1) >= attainment(policy, 18_000, 0) - 0.01


def test_what_is_not_counted_makes_calls_late(monkeypatch: pytest.MonkeyPatch):
    """The same, were the way not measured: this is what the first test would not see fail otherwise."""
    counted = attainment("frontier", FULL, 3_000)
    monkeypatch.setattr(Device, "observe_way", lambda self, us: None)
    assert run(world(FULL, h200=3_000), "frontier").total.attainment < counted - 0.05


# ------------------------------------------------------------------------ one device is farther away


def two(**ways_us: int) -> Summary:
    """Two devices under what one could do, and the way to each."""
    return run(on_two(world(20_000, **ways_us)), "frontier")


def shares(summary: Summary) -> tuple[float, float]:
    near, far = (row.utilisation for row in summary.devices)
    return near / (near + far), far / (near + far)


def test_a_device_too_far_away_for_the_slo_gets_nothing_and_no_other_suffers():
    summary = two(h200_1=11_000)
    assert shares(summary)[1] < 0.05
    assert summary.total.attainment > 0.98


def test_a_device_that_is_farther_away_has_less_to_do_and_still_something():
    near, far = shares(two(h200_1=4_000))
    assert 0.02 < far < near


# ------------------------------------------------------------------------ steps

STEPS = """
[[workflow]]
name = "twice"
slo = "24ms"
[[workflow.step]]
name = "first"
function = "resnet"
[[workflow.step]]
name = "second"
function = "resnet"
"""


@pytest.mark.slow
@policies
def test_every_step_of_a_workflow_makes_the_way(policy: str):
    """Two steps, each of which has what one has in the first test; and a deadline that leaves room for both ways."""
    made = scenarios.parse(WORLD.replace('"resnet"\nrate = 27000', '"twice"\nrate = 6000') + STEPS)
    there = replace(made, ways={"h200": WayModel(3_000)})
    assert run(there, policy).total.attainment >= run(made, policy).total.attainment - 0.01


# ------------------------------------------------------------------------ where it is counted

MS = 1_000


def far_away(script: Script, way_us: int, device: DeviceSpec = BIG_GPU) -> Script:
    """A device that far away, as thirty batches have taught, and nothing to do."""
    script.given(a_function(), devices=[device], takes={"f": 10 * MS}, policy=frontier.Policy())
    for number in range(30):
        script.at(number * 100 * MS).arrives(f"c{number}")
        script.at(script.now_us + 10 * MS + way_us).finishes(took_us=10 * MS)
    return script.at(3_000 * MS)


def test_a_slot_begins_when_a_batch_can_be_there(script: Script):
    controller = far_away(script, 3 * MS).controller
    [slot] = free_candidates(controller.view, ConfigTables(), BlockingRule(), controller.state.functions["f"])
    assert slot.at_us - script.now_us == pytest.approx(3 * MS, rel=0.01)


def test_an_idle_device_is_as_far_away_in_the_estimate(script: Script):
    """Its own time is 10 ms: within 12 it cannot be done, and what is offered instead has the way in it."""
    [rejection] = far_away(script, 3 * MS).arrives("late", within_us=12 * MS)
    assert isinstance(rejection, Reject) and rejection.offer_us >= 13 * MS
    script.arrives("in-time", within_us=20 * MS)
    assert len(script.running) == 1


def test_units_that_come_back_sooner_than_the_way_are_taken_by_the_way(script: Script):
    """A batch that ends within the way to the device makes nothing sooner."""
    far_away(script, 3 * MS)
    script.arrives("running", within_us=50 * MS)
    script.at(script.now_us + 12 * MS)
    function = script.controller.state.functions["f"]
    assert estimate_us(script.controller.view, function) >= 13 * MS


def test_over_a_long_way_a_slice_serves_no_more_than_two_batches_in_the_time_of_the_way(script: Script):
    """One runs, one is booked behind it, and the next is sent when the first is known to have ended: a row of short batches takes
    as long as the way lets it."""
    far_away(script, 30 * MS, GPU)
    view, function = script.controller.view, script.controller.state.functions["f"]
    script.arrives(*[f"w{number}" for number in range(12)], within_us=5_000 * MS)
    waits = len(function.queue)
    assert estimate_us(view, function) >= waits * (30 + 10) * MS // 2
