"""Reserved slices (homes): a guarantee for their owner, lent for one batch at a time where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lamina.core.actions import Load, Resize
from lamina.core.events import CallCancelled, Deployed
from lamina.core.policy import Decision, Defer, LoadInstance, ResizeInstance, View
from lamina.core.workflow.flow import Flow, Task
from lamina.errors import PolicyError
from lamina.policies import fifo
from lamina.types import DeviceSpec, ScaleSpec, SliceLimits
from tests.script import Script, a_function

MS = 1_000
FOUR = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=1_000)
MANY = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
FIXED = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=1_000, limits=SliceLimits(sizes=(1, 2, 4), per_batch=False))
TAKES = {"f": 5 * MS, "g": 5 * MS}


def test_a_function_with_a_home_is_loaded_with_its_standing_slice(script: Script):
    script.given(a_function(share=0.5, home=True), devices=[FOUR])
    [(_, load)] = script.all(Load)
    assert load.mask == 0b11


def test_its_batches_run_at_home(script: Script):
    script.given(a_function("f", share=0.5, home=True), a_function("g", share=0.5), devices=[FOUR], takes=TAKES)
    script.arrives("cg", target="g")
    script.arrives("cf", target="f")
    assert {batch.function: batch.mask for batch in script.batches} == {"g": 0b11, "f": 0b1100}


def test_a_home_that_is_not_lent_is_left_alone(script: Script):
    script.given(a_function("f", share=0.5, home=True, lend=False), a_function("g", share=0.5), devices=[MANY], takes=TAKES)
    script.arrives("g1", "g2", target="g")
    assert [batch.mask for batch in script.running] == [0b1100]


def test_an_idle_home_is_lent(script: Script):
    script.given(a_function("f", share=0.5, home=True), a_function("g", share=0.5), devices=[MANY], takes=TAKES)
    script.arrives("g1", "g2", target="g")
    assert [batch.mask for batch in script.running] == [0b11, 0b1100]


def test_a_borrower_does_not_book_the_home_for_its_next_batch(script: Script):
    """The guest has two units of its own and borrows two; its third batch may only follow on its own."""
    script.given(a_function("f", share=0.5, home=True), a_function("g", share=0.5), devices=[MANY], takes=TAKES)
    script.arrives("g1", "g2", "g3", "g4", target="g")
    [booked] = [batch for batch in script.batches if batch.behind]
    assert booked.mask == 0b1100


def test_the_owner_waits_for_one_borrowed_batch_at_most(script: Script):
    script.given(a_function("f", share=0.5, home=True), a_function("g", share=0.5), devices=[MANY], takes=TAKES, engine=True)
    script.at(0).arrives(*[f"g{i}" for i in range(40)], target="g")
    for i in range(8):
        script.at(7 * MS + 11 * MS * i).arrives(f"f{i}", target="f")
    script.at(1_000 * MS)
    assert max(script.endings[f"f{i}"].latency_us for i in range(8)) <= 2 * 5 * MS


def test_an_owner_that_waits_for_its_home_gets_it_before_a_borrower(script: Script):
    script.given(a_function("g", share=1.0), a_function("f", share=1.0, home=True), devices=[FOUR], takes=TAKES)
    script.at(0).arrives("g1", "g2", target="g")
    script.at(1 * MS).arrives("f1", target="f")
    script.at(5 * MS).finishes()
    assert [batch.function for batch in script.running] == ["f"]


class Shy(fifo.Policy):
    """Never gets round to serving `f`."""

    def dispatch(self, view: View) -> Iterator[Decision]:
        if "f" in view.waiting:
            yield Defer("f", view.now_us + 1_000 * MS, 1_000)
        yield from super().dispatch(view)


def test_a_home_its_owner_may_want_any_moment_is_not_lent(script: Script):
    script.given(a_function("f", home=True), a_function("g"), devices=[FOUR], policy=Shy(), takes=TAKES)
    script.arrives("f1", target="f")
    assert script.arrives("g1", target="g") == []


def test_a_home_whose_owner_has_given_up_waiting_is_lent_at_once(script: Script):
    script.given(a_function("f", home=True), a_function("g"), devices=[FOUR], policy=Shy(), takes=TAKES)
    script.arrives("f1", target="f")
    script.arrives("g1", target="g")
    script.tell(CallCancelled("f1"))
    assert [batch.function for batch in script.running] == ["g"]


def test_homes_of_two_functions_do_not_overlap(script: Script):
    script.given(a_function("f", share=0.5, home=True), a_function("g", share=0.5, home=True), devices=[FOUR])
    assert [load.mask for _, load in script.all(Load)] == [0b11, 0b1100]


def test_a_function_without_room_for_its_home_waits_instead_of_breaking_the_loop(script: Script):
    script.given(a_function("f", share=0.75, home=True), a_function("g", share=0.5, home=True), devices=[FOUR])
    assert [load.function for _, load in script.all(Load)] == ["f"]
    script.arrives("cg", target="g", within_us=10 * MS)
    script.at(1_000 * MS)
    assert script.ending("cg") == "deadline"


def test_a_device_that_cannot_lease_per_batch_runs_each_batch_in_a_standing_slice(script: Script):
    script.given(a_function("f", share=0.5), a_function("g", share=0.5), devices=[FIXED], takes=TAKES)
    assert [load.mask for _, load in script.all(Load)] == [0b11, 0b1100]
    script.arrives("f1", "f2", target="f")
    assert [(batch.mask, batch.behind) for batch in script.batches] == [(0b11, 0), (0b11, 1)]


@dataclass(frozen=True)
class Resizing(fifo.Policy):
    """Gives `f` a reserved slice of this size as soon as a job waits."""

    units: int = 0

    def dispatch(self, view: View) -> Iterator[Decision]:
        if "f-1" in view.instances:
            yield ResizeInstance("f-1", self.units)
        yield from super().dispatch(view)


def kept_out(script: Script) -> Script:
    """`f` has taken the whole device for itself; a call of `g`, which is loaded there too, waits."""
    f = a_function("f", share=0.5, home=True, lend=False)
    script.given(f, a_function("g", share=0.5), devices=[FOUR], policy=Resizing(units=4), takes=TAKES)
    script.arrives("f1", target="f")
    script.arrives("g1", target="g")
    script.finishes()
    assert script.running == []
    return script


def test_a_function_kept_out_by_a_home_starts_when_its_owner_is_lost(script: Script):
    kept_out(script).loses("f-1")
    assert [batch.function for batch in script.running] == ["g"]


def test_a_function_kept_out_by_a_home_starts_when_it_is_lent(script: Script):
    kept_out(script).tell(Deployed((a_function("f", share=0.5, home=True, lend=True),)))
    assert [batch.function for batch in script.running] == ["g"]


def test_a_function_kept_out_by_a_home_starts_when_it_shrinks(script: Script):
    kept_out(script)
    script.controller.policy = Resizing(units=1)
    script.arrives("f2", target="f")
    assert {batch.function for batch in script.running} == {"f", "g"}


@pytest.mark.parametrize(("units", "mask"), [(1, 0b1), (3, 0b111), (4, 0b1111)])
def test_a_resized_instance_runs_its_next_batch_on_its_new_slice(script: Script, units: int, mask: int):
    script.given(a_function(share=0.5, home=True), devices=[FOUR], policy=Resizing(units=units), takes=TAKES)
    said = script.arrives("c1")
    assert Resize("f-1", mask) in said
    assert script.running[0].mask == mask


def test_resizing_to_the_size_it_has_says_nothing(script: Script):
    script.given(a_function(share=0.5, home=True), devices=[FOUR], policy=Resizing(units=2), takes=TAKES)
    script.arrives("c1")
    assert script.all(Resize) == []


def test_resizing_to_nothing_gives_the_home_up(script: Script):
    script.given(a_function(share=0.5, home=True), devices=[FOUR], policy=Resizing(units=0), takes=TAKES)
    said = script.arrives("c1")
    assert Resize("f-1", 0) in said
    assert script.running[0].mask == 0b11


# ------------------------------------------------------------------ part of the time


@dataclass(frozen=True)
class Shared(fifo.Policy):
    """`f` on two units for part of the time, and `g` beside it on the same two."""

    quotas: tuple[float, float] = (0.5, 0.5)
    period_us: int = 1_000_000

    def scale(self, view: View) -> Iterator[Decision]:
        if not view.instances and "g" in view.functions:
            yield LoadInstance("f", "gpu0", 2, self.quotas[0])
            yield LoadInstance("g", "gpu0", 2, self.quotas[1], beside="f-1")


def sharing(script: Script, quotas: tuple[float, float] = (0.5, 0.5)) -> Script:
    functions = [a_function("f", share=0.5), a_function("g", share=0.5)]
    return script.given(*functions, devices=[MANY], takes=TAKES, policy=Shared(quotas=quotas), engine=True)


def test_two_instances_share_one_standing_slice_in_turns(script: Script):
    sharing(script).at(0).arrives("cf", target="f")
    script.arrives("cg", target="g")
    assert {batch.mask for batch in script.batches} == {0b11}
    assert len(script.running) == 1


def test_no_more_than_all_of_the_time_can_be_given_away(script: Script):
    with pytest.raises(PolicyError, match="more than there is left"):
        sharing(script, (0.7, 0.4))


def test_an_instance_with_part_of_the_time_gets_that_part_in_the_long_run(script: Script):
    sharing(script, (0.3, 0.7)).at(0)
    for number in range(200):
        script.at(number * 10 * MS).arrives(f"c{number}", target="f")
    script.at(2_000 * MS)
    busy_us = sum(5 * MS for batch in script.batches if batch.function == "f")
    assert busy_us == pytest.approx(0.3 * 2_000 * MS, rel=0.05)


def test_giving_an_instance_more_of_the_time_leaves_its_slice_where_it_is(script: Script):
    sharing(script, (0.3, 0.5))
    script.controller._cluster.resize_instance(ResizeInstance("f-1", 2, 0.5))  # what a scale role would decide
    assert script.controller.take_actions()[0] == Resize("f-1", 0b11, 0.5)


# --------------------------------------------------------------------- cores of the host


def test_a_batch_holds_cores_of_the_host_until_it_ends(script: Script):
    host = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=1_000, cores=3, limits=SliceLimits(batches_per_instance=0))
    script.given(a_function("f", share=0.25, cores=2), devices=[host], takes=TAKES, engine=True)
    script.at(0).arrives("c1", "c2", target="f")
    assert [batch.cores for batch in script.running] == [2]  # units enough for four, cores for one
    script.at(20 * MS)
    assert script.controller.state.devices["gpu0"].cores_free == 3


def test_the_input_of_a_step_is_fetched_from_the_node_of_the_step_before(script: Script):
    near = DeviceSpec(id="near", kind="gpu", units=1, memory_mib=1_000, link_mib_per_s=100, link_latency_us=500)
    far = DeviceSpec(id="far", kind="gpu", units=1, memory_mib=100, link_mib_per_s=100, link_latency_us=500)
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    big = a_function("f", memory_mib=900)
    small = a_function("g", memory_mib=100, input_kib=1024)
    script.given(big, small, flows=[flow], devices=[near, far], takes=TAKES, engine=True)
    script.at(0).arrives("c", target="w")
    script.at(50 * MS)
    moved = [(batch.device, batch.transfer_us, batch.predicted_us) for batch in script.batches]
    assert moved == [("near", 0, 5 * MS), ("far", 10_500, 15_500)]


def test_as_many_homes_stand_on_a_gpu_as_must_though_one_instance_could_fill_it(script: Script):
    script.given(a_function(share=0.5, home=True, scale=ScaleSpec(min=2)), devices=[MANY])
    assert [load.mask for _, load in script.all(Load)] == [0b11, 0b1100]
