"""Admission control by reservations: promises are kept, other calls are refused at once, with an offer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import policies
from lamina.core.actions import Reject, Reply, StartBatch
from lamina.core.events import CallArrived, CallCancelled
from lamina.core.workflow.flow import Choice, Each, Flow, Task
from lamina.published.admission.placements import WorkflowShape, enumerate_placements
from lamina.published.admission.reservation_table import ReservationTable, ReservedSlot
from lamina.sim.run import run
from lamina.sim.scenario import parse
from lamina.types import Call, DeviceSpec, FunctionSpec, SliceLimits
from tests.script import Script
from tests.sim.conftest import PAGES, SMALL

MS = 1_000
ANY = SliceLimits(batches_per_instance=0)
CPU = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=1_000, price_per_s=0.1, limits=ANY)
GPU = DeviceSpec(id="gpu0", kind="gpu", units=2, memory_mib=1_000, price_per_s=10.0, limits=ANY)
TIMES = {"cpu": (20, 10), "gpu": (8, 2)}
"""Milliseconds of a batch, and more for each job."""


class World(Script):
    """A script whose predictor knows kinds of devices, and whose engine goes by it."""

    def build(self, options: dict[str, Any] | None = None, devices: tuple[DeviceSpec, ...] = (CPU, GPU), **more: Any) -> World:
        names = more.pop("names", ("f",))
        functions = [FunctionSpec(name=name, gpu="may", share=0.5, max_batch=4) for name in names]
        policy = policies.build("admission", options or {})
        self.given(*functions, policy=policy, devices=devices, warm=more.pop("warm", True), engine=True, **more)
        self.predictor.latency_us = self._latency_us  # type: ignore[method-assign]
        policy._placements.invalidate()  # type: ignore[attr-defined]
        self.at(1 * MS)
        self.policy = policy
        return self

    def _latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        fixed, each = TIMES[kind]
        return (fixed + each * batch) * MS

    def _time_us(self, batch: StartBatch) -> int:
        return self._latency_us("", batch.device[:3], len(batch.jobs), 1)

    def call(self, name: str, within_ms: float = 0, cost: float = 0.0, target: str = "f") -> str:
        deadline_us = self.now_us + int(within_ms * MS) if within_ms else 2**62
        self.tell(CallArrived(Call(name, target, self.now_us, deadline_us, deadline_us, cost_limit=cost)))
        self.policy._slots.table.check()  # type: ignore[attr-defined]
        return self.ending(name)

    def wait(self, ms: float) -> World:
        self.at(self.now_us + int(ms * MS))
        return self

    def device_of(self, call: str) -> str:
        return next(batch.device for batch in self.batches if call in {job.call_id for job in batch.jobs})


ALONE_ON_CPU = 0.05 * 0.030
ALONE_ON_GPU = 5.0 * 0.010


@pytest.fixture
def world() -> World:
    return World().build()


# ------------------------------------------------------------------------------------------------- which placement


def test_with_time_the_cheapest_kind_is_taken(world: World):
    world.call("c", within_ms=100)
    assert world.device_of("c") == "cpu0"


def test_without_time_the_fast_kind_is_taken(world: World):
    world.call("c", within_ms=15)
    assert world.device_of("c") == "gpu0"


def test_the_fast_kind_is_not_taken_where_it_costs_too_much(world: World):
    world.call("c", within_ms=15, cost=ALONE_ON_GPU / 2)
    assert isinstance(world.endings["c"], Reject)
    assert world.endings["c"].offer_us == 30 * MS + 1  # within that cost there is the CPU


def test_a_limit_that_both_kinds_keep_to_refuses_no_call(world: World):
    assert world.call("c", within_ms=15, cost=1.01 * ALONE_ON_GPU) == "open"


def test_a_call_that_pays_little_and_has_time_is_served_cheaply(world: World):
    world.call("c", within_ms=100, cost=1.01 * ALONE_ON_CPU)
    world.wait(100)
    assert world.endings["c"].cost <= 1.01 * ALONE_ON_CPU


def test_when_the_cheap_kind_is_full_the_dear_one_is_used(world: World):
    world.policy.batching = False  # type: ignore[attr-defined]
    for number in range(3):
        world.call(f"c{number}", within_ms=35)
    assert [world.device_of(f"c{number}") for number in range(3)] == ["cpu0", "cpu0", "gpu0"]


def test_draws_repeat_with_their_seed():
    def drawn(seed: int) -> list[str]:
        world = World().build({"draws": 1, "seed": seed})
        for number in range(12):
            world.call(f"c{number}", within_ms=500)
        world.wait(2_000)
        return [world.device_of(f"c{number}") for number in range(12)]

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(4)}) > 1


# ---------------------------------------------------------------------------------------------- refusals and offers


def test_the_hopeless_is_refused_at_once_with_an_offer(world: World):
    assert world.call("c", within_ms=5) == "deadline"
    assert world.endings["c"].offer_us == 10 * MS + 1


def test_the_offer_counts_what_is_booked(world: World):
    world.policy.batching = False  # type: ignore[attr-defined]
    for number in range(2):
        world.call(f"c{number}", within_ms=15)
    world.call("late", within_ms=15)
    assert world.endings["late"].offer_us == 20 * MS + 2


def test_the_offer_is_kept(world: World):
    for number in range(6):
        world.call(f"c{number}", within_ms=12)
    refused = [call for call, end in world.endings.items() if isinstance(end, Reject)]
    assert refused
    offer_us = world.endings[refused[-1]].offer_us
    world.call("again", within_ms=offer_us / MS)
    world.wait(500)
    assert world.endings["again"].latency_us <= offer_us


def test_a_call_admitted_first_is_not_delayed_by_those_that_come_after():
    world = World().build(devices=(GPU,))
    world.call("patient", within_ms=40)
    for number in range(10):
        world.call(f"c{number}", within_ms=25)
    world.wait(500)
    assert world.endings["patient"].latency_us <= 40 * MS


# ---------------------------------------------------------------------------------------------------------- batches


def test_a_call_joins_a_batch_that_waits():
    world = World().build(devices=(GPU,))
    for number in range(6):
        world.call(f"c{number}", within_ms=60)
    world.wait(500)
    assert max(world.sizes) > 1
    assert all(isinstance(end, Reply) and not end.late for end in world.endings.values())


def test_batches_are_not_shared_where_that_is_switched_off():
    world = World().build({"batching": False}, devices=(GPU,))
    for number in range(6):
        world.call(f"c{number}", within_ms=60)
    world.wait(500)
    assert set(world.sizes) == {1}


def test_no_call_joins_that_would_make_another_late():
    world = World().build(devices=(GPU,))
    world.call("a", within_ms=30)
    world.call("b", within_ms=30)
    world.call("tight", within_ms=20.1)  # waits for a slice: 10 ms, and 10 ms of its own; nothing to spare
    world.call("joins", within_ms=60)
    world.wait(500)
    assert world.endings["tight"].latency_us <= 20.1 * MS


# --------------------------------------------------------------------------------------------------------- workflows


def cascade(odds: tuple[float, float] = (0.5, 0.5)) -> Flow:
    choice = Choice("sure", (("b",), ()), odds=odds)
    return Flow("cascade", {"a": Task("a", "a", ("sure",)), "sure": choice, "b": Task("b", "b")}, ("a",))


def test_what_a_choice_leaves_out_is_given_back_at_once():
    world = World().build(devices=(GPU,), names=("a", "b"), flows=[cascade()])
    world.answers = {"sure": [1]}
    world.call("c", within_ms=100, target="cascade")
    world.wait(11)
    assert world.ending("c") == "reply"
    world.call("next", within_ms=10.1, target="b")  # somebody is asked, so the table is tidied
    assert sum(1 for _ in world.policy._slots.table) == 1  # type: ignore[attr-defined]


def test_the_dearest_way_is_what_a_limit_is_held_against():
    world = World().build(devices=(GPU,), names=("a", "b"), flows=[cascade()])
    assert world.call("c", within_ms=100, cost=1.5 * ALONE_ON_GPU, target="cascade") == "cost"
    assert world.call("d", within_ms=100, cost=2.1 * ALONE_ON_GPU, target="cascade") == "open"


def test_no_call_waits_for_one_that_has_gone():
    flow = Flow("two", {"x": Task("x", "f", ("y",)), "y": Task("y", "g")}, ("x",))
    world = World().build(devices=(GPU,), names=("f", "g"), flows=(flow,))
    world.call("a", within_ms=1_000, target="two")
    world.call("b", within_ms=1_000, target="two")
    world.wait(5)
    world.call("c", within_ms=800, target="two")  # all three go on together
    world.wait(9)
    world.tell(CallCancelled("b"))
    world.wait(40)
    assert world.ending("a") == world.ending("c") == "reply"


def test_a_step_is_not_put_off_for_ever_because_there_is_time_for_ever():
    flow = Flow("two", {"x": Task("x", "f", ("y",)), "y": Task("y", "g")}, ("x",))
    world = World().build(devices=(GPU,), names=("f", "g"), flows=(flow,))
    usual = world.fate
    world.fate = lambda batch: None if batch.jobs[0].call_id == "hangs" else usual(batch)
    world.call("a", within_ms=10_000_000, target="two")
    world.call("hangs", within_ms=10_000_000, target="two")
    world.wait(3_000)
    assert world.ending("a") == "reply"


def test_more_items_than_expected_are_served_all_the_same():
    body = Flow("items", {"b": Task("b", "b")}, ("b",))
    flow = Flow("map", {"a": Task("a", "a", ("items",)), "items": Each("items", body, expected_items=2.0)}, ("a",))
    world = World().build(names=("a", "b"), flows=[flow])
    world.answers = {"items": [9]}
    world.call("c", within_ms=400, target="map")
    world.wait(900)
    assert world.ending("c") == "reply"


def test_cold_functions_are_loaded_if_there_is_time():
    world = World().build(warm=False, loads={"f": 50 * MS})
    assert world.call("soon", within_ms=40) == "deadline"
    assert world.endings["soon"].offer_us >= 50 * MS
    world.wait(60)
    world.call("later", within_ms=40)
    world.wait(100)
    assert world.ending("later") == "reply"


# ------------------------------------------------------------------------------------------------------- properties


LIMITS = [0.0, 0.0016, 0.0031, 0.04, 0.06, 0.08, 0.101]
steps = st.lists(
    st.tuples(st.integers(0, 30), st.integers(12, 150), st.sampled_from(LIMITS), st.integers(0, 1)), min_size=1, max_size=25
)


@given(steps, st.booleans())
def test_with_exact_times_no_admitted_call_is_late_or_too_dear(calls: list[tuple[int, int, float, int]], chained: bool):
    world = World().build(names=("a", "b"), flows=[cascade()])
    world.answers = {"sure": [way for *_, way in calls]}
    limits = {}
    for number, (gap_ms, within_ms, cost, _) in enumerate(calls):
        world.wait(gap_ms)
        limits[f"c{number}"] = cost
        world.call(f"c{number}", within_ms=within_ms, cost=cost, target="cascade" if chained else "a")
    world.wait(2_000)
    for call, end in world.endings.items():
        assert isinstance(end, Reject | Reply), f"{call} was admitted and dropped"
        if isinstance(end, Reply):
            assert not end.late
            assert not limits[call] or end.cost <= limits[call] * 1.000001


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 100), st.integers(1, 40), st.integers(0, 3), st.booleans()), max_size=30)
)
def test_reservations_never_overlap(wishes: list[tuple[int, int, int, int, bool]]):
    spec = DeviceSpec(id="d", kind="k", units=8, memory_mib=1, cores=4)
    table = ReservationTable()
    booked: list[ReservedSlot] = []
    for units, ready_us, length_us, cores, leave in wishes:
        start_us, mask = table.earliest(spec, units, ready_us, length_us, cores=cores)
        assert start_us >= ready_us
        assert mask.bit_count() == units
        slot = ReservedSlot("f", "d", mask, start_us, start_us + length_us, cores)
        table.add(slot)
        booked.append(slot)
        if leave:
            table.remove(booked.pop(0))
        table.check()
    for at_us in range(200):
        assert sum(slot.cores for slot in table if slot.overlaps(at_us, at_us + 1)) <= spec.cores


def test_a_slot_is_found_no_later_than_the_first_moment_it_fits():
    spec = DeviceSpec(id="d", kind="k", units=4, memory_mib=1)
    table = ReservationTable()
    table.add(ReservedSlot("f", "d", 0b0011, 0, 10))
    table.add(ReservedSlot("f", "d", 0b1100, 5, 20))
    assert table.earliest(spec, 2, 0, 5) == (0, 0b1100)
    assert table.earliest(spec, 2, 0, 6) == (10, 0b0011)
    assert table.earliest(spec, 4, 0, 1) == (20, 0b1111)
    assert table.earliest(spec, 4, 0, 1, by_us=20) == (0, 0)
    assert table.earliest(spec, 2, 10, 5, function="f", lanes=1) == (20, 0b0011)


def test_all_placements_are_kept_and_the_dominated_are_marked():
    flow = Flow("two", {"a": Task("a", "a", ("b",)), "b": Task("b", "b")}, ("a",))
    options = {"a": {"cpu": (30, 1.0), "gpu": (10, 3.0)}, "b": {"cpu": (20, 2.0), "gpu": (25, 5.0)}}
    found = enumerate_placements(WorkflowShape(flow), options)
    assert [(p.latency_us, p.cost, p.dominated) for p in found] == [
        (50, 3.0, False),
        (30, 5.0, False),
        (55, 6.0, True),
        (35, 8.0, True),
    ]


def test_of_too_many_placements_a_path_from_fastest_to_cheapest_is_kept():
    nodes = {f"n{i}": Task(f"n{i}", f"f{i}", (f"n{i + 1}",) if i < 19 else ()) for i in range(20)}
    flow = Flow("long", nodes, ("n0",))
    options = {f"f{i}": {"cpu": (20, 1.0), "gpu": (10, 2.0 + i)} for i in range(20)}
    found = enumerate_placements(WorkflowShape(flow), options, most=1_000)
    assert len(found) == 21
    assert (found[0].cost, found[0].latency_us) == (20.0, 400)
    assert found[-1].latency_us == 200
    assert not any(p.dominated for p in found)


@pytest.mark.parametrize("options", [{}, {"draws": 2, "seed": 1}, {"batching": False}])
def test_every_invariant_holds_under_load(options: dict[str, Any]):
    summary = run(parse(SMALL + PAGES), policy="admission", options=options, calls=300, check=True)
    assert summary.total.in_time > 100
