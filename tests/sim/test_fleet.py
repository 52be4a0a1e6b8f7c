"""A fleet in the simulator, in small: decision times do not explode, and machines that fail lose no call."""

from __future__ import annotations

import pytest
from benchmarks.fleet import Beats, fleet, growth, measure, places

from lamina.core.events import DeviceJoined, DeviceLost, DeviceSuspended, InstanceFound


def test_every_function_has_a_place_and_popular_ones_have_several() -> None:
    scenario = fleet(16, seed=1)
    made = places(scenario)
    by_function = {spec.name: [where for name, where in made if name == spec.name] for spec in scenario.functions}
    assert all(by_function.values())
    assert len(by_function[scenario.functions[0].name]) > 1


def test_a_cut_of_the_network_becomes_silence_loss_and_return() -> None:
    scenario = fleet(16, seed=1)
    beats = Beats(scenario.devices, places(scenario), seed=1)
    node = scenario.devices[0].node
    events = beats.events({node: [(1_000_000, 3_000_000)]}, 5_000_000)
    about = scenario.devices[0].id
    kinds = [
        (type(event), at_us)
        for at_us, event in events
        if (isinstance(event, DeviceSuspended | DeviceLost) and event.device == about)
        or (isinstance(event, DeviceJoined) and event.device.id == about)
    ]
    assert [kind for kind, _ in kinds] == [DeviceSuspended, DeviceLost, DeviceJoined]
    silent_us, lost_us, back_us = (at_us for _, at_us in kinds)
    assert 1_200_000 < silent_us < 1_500_000 and 1_800_000 < lost_us < 2_100_000 and 3_000_000 <= back_us < 3_200_000
    assert any(isinstance(event, InstanceFound) and event.device == about for _, event in events)
    assert not [event for _, event in events if isinstance(event, DeviceLost) and event.device == scenario.devices[-1].id]


def test_equal_seeds_give_equal_failures() -> None:
    scenario = fleet(16, seed=3)

    def drawn() -> object:
        beats = Beats(scenario.devices, places(scenario), seed=3)
        return beats.events(beats.cuts(4, 0, 2_000_000), 4_000_000)

    assert drawn() == drawn()


@pytest.mark.slow
def test_a_small_fleet_is_in_time_with_and_without_failures() -> None:
    calm = measure(16, 0.5, seed=1)
    far = measure(16, 0.5, seed=1, way_ms=3.0)
    cut = measure(16, 0.5, seed=1, cuts=2)
    assert calm["in_time"] > 0.99 and far["in_time"] > calm["in_time"] - 0.01
    assert cut["calls"] == calm["calls"]  # each has ended, whatever became of it


def test_growth_is_the_slope_over_sizes() -> None:
    rows = [
        {"gpus": n, "event_us": n, "event_p99_us": 5.0, "admit_us": n**0.5, "admit_p99_us": 7.0}
        | {"call_us": 2.0 * n, "scale_us": n, "memory_mib": 3.0 * n}
        for n in (10, 100, 1_000)
    ]
    steep = dict.fromkeys(("event_us", "call_us", "scale_us", "memory_mib"), 1.0)
    assert growth(rows) == steep | {"event_p99_us": 0.0, "admit_us": 0.5, "admit_p99_us": 0.0}
