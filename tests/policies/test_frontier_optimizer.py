"""Optimizer of `frontier`, piece by piece: the head of a batch, what it waits for, what a full device changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Queue
from lamina.core.scheduling.state import Batch, ControllerState, FunctionState, Instance
from lamina.core.workflow.flow import Flow, Task
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.blocking import BlockingRule
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.cost_to_go import CostToGo
from lamina.planner.frontier import point
from lamina.policies.frontier.backlog import BacklogModel
from lamina.policies.frontier.batch_planner import NextBatch, cheaper_upcoming_slots, select_batch
from lamina.policies.frontier.candidate_slots import (
    MAX_WAIT_BATCHES,
    CandidateSlot,
    WaitBudget,
    cheapest_slot,
    free_candidates,
    upcoming_candidates,
)
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables, DeviceKinds
from lamina.policies.frontier.optimizer import StepOptimizer, allowed_costs, room_of
from lamina.policies.frontier.workflow_plans import PlanCache, StepPlan
from lamina.types import Call, DeviceSpec, FunctionSpec, SliceLimits, Slo
from tests.script import Known

MS = 1_000
FREE = SliceLimits(batches_per_instance=0)
ALONE = Flow("f", {"f": Task("f", "f")}, ("f",), slo=Slo(latency_us=100 * MS))


def a_device(name: str = "gpu0", units: int = 1, price_per_s: float = 1.0, cores: int = 0) -> Device:
    return Device(DeviceSpec(id=name, kind=name, units=units, memory_mib=100, limits=FREE, price_per_s=price_per_s, cores=cores))


def a_slot(device: Device, table: ConfigTable) -> CandidateSlot:
    instance = Instance("f-1", "f", device.spec.id, InstancePhase.WARM, 0)
    free = device.all_units & ~device.busy
    return CandidateSlot(instance, device, table, free, free.bit_count(), device.cores_free, is_reserved=False, at_us=0)


def a_job(number: int, due_us: int) -> Job:
    run = ActiveCall(Call(f"c{number}", "f", 0, due_us, due_us), ALONE, None)
    return Job(number, run, 0, "f", "f", enqueued_us=0, due_us=due_us, expires_us=due_us)


def a_queue(due_us: list[int]) -> Queue:
    queue = Queue("f", "due")
    for number, due in enumerate(due_us):
        queue.add(a_job(number, due))
    return queue


def a_world(*devices: Device, takes_us: int = 10 * MS, max_batch: int = 1, waiting: int = 0) -> View:
    """`f` stands on all of them."""
    spec = FunctionSpec(name="f", max_batch=max_batch, slo=ALONE.slo)
    function = FunctionState(spec, a_queue([100 * MS] * waiting))
    state = ControllerState({"f": function}, {device.spec.id: device for device in devices})
    for number, device in enumerate(devices):
        instance = Instance(f"f-{number}", "f", device.spec.id, InstancePhase.WARM, 0)
        state.instances[instance.id] = function.instances[instance.id] = instance
        device.instances[instance.id] = "f"
    if waiting:
        state.waiting["f"] = function
    return View(state, Known({"f": takes_us}, {}), {"f": ALONE})


def runs(view: View, instance: str, mask: int, ends_us: int) -> None:
    """A batch of it holds these units until then."""
    owner = view.instances[instance]
    device = view.devices[owner.device]
    device.lease(1, mask, end_us=ends_us)
    batch = Batch(1, owner, device, mask, [a_job(9, ends_us)], predicted_us=ends_us, started_us=0)
    view.batches[1] = owner.batches[1] = batch
    owner.running = 1


# ------------------------------------------------------------------------------------------------------------- batch head


@pytest.mark.parametrize(
    ("urgent_ms", "leader"),
    [
        pytest.param(13, 0, id="three in 13 ms are more than four in 14 less the one passed over"),
        pytest.param(11, 1, id="one in 11 ms is less than that"),
    ],
)
def test_a_hurried_job_is_passed_over_only_if_more_are_served_without_it(urgent_ms: int, leader: int):
    """A batch takes 10 ms and one for each job. Five wait where four fit; all but the first have 14 ms."""
    device = a_device()
    table = ConfigTable(lambda batch, units, cores: (10 + batch) * MS, 4, (1,), (0,), device.spec)
    queue = a_queue([urgent_ms * MS, *[14 * MS] * 4])
    function = FunctionState(FunctionSpec(name="f", max_batch=4), queue)
    assert select_batch(function, 5, 0, [a_slot(device, table)], now_us=0, soonest_us=0)[0].id == leader


@pytest.mark.parametrize(
    ("counts", "leader"),
    [
        pytest.param((6, 8, 20), 14, id="those who leave time for a full batch"),
        pytest.param((6, 20, 10), 6, id="where these are less than half, those who have time at all"),
        pytest.param((40, 0, 0), 0, id="if all have too little time, the first"),
        pytest.param((2, 3, 3), 0, id="in a small crowd, the first"),
    ],
)
def test_jobs_without_room_keep_none_behind_them_from_what_is_free(counts: tuple[int, int, int], leader: int):
    """One takes 20 ms and four take 50. So many have 15 ms, so many 30, and the others 60."""
    device = a_device()
    table = ConfigTable(lambda batch, units, cores: 10 * (1 + batch) * MS, 4, (1,), (0,), device.spec)
    queue = a_queue([due_ms * MS for due_ms, count in zip((15, 30, 60), counts, strict=True) for _ in range(count)])
    function = FunctionState(FunctionSpec(name="f", max_batch=4), queue)
    assert select_batch(function, len(queue), 0, [a_slot(device, table)], now_us=0, soonest_us=0)[0].id == leader


# ------------------------------------------------------------------------------------------------------------- cheaper slots


@pytest.mark.parametrize(("cheaper", "places"), [(0.02, 0), (0.04, 1)])
def test_a_slice_elsewhere_is_waited_for_if_it_saves_more_than_three_percent(cheaper: float, places: int):
    """On the other kind of device a batch ends in a millisecond; there is time for that."""
    here, there = a_device("here"), a_device("there", price_per_s=1 - cheaper)
    view, tables = a_world(here, there), ConfigTables()
    runs(view, "f-1", 0b1, ends_us=1 * MS)
    function = view.functions["f"]
    [slot] = free_candidates(view, tables, BlockingRule(), function)
    config = slot.cheapest_within(1, 100 * MS)
    assert config is not None
    batch = NextBatch(function, [a_job(1, 100 * MS)], in_time=True, has_goal=True, plan=None, fastest_us=0, soonest_us=0)
    found = cheaper_upcoming_slots(view, tables, BlockingRule(), batch, slot, config, spare=0.0, cost_limit=math.inf)
    assert len(found) == places


def test_cores_and_units_of_a_gpu_have_tables_of_their_own_although_their_devices_are_alike():
    """World 1794: cores of a host and a GPU of one kind name, where the table of the one kept the function off the other."""
    limits = {"kind": "k", "units": 8, "memory_mib": 100, "limits": FREE}
    cores, gpu = (Device(DeviceSpec(id=family, family=family, **limits)) for family in ("cpu", "gpu"))  # type: ignore[arg-type]
    view, tables = a_world(cores, gpu), ConfigTables()
    asking = FunctionState(FunctionSpec(name="f", cores=3, concurrency=40, parts=6, share=0.25, gpu="may"), Queue("f", "due"))
    assert tables.table_for(view, asking, cores).unit_counts == (3,)
    assert 2 in tables.table_for(view, asking, gpu).unit_counts


def test_a_function_that_is_deployed_anew_has_tables_of_the_slices_it_asks_for_now():
    """World 11166: it had been light, and was asked for on the cores of before."""
    cores = Device(DeviceSpec(id="cpu", kind="cpu", units=8, memory_mib=100, family="cpu", limits=FREE))
    view, tables = a_world(cores), ConfigTables()
    before = FunctionState(FunctionSpec(name="f", cores=3, concurrency=40, parts=6), Queue("f", "due"))
    assert tables.table_for(view, before, cores).unit_counts == (3,)
    after = FunctionState(FunctionSpec(name="f", cores=2), Queue("f", "due"))
    assert 2 in tables.table_for(view, after, cores).unit_counts


# ---------------------------------------------------------------------------------------------------------------- reserved slices


@pytest.fixture
def lodger() -> View:
    """Four units; the first two are the home of another function, which lends it."""
    device = a_device(units=4)
    view = a_world(device)
    owner = Instance("g-1", "g", "gpu0", InstancePhase.WARM, 0)
    view.instances["g-1"] = owner
    view.functions["g"] = FunctionState(FunctionSpec(name="g"), Queue("g", "due"), {"g-1": owner})
    device.instances["g-1"] = "g"
    device.reserve("g-1", 0b0011, lend=True)
    return view


@pytest.mark.parametrize(("mask", "places"), [(0b0011, 0), (0b0110, 0), (0b1100, 1)])
def test_nothing_is_booked_behind_a_batch_on_a_slice_that_is_lent(lodger: View, mask: int, places: int):
    """It is lent for one batch: then its owner may want it."""
    runs(lodger, "f-0", mask, ends_us=1 * MS)
    assert len(list(upcoming_candidates(lodger, ConfigTables(), BlockingRule(), lodger.functions["f"], 50 * MS))) == places


@pytest.mark.parametrize(("wanted", "units"), [(False, 4), (True, 2)])
def test_a_lent_home_is_room_for_others_until_its_owner_wants_it(lodger: View, wanted: bool, units: int):
    if wanted:
        lodger.functions["g"].queue.add(a_job(1, 100 * MS))
    [slot] = free_candidates(lodger, ConfigTables(), BlockingRule(), lodger.functions["f"])
    assert slot.units == units


# ---------------------------------------------------------------------------------------------------------- full devices


def a_plan(table: ConfigTable, configs: list[BatchConfig], after_ms: int = 0) -> StepPlan:
    """A step that could be run in these ways, and what comes after it takes so long."""
    configs = sorted(configs, key=lambda config: config.time_us)
    arrays = ConfigArrays.from_rows(ProfiledConfig(p.batch, p.cores, p.units, p.time_us, p.cost) for p in configs)
    none = np.zeros(len(configs))
    return StepPlan(
        CostToGo(arrays, point(after_ms * MS, 0.0)), configs, [table], np.zeros(len(configs), np.int64), none, none, {}, {}, {}
    )


def a_table(device: Device, sizes: tuple[int, ...] = (1,)) -> ConfigTable:
    return ConfigTable(lambda batch, units, cores: 10 * MS // units, 4, sizes, (1, 2, 3), device.spec)


def test_a_step_is_given_no_more_cores_than_are_free():
    device = a_device(units=4, cores=4)
    device.lease(1, 0b1, cores=2)
    plan = a_plan(table := a_table(device), [BatchConfig(1.0, 10 * MS, 1, 1, cores) for cores in (1, 2, 3)])
    room = room_of([a_slot(device, table)], table)
    assert allowed_costs([room], 1, plan).tolist() == [1.0, 1.0, math.inf]


@pytest.mark.parametrize(("units", "cores", "busy"), [(0b1, 3, 0.75), (0b111, 1, 0.75), (0b1, 0, 0.25)])
def test_a_device_is_as_full_as_the_scarcer_of_its_units_and_cores(units: int, cores: int, busy: float):
    device = a_device(units=4, cores=4)
    device.lease(1, units, cores)
    table = a_table(device)
    assert room_of([a_slot(device, table)], table).busy == busy


@pytest.mark.parametrize(("busy", "units"), [(0, 1), (0b1100, 2)])
def test_on_a_full_device_a_stay_of_more_than_half_the_goal_is_shortened_at_a_price(busy: int, units: int):
    """10 ms of a goal of 11 ms on one unit, or a tenth dearer on two."""
    device = a_device(units=4)
    times = {1: 10 * MS, 2: int(5.5 * MS)}
    table = ConfigTable(lambda batch, units, cores: times[units], 1, (1, 2), (0,), device.spec)
    if busy:
        device.lease(1, busy)
    found = cheapest_slot([a_slot(device, table)], 1, 11 * MS, slo_us=11 * MS)
    assert found is not None
    assert found[1].units == units


@pytest.mark.parametrize(("busy", "units"), [(0, 1), (0b1110, 2)])
def test_on_a_full_device_more_time_is_kept_for_the_steps_to_come(busy: int, units: int):
    """A hundred milliseconds for a step of 10 on one unit, or 5 on two at twice the price, and 87 after it: there is time for
    the cheap way if nobody has to wait for more than three milliseconds later on."""
    device = a_device(units=5)
    if busy:
        device.lease(1, busy)
    plan = a_plan(
        table := a_table(device, (1, 2)), [BatchConfig(1.0, 10 * MS, 1, 1, 0), BatchConfig(2.0, 5 * MS, 1, 2, 0)], after_ms=87
    )
    slot = replace(a_slot(device, table), units=2)
    decision = StepOptimizer(spare=0.0).for_step(0, [slot], 1, 100 * MS, 100 * MS, None, plan)
    assert decision.config is not None
    assert decision.config.units == units


@pytest.mark.parametrize(("busy", "waits"), [(0, True), (0b1110, False)])
def test_on_a_full_device_less_of_the_goal_is_spent_on_waiting_for_company(busy: int, waits: bool):
    """Two together cost half. The other comes in 60 ms, which leaves a fifth of the goal, but not more than that."""
    device = a_device(units=4)
    if busy:
        device.lease(1, busy)
    plan = a_plan(table := a_table(device), [BatchConfig(2.0, 10 * MS, 1, 1, 0), BatchConfig(1.0, 10 * MS, 2, 1, 0)])
    waiting = WaitBudget(gap_us=60.0 * MS, slo_us=100 * MS, impatience=0.2, since_us=0)
    decision = StepOptimizer(spare=0.0).for_step(0, [a_slot(device, table)], 1, 100 * MS, 100 * MS, waiting, plan)
    assert (decision.until_us > 0) is waits


# ----------------------------------------------------------------------------------------------------- what a call takes


@pytest.mark.parametrize(("goal_ms", "work_ms"), [(26, 3.25), (19, 10)])
def test_where_no_batch_leaves_half_of_the_goal_calls_are_counted_as_if_alone(goal_ms: int, work_ms: float):
    """9 ms and one for each job. With 26 ms four share the 13 that takes them; of 19 not even one job leaves half."""
    device = a_device()
    view = a_world(device, takes_us=(9 * MS, 1 * MS), max_batch=4)
    tables, rates = ConfigTables(), ArrivalRates()
    backlog = BacklogModel(tables, PlanCache(tables, rates), DeviceKinds(tables, rates))
    flow = Flow("f", {"f": Task("f", "f")}, ("f",), slo=Slo(latency_us=goal_ms * MS))
    assert backlog.work_per_call(view, flow) == {"gpu0": pytest.approx(work_ms * MS)}


@pytest.mark.parametrize("first", ["hurried", "patient"])
def test_what_waits_takes_as_long_whichever_workflow_was_looked_at_last(first: str):
    """Both call one function twice. In the one 19 ms leave no time for company, in the other four share 13 ms.
    What waits may have come from either: the mean of their goals counts."""
    view = a_world(a_device(), takes_us=(9 * MS, 1 * MS), max_batch=4, waiting=12)
    twice = {"a": Task("a", "f", ("b",)), "b": Task("b", "f")}
    goals_ms = {"hurried": 19, "patient": 200}
    flows = [Flow(name, twice, ("a",), slo=Slo(latency_us=ms * MS)) for name, ms in goals_ms.items()]
    tables, rates = ConfigTables(), ArrivalRates()
    backlog = BacklogModel(tables, PlanCache(tables, rates), DeviceKinds(tables, rates))
    for flow in flows if first == "hurried" else reversed(flows):
        backlog.work_per_call(view, flow)
    assert backlog.snapshot(view, 300 * MS, with_expected=False).own_us["f"] == pytest.approx(12 / 4 * 13 * MS)


# ------------------------------------------------------------------------------------------------------------ wait budget


def test_a_generous_goal_is_no_leave_to_wait_longer_than_a_few_batches_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=100, time_us=2 * MS) == MAX_WAIT_BATCHES * 2 * MS


def test_further_jobs_are_waited_for_three_times_as_long_as_it_should_take():
    waiting = WaitBudget(gap_us=1.0 * MS, slo_us=10_000 * MS, impatience=0.2, since_us=0)
    assert waiting.until_us(now_us=0, latest_us=9_000 * MS, missing=2, time_us=50 * MS) == 6 * MS + 50
