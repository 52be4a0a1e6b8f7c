from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lamina.core.actions import AddDevice, JobRef, Reply, ResolveData, StartBatch
from lamina.core.events import BatchFinished, CallArrived, DataResolved, Deployed, DeviceJoined, DeviceLost, Event, InstanceLost
from lamina.core.workflow.flow import Choice, Each, Flow, Task
from lamina.drivers.driver import Ending
from lamina.drivers.virtual import simulate
from lamina.policies import fifo, new_controller
from lamina.predict.device_presets import preset
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import IndependentBatches, SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits

ONE_AT_A_TIME = DeviceSpec(id="d", kind="h200", units=1, memory_mib=1_000, limits=SliceLimits(batches_per_instance=1))


def world(us: float = 1_000, noise: float = 0.0) -> HardwareModel:
    profiles = [Profile(function=name, device="h200", points=[Point(batch=1, units=1, p50_us=us)], load_us=500) for name in "ab"]
    return HardwareModel(ProfileTable(profiles), random.Random(1), noise, load_noise=0.0)


def setup(device: DeviceSpec = ONE_AT_A_TIME) -> list[Event]:
    functions = tuple(FunctionSpec(name=name, gpu="must", scale=ScaleSpec(min=1)) for name in "ab")
    return [DeviceJoined(device), Deployed(functions=functions)]


def calls(*arrivals: tuple[int, str]) -> list[Call]:
    return [Call(f"{target}{at_us}", target, at_us) for at_us, target in arrivals]


def replies(
    arrivals: list[Call], faults: Iterable[tuple[int, Event]] = (), noise: float = 0.0
) -> tuple[dict[str, int], SimulatedExecutor]:
    """When each call was answered."""
    controller = new_controller(fifo.Policy(), ProfileTable(world().table.profiles))
    executor = SimulatedExecutor(controller, world(noise=noise))
    ends: dict[str, int] = {}

    def on_end(now_us: int, ending: Ending) -> None:
        if isinstance(ending, Reply):
            ends[ending.call_id] = now_us

    simulate(controller, executor, arrivals, setup=setup(), faults=faults, on_end=on_end)
    controller.state.check_quiet()
    return ends, executor


def test_a_batch_takes_what_its_profile_says():
    ends, _ = replies(calls((2_000, "a")))
    assert ends == {"a2000": 3_000}


def test_the_first_call_waits_for_the_load():
    ends, executor = replies(calls((100, "a")))
    assert ends == {"a100": 1_500}
    assert executor.accounting.cold_starts == {"a": 1, "b": 1}


def test_a_booked_batch_follows_without_a_gap():
    ends, executor = replies(calls((2_000, "a"), (2_100, "a"), (2_200, "b")))
    assert ends == {"a2000": 3_000, "a2100": 4_000, "b2200": 5_000}
    assert executor.accounting.devices["d"].leased == 3_000


def test_a_batch_booked_behind_one_that_is_lost_begins_at_that_moment():
    faults = [(2_990, InstanceLost("a-1"))]
    ends, _ = replies(calls((2_000, "a"), (2_700, "b")), faults)
    assert ends["b2700"] == 2_990 + 1_000


def test_lost_time_is_not_leased_time():
    faults = [(2_600, InstanceLost("a-1"))]
    ends, executor = replies(calls((2_000, "a")), faults)
    assert ends == {"a2000": 2_600 + 500 + 1_000}  # loaded again, run again
    assert executor.accounting.devices["d"].leased == 600 + 1_000


def test_a_lost_device_takes_its_batches_with_it():
    faults: list[tuple[int, Event]] = [(2_600, DeviceLost("d")), (5_000, DeviceJoined(ONE_AT_A_TIME))]
    ends, executor = replies(calls((2_000, "a")), faults)
    assert ends == {"a2000": 5_000 + 500 + 1_000}
    assert [account.leased for account in executor.accounting.all_devices()] == [600, 1_000]


def test_noise_spreads_as_its_sigma_says():
    noisy = world(us=100_000, noise=0.1)
    times = sorted(noisy.batch_us("a", "h200", 1, 1) for _ in range(4_000))
    assert times[2_000] == pytest.approx(100_000, rel=0.02)
    assert times[3_960] == pytest.approx(100_000 * 2.718 ** (0.1 * 2.326), rel=0.03)


