"""Batches that give way, in the simulator: paused between two segments for what comes to units of their slice."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.core.actions import Action, StartBatch
from lamina.core.events import BatchFinished, CallArrived, DeviceLost, Event, InstanceLost
from lamina.planner.interference import ColocatedBatch
from lamina.sim.colocation import BatchWork, ColocatedBatches, CompletedWork
from lamina.sim.hardware_model import SEGMENTS_COST
from lamina.sim.run import run
from lamina.sim.scenario import parse, read
from lamina.sim.scenario_writer import to_toml
from lamina.sim.workload import steps
from lamina.types import NEVER_US
from tests.properties import examples

BESIDE = Path(__file__).parents[2] / "scenarios" / "beside.toml"
SEGMENT_US = 100


def work(
    batch_id: int, work_us: int, *overlaps: int, segment_us: int = 0, ready_us: int = 0, behind: int = 0, transfer_us: int = 0
) -> BatchWork:
    alone = ColocatedBatch(f"f{batch_id}", 1, 0.5)
    return BatchWork(batch_id, alone, ready_us, behind, transfer_us, work_us, segment_us, overlaps)


def played(*coming: tuple[int, BatchWork]) -> dict[int, CompletedWork]:
    device = ColocatedBatches(None, "d")
    for at_us, entry in coming:
        device.add(at_us, entry)
    while device.next_us < NEVER_US:
        device.advance(device.next_us)
    return {ended.batch_id: ended for ended in device.take_finished()}


LONG = work(1, 1_000, segment_us=SEGMENT_US)


def test_a_batch_is_paused_at_the_end_of_a_segment_and_goes_on_where_it_was():
    found = played((0, LONG), (250, work(2, 50, 1)))
    assert found[2] == CompletedWork(2, 300, 350, 50)
    assert found[1] == CompletedWork(1, 0, 1_050, 1_000, ((0, 300), (350, 1_050)))


def test_it_is_not_paused_before_what_comes_has_got_here():
    found = played((0, LONG), (110, work(2, 50, 1, ready_us=250)))
    assert found[1].spans == ((0, 300), (350, 1_050))


def test_it_goes_on_when_the_last_of_them_has_ended():
    found = played((0, LONG), (250, work(2, 50, 1)), (320, work(3, 100, 1)))
    assert found[3].start_us == 320, "it is paused already"
    assert found[1].spans == ((0, 300), (420, 1_120))


def test_what_is_booked_behind_one_of_them_keeps_it_waiting_too():
    found = played((0, LONG), (250, work(2, 50, 1)), (310, work(3, 40, 1, behind=2)))
    assert (found[3].start_us, found[3].end_us) == (350, 390)
    assert found[1].spans == ((0, 300), (390, 1_090))


def test_it_begins_when_what_was_there_before_has_ended():
    found = played((0, work(2, 300)), (10, work(3, 500)), (20, replace_overlaps(LONG, 2, 3)))
    assert found[1] == CompletedWork(1, 510, 1_510, 1_000)


def replace_overlaps(entry: BatchWork, *overlaps: int) -> BatchWork:
    return entry._replace(overlaps=overlaps)


def test_what_would_have_ended_before_the_end_of_its_segment_is_not_paused():
    found = played((0, LONG), (950, work(2, 50, 1)))
    assert (found[1].end_us, found[1].spans, found[2].start_us) == (1_000, (), 1_000)


def test_while_its_inputs_come_it_holds_nothing_up():
    found = played((0, LONG._replace(transfer_us=400)), (250, work(2, 300, 1)))
    assert (found[2].start_us, found[1].spans) == (250, ((0, 400), (550, 1_550)))


def test_it_goes_on_when_what_preempted_it_is_lost_and_is_paid_for_what_it_had_when_it_is_lost_itself():
    device = ColocatedBatches(None, "d")
    device.add(0, LONG)
    device.add(250, work(2, 500, 1))
    assert device.remove(400, 2) == ((300, 400),)
    device.add(450, work(3, 500, 1))
    assert device.remove(700, 1) == ((0, 300), (400, 500))
    device.advance(2_000)
    assert [ended.batch_id for ended in device.take_finished()] == [3] and device.next_us == NEVER_US


def test_what_is_lost_before_the_end_of_the_segment_has_not_paused_it():
    device = ColocatedBatches(None, "d")
    device.add(0, LONG)
    device.add(250, work(2, 500, 1))
    assert device.remove(260, 2) == ()
    device.advance(1_000)
    assert device.take_finished() == [CompletedWork(1, 0, 1_000, 1_000)]


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 400), st.integers(0, 40), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_all_work_is_done_once_beside_no_other_and_waits_for_a_segment_at_most(
    plan: list[tuple[int, int, int, bool, bool]],
):
    """Gap to the one before, work, time until it is there, whether it gives way, and whether it is lost."""
    device, at_us = ColocatedBatches(None, "d"), 0
    entries: dict[int, BatchWork] = {}
    came_us: dict[int, int] = {}
    ended: dict[int, CompletedWork] = {}
    had: dict[int, tuple[tuple[int, int], ...]] = {}
    giving = 0  # one at a time may give way on the same units, and one at a time not
    urgent = 0
    for number, (gap_us, work_us, ready_us, gives_way, is_lost) in enumerate(plan, start=1):
        at_us += gap_us
        device.advance(at_us)
        ended |= {one.batch_id: one for one in device.take_finished()}
        mine, other = (giving, urgent) if gives_way else (urgent, giving)
        if mine and mine not in ended and mine not in had:
            if is_lost:
                had[mine] = device.remove(at_us, mine)
            continue
        overlaps = (other,) if other and other not in ended and other not in had else ()
        entries[number] = work(number, work_us, *overlaps, segment_us=SEGMENT_US * gives_way, ready_us=at_us + ready_us)
        came_us[number] = at_us + ready_us
        giving, urgent = (number, urgent) if gives_way else (giving, number)
        device.add(at_us, entries[number])
    while device.next_us < NEVER_US:
        device.advance(device.next_us)
    ended |= {one.batch_id: one for one in device.take_finished()}
    assert ended.keys() | had.keys() == entries.keys()
    spans = had | {number: one.spans or ((one.start_us, one.end_us),) for number, one in ended.items()}
    for number, one in ended.items():
        assert one.device_us == entries[number].work_us == sum(end_us - start_us for start_us, end_us in spans[number])
        if not entries[number].segment_us:
            assert one.start_us <= came_us[number] + SEGMENT_US
    held = sorted(span for those in spans.values() for span in those)
    assert all(before[1] <= after[0] for before, after in pairwise(held)), "two have the units at once"


# ------------------------------------------------------------------------------ scenarios


def at_rate(rate_per_s: float, *, segments: bool = True):
    scenario = read(BESIDE)
    loads = tuple(
        replace(load, segments=steps([(NEVER_US, rate_per_s)])) if load.target == "resnet50" else load for load in scenario.loads
    )
    return replace(scenario, loads=loads, duration_us=12_000_000, segments_us=scenario.segments_us if segments else {})


@pytest.mark.parametrize("policy", ["frontier", "edf"])
@pytest.mark.parametrize("rate_per_s", [200, 600])
def test_an_interactive_model_is_in_time_beside_long_work_on_the_whole_device(policy: str, rate_per_s: int):
    """The goals of the row on a device, simulated: 99 % in 25 ms, and 80 % of the time that is left for the long work."""
    busy_us, running, alone_per_s = 0, dict[int, int](), 1e6 / (200_000 * SEGMENTS_COST)

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        nonlocal busy_us
        for action in actions:
            if isinstance(action, StartBatch) and action.function == "resnet50":
                running[action.batch_id] = 1
        if running.pop(getattr(event, "batch_id", 0), 0):
            busy_us += event.device_us  # type: ignore[union-attr]

    rows = {row.target: row for row in run(at_rate(rate_per_s), policy, watch=watch, check=True).targets}
    assert rows["resnet50"].attainment >= 0.99
    left = 1 - busy_us / 7_000_000
    assert rows["long_work"].goodput_per_s >= 0.8 * left * alone_per_s


def test_without_segments_the_policy_that_gives_what_is_asked_for_loses_a_part_of_the_interactive_calls():
    rows = {row.target: row for row in run(at_rate(200, segments=False), "edf").targets}
    assert rows["resnet50"].attainment < 0.9


def test_a_run_is_repeated_to_the_byte():
    assert run(at_rate(200)) == run(at_rate(200))


@pytest.mark.parametrize("policy", ["fifo", "edf", "frontier", "kaas_srtf", "has"])
def test_instances_and_devices_that_are_lost_in_the_middle_leave_nothing_behind(policy: str):
    for seed in range(4):
        rng = random.Random(seed)
        scenario = replace(at_rate(200), seed=seed, duration_us=8_000_000)
        extra = replace(scenario.devices[0], id="h200-spare")
        names = ("long_work-1", "resnet50-1", "long_work-2", "resnet50-2")
        faults: list[tuple[int, Event]] = [(rng.randrange(5_000_000, 7_500_000), InstanceLost(name)) for name in names]
        faults.append((rng.randrange(5_000_000, 7_500_000), DeviceLost("h200-0")))
        run(replace(scenario, devices=(*scenario.devices, extra)), policy, faults=faults, check=True)


def test_segments_survive_the_way_to_a_file_and_back():
    assert parse(to_toml(read(BESIDE))).segments_us == {"long_work": 1_000}


# ------------------------------------------------------------------------------ with an SLO


LONG_WITH_SLO = """
[scenario]
name = "patient"
seed = {seed}
duration = "6s"
[[device]]
kind = "k"
units = 8
memory = "16GiB"
way = "0.3ms"
[[function]]
name = "urgent"
max_batch = 4
share = 1
slo = "40ms"
scale = {{ min = 1, max = 1 }}
[function.profile.k]
batch = [1, 4]
p50_ms.8 = [6, 11]
[[function]]
name = "long"
share = 1
slo = "{slo_ms}ms"
scale = {{ min = 1, max = 1 }}
{segment}
[function.profile.k]
batch = [1]
p50_ms.8 = [100]
[[load]]
target = "urgent"
rate = {rate}
start = "1s"
[[load]]
target = "long"
shape = "closed"
clients = 1
start = "1s"
"""


def patient_world(seed: int, slo_ms: int, rate: int, *, segments: bool = True):
    segment = 'segment = "1ms"' if segments else ""
    return parse(LONG_WITH_SLO.format(seed=seed, slo_ms=slo_ms, rate=rate, segment=segment))


@pytest.mark.parametrize("policy", ["frontier", "edf"])
def test_long_work_with_an_slo_gives_way_too(policy: str):
    beside, before = (
        {row.target: row for row in run(patient_world(1, 2_000, 40, segments=cut), policy, check=True).targets}
        for cut in (True, False)
    )
    assert beside["urgent"].attainment >= 0.97 and beside["urgent"].attainment > before["urgent"].attainment
    assert beside["long"].attainment == 1.0 and beside["long"].answered >= 30 > before["long"].answered


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["frontier", "edf"])
@pytest.mark.parametrize("rate", [20, 90, 160, 400])
@pytest.mark.parametrize("slo_ms", [210, 260, 400, 1_000])
def test_however_much_urgent_work_comes_a_batch_that_has_begun_keeps_its_promise(policy: str, rate: int, slo_ms: int):
    """One caller at a time, so nothing waits behind it: what begins in segments ends in time."""
    due_us, arrived_us, late = dict[int, int](), dict[str, int](), list[int]()
    world = patient_world(slo_ms + rate, slo_ms, rate)

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, CallArrived):
            arrived_us[event.call.id] = now_us
        if isinstance(event, BatchFinished) and now_us > due_us.pop(event.batch_id, now_us):
            late.append(event.batch_id)
        for action in actions:
            if isinstance(action, StartBatch) and action.gives_way:
                due_us[action.batch_id] = arrived_us[action.jobs[0].call_id] + slo_ms * 1_000

    run(world, policy, watch=watch, check=True)
    assert late == []