def test_a_profile_that_says_how_far_its_times_spread_is_believed():
    profile = Profile(function="a", device="h200", points=[Point(batch=1, units=1, p50_us=1e5, p99_us=1.5e5)])
    spread = HardwareModel(ProfileTable([profile]), random.Random(2), noise=0.05)
    times = sorted(spread.batch_us("a", "h200", 1, 1) for _ in range(4_000))
    assert times[3_960] == pytest.approx(1.5e5, rel=0.05)


BODY = Flow("items", {"look": Task("look", "b")}, ("look",))
PAGE = Flow(
    "page", {"parts": Each("parts", BODY, expected_items=3.0), "way": Choice("way", ((), ()), odds=(1.0, 2.0))}, ("parts", "way")
)


def asked(seed: int, call: str = "c1", turns: int = 1) -> list[tuple[str, int]]:
    """What a run of `page` is told about its data."""
    controller = new_controller(fifo.Policy(), ProfileTable([]))
    executor = SimulatedExecutor(controller, world(), seed=seed)
    functions = (FunctionSpec(name="b", gpu="must"),)
    controller.handle(0, Deployed(functions=functions, flows=(PAGE,)))
    actions = controller.handle(0, CallArrived(Call(call, "page", 0)))
    answers = []
    for _ in range(turns):
        for action in actions:
            for _, event in executor.perform(0, action) if isinstance(action, ResolveData) else ():
                assert isinstance(event, DataResolved)
                answers.append((event.node, event.value))
    return answers


def test_what_a_call_holds_depends_on_the_call_and_the_seed_alone():
    assert asked(1) == asked(1)
    assert len({tuple(asked(1, f"c{number}")) for number in range(40)}) > 3
    assert [asked(seed) for seed in range(20)] != [asked(0)] * 20


def test_a_question_asked_again_gets_a_fresh_answer():
    answers = asked(1, turns=30)
    assert len({value for node, value in answers if node == "way"}) == 2


def test_items_and_branches_come_as_often_as_the_scenario_says():
    found = [dict(asked(1, f"c{number}")) for number in range(1_500)]
    assert sum(each["parts"] for each in found) / 1_500 == pytest.approx(3.0, abs=0.15)
    assert sum(each["way"] for each in found) / 1_500 == pytest.approx(2 / 3, abs=0.05)


def test_a_question_about_a_run_that_has_ended_is_not_answered():
    executor = SimulatedExecutor(new_controller(fifo.Policy(), ProfileTable([])), world())
    assert list(executor.perform(5, ResolveData("gone", 0, "parts"))) == []


def test_no_more_devices_are_added_than_there_are():
    executor = SimulatedExecutor(
        new_controller(fifo.Policy(), ProfileTable([])),
        world(),
        boot_us=7,
        templates={"h200": preset("h200")},
        spare_devices={"h200": 1},
    )
    first, second = (list(executor.perform(10, AddDevice("h200"))) for _ in range(2))
    assert [(at_us, type(event)) for at_us, event in first] == [(17, DeviceJoined)]
    assert second == []


def test_ends_of_long_gone_batches_are_forgotten():
    executor = SimulatedExecutor(new_controller(fifo.Policy(), ProfileTable([])), world())
    executor.before_event(0, DeviceJoined(ONE_AT_A_TIME))
    for number in range(1, 20_000):
        action = StartBatch(number, "a", "a-1", "d", 1, (JobRef(number, "c", 0, "a"),))
        ((at_us, event),) = executor.perform(number * 2_000, action)
        assert (at_us, event) == (number * 2_000 + 1_000, BatchFinished(number, 1_000))
    assert isinstance(executor._batches, IndependentBatches)
    assert len(executor._batches._ends) < 5_000


def test_a_world_without_noise_loads_in_the_time_of_the_profile():
    profile = Profile(function="f", device="cpu", points=[], load_us=1_000_000)
    assert {HardwareModel(ProfileTable([profile]), random.Random(seed), noise=0.0).load_us("f", "cpu") for seed in range(5)} == {
        1_000_000
    }
