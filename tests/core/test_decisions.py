"""A policy looks and decides; what it decides wrongly is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import pytest

from lamina.core.actions import AddDevice, Load, ReleaseDevice, StartBatch, Unload, WakeAt
from lamina.core.events import CallArrived, CallCancelled, DeviceJoined
from lamina.core.policy import (
    Decision,
    Drop,
    LoadInstance,
    RequestDevice,
    ResizeInstance,
    ReturnDevice,
    Slot,
    Start,
    UnloadInstance,
    View,
)
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.queues import Order
from lamina.errors import PolicyError
from lamina.types import Call, DeviceSpec, SliceLimits
from tests.script import Script, a_function

MS = 1_000
FOUR = DeviceSpec(id="gpu0", kind="gpu", units=4, memory_mib=100, limits=SliceLimits(sizes=(1, 2, 4), aligned=True))
CPU = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=4, memory_mib=100)


@dataclass
class Puppet:
    """Does once what the test says."""

    order: Order = "arrival"
    next: Callable[[View], Iterable[Decision]] | None = None
    did: list[Decision] = field(default_factory=list)

    def dispatch(self, view: View) -> Iterable[Decision]:
        decide, self.next = self.next, None
        for decision in decide(view) if decide else ():
            yield decision
            self.did.append(decision)


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
def stage(script: Script, puppet: Puppet) -> Script:
    """`f` takes two units and batches of two, `g` one unit; both stand, and three jobs of `f` wait."""
    f = a_function("f", share=0.5, max_batch=2, memory_mib=10)
    g = a_function("g", share=0.25, memory_mib=10)
    script.given(f, g, devices=[FOUR], policy=puppet, takes={"f": 5 * MS, "g": 5 * MS})
    script.at(0).arrives("c1", "c2", "c3", within_us=50 * MS)
    return script


def jobs_of(view: View, name: str = "f") -> list[Job]:
    return view.functions[name].queue.jobs()


def opening(view: View, **change: object) -> Slot:
    """The one `f` is offered, with something about it changed."""
    return msgspec.structs.replace(next(iter(view.slots(view.functions["f"]))), **change)


def decides(stage: Script, puppet: Puppet, decide: Callable[[View], Decision]) -> None:
    puppet.next = lambda view: [decide(view)]
    stage.tell(CallArrived(Call("next", "g", stage.now_us)))


WRONG: dict[str, tuple[Callable[[View], Decision], str]] = {
    "no jobs": (lambda v: Start([], opening(v)), "at least one job"),
    "too many jobs": (lambda v: Start(jobs_of(v), opening(v)), "takes 2 jobs at once, not 3"),
    "a job twice": (lambda v: Start([jobs_of(v)[0]] * 2, opening(v)), "each once"),
    "a job of another function": (lambda v: Start(jobs_of(v, "g"), opening(v)), "waiting jobs of one function"),
    "an instance of another function": (
        lambda v: Start(jobs_of(v)[:1], opening(v, instance=v.instances["g-1"])),
        "waiting jobs of one function",
    ),
    "units out of line": (lambda v: Start(jobs_of(v)[:1], opening(v, mask=0b110)), "has no slice 110"),
    "a size that does not exist": (lambda v: Start(jobs_of(v)[:1], opening(v, mask=0b111)), "has no slice 111"),
    "units it does not have": (lambda v: Start(jobs_of(v)[:1], opening(v, mask=1 << 4)), "has no slice 10000"),
    "no units": (lambda v: Start(jobs_of(v)[:1], opening(v, mask=0)), "has no slice 0"),
    "too late for everybody": (
        lambda v: Start(jobs_of(v)[:1], opening(v, at_us=46 * MS)),
        "every job of this batch of f would be too late",
    ),
    "an unknown function": (lambda v: LoadInstance("nobody", "gpu0"), "there is no 'nobody'"),
    "an unknown device": (lambda v: LoadInstance("f", "gpu9"), "there is no 'gpu9'"),
    "a home too large": (lambda v: LoadInstance("f", "gpu0", 5), "has no 5 units"),
    "a home of no size": (lambda v: LoadInstance("f", "gpu0", -1), "has no -1 units"),
    "a home of a size that does not exist": (lambda v: LoadInstance("f", "gpu0", 3), "has no 3 units"),
    "unloading nobody": (lambda v: UnloadInstance("f-9"), "there is no 'f-9'"),
    "resizing nobody": (lambda v: ResizeInstance("f-9", 1), "there is no 'f-9'"),
    "resizing beyond the device": (lambda v: ResizeInstance("f-1", 8), "has no 8 units"),
    "giving back a device in use": (lambda v: ReturnDevice("gpu0"), "is not empty"),
    "giving back nothing": (lambda v: ReturnDevice("gpu9"), "there is no 'gpu9'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_impossible_decision_is_refused_and_changes_nothing(stage: Script, puppet: Puppet, case: str):
    decide, says = WRONG[case]
    state = stage.controller.state
    before = (len(state.batches), len(state.instances), state.devices["gpu0"].busy, dict(state.devices["gpu0"].homes))
    with pytest.raises(PolicyError, match=says):
        decides(stage, puppet, decide)
    state.check()
    assert before == (len(state.batches), len(state.instances), state.devices["gpu0"].busy, state.devices["gpu0"].homes)
    assert len(jobs_of(stage.controller.view)) == 3


def start_f(view: View) -> Decision:
    return Start(jobs_of(view)[:1], opening(view))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"behind": None}, "all the batches it may run at once"),
        ({"mask": 0b1100}, "is not what batch 1 leaves behind"),
    ],
)
def test_a_booking_must_be_behind_a_batch_whose_slice_it_inherits(stage: Script, puppet: Puppet, change, says: str):
    decides(stage, puppet, start_f)
    puppet.next = lambda view: [Start(jobs_of(view)[:1], opening(view, **change))]
    with pytest.raises(PolicyError, match=says):
        stage.arrives("again", target="g")
    stage.controller.state.check()


def test_a_busy_slice_cannot_be_leased(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    g = lambda view: Slot(view.instances["g-1"], view.devices["gpu0"], 0b1, None, view.now_us)  # noqa: E731
    puppet.next = lambda view: [Start(jobs_of(view, "g")[:1], g(view))]
    with pytest.raises(PolicyError, match="gpu0/0 is busy"):
        stage.arrives("again", target="g")


def test_two_batches_cannot_be_booked_behind_one(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    kept: list[Slot] = []

    def book(view: View) -> Iterable[Decision]:
        kept.append(opening(view))
        yield Start(jobs_of(view)[:1], kept[0])

    puppet.next = book
    stage.arrives("c5", target="g")
    puppet.next = lambda view: [Start(jobs_of(view)[:1], kept[0])]
    with pytest.raises(PolicyError, match="nothing can be booked behind batch 1"):
        stage.arrives("c6", target="g")


def test_nothing_can_be_booked_behind_a_booked_batch(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    puppet.next = lambda view: [start_f(view)]
    stage.arrives("c5", target="g")

    def wrong(view: View) -> Iterable[Decision]:
        last = Slot(view.instances["g-1"], view.devices["gpu0"], 0b11, view.batches[2], view.now_us)
        yield Start(jobs_of(view, "g")[:1], last)

    puppet.next = wrong
    with pytest.raises(PolicyError, match="nothing can be booked behind batch 2"):
        stage.arrives("c6", target="g")


def test_a_job_whose_call_has_ended_cannot_be_started(stage: Script, puppet: Puppet):
    jobs = jobs_of(stage.controller.view)
    stage.tell(CallCancelled("c1"))
    with pytest.raises(PolicyError, match="waiting jobs"):
        decides(stage, puppet, lambda view: Start(jobs[:1], opening(view)))


def test_a_job_that_runs_cannot_be_dropped(stage: Script, puppet: Puppet):
    jobs = jobs_of(stage.controller.view)
    decides(stage, puppet, start_f)
    puppet.next = lambda view: [Drop(jobs[0])]
    with pytest.raises(PolicyError, match="does not wait"):
        stage.arrives("c5", target="g")


def test_memory_that_is_not_there_cannot_be_promised(stage: Script, puppet: Puppet):
    puppet.next = lambda view: [LoadInstance("f", "gpu0")] * 20
    with pytest.raises(PolicyError, match="needs 10 MiB; gpu0 has no room"):
        stage.arrives("c5", target="g")
    assert stage.controller.state.devices["gpu0"].memory_used_mib == 100


def test_a_function_cannot_be_loaded_on_a_family_it_is_not_for(stage: Script, puppet: Puppet):
    stage.tell(DeviceJoined(CPU))
    with pytest.raises(PolicyError, match="that is a cpu"):
        decides(stage, puppet, lambda view: LoadInstance("f", "cpu0"))


def test_what_was_decided_before_the_mistake_stands(stage: Script, puppet: Puppet):
    puppet.next = lambda view: [start_f(view), UnloadInstance("nobody")]
    with pytest.raises(PolicyError):
        stage.arrives("c5", target="g")
    kinds = [type(action) for action in stage.controller.take_actions()]
    assert kinds[0] is StartBatch
    assert set(kinds[1:]) <= {WakeAt}


# -------------------------------------------------------------------------------------------- what a policy may decide


def test_a_generator_sees_what_its_last_decision_did(stage: Script, puppet: Puppet):
    seen = []

    def look(view: View) -> Iterable[Decision]:
        seen.append(len(jobs_of(view)))
        yield start_f(view)
        seen.append(len(jobs_of(view)))

    puppet.next = look
    stage.arrives("c5", target="g")
    assert seen == [3, 2]


def test_unloading_a_busy_instance_lets_it_finish_first(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    puppet.next = lambda view: [UnloadInstance("f-1")]
    assert not [action for action in stage.arrives("c5", target="g") if isinstance(action, Unload)]
    assert Unload("f-1") in stage.finishes()


def test_an_instance_that_is_to_go_gets_no_new_work(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    offered = []

    def go(view: View) -> Iterable[Decision]:
        yield UnloadInstance("f-1")
        offered.extend(view.slots(view.functions["f"]))

    puppet.next = go
    stage.arrives("c5", target="g")
    assert offered == []


def test_when_the_last_instance_goes_and_work_waits_another_is_loaded_at_once(stage: Script, puppet: Puppet):
    decides(stage, puppet, start_f)
    puppet.next = lambda view: [UnloadInstance("f-1")]
    stage.arrives("c5", target="g")
    assert [action.function for action in stage.finishes() if isinstance(action, Load)] == ["f"]


def test_an_instance_loaded_with_a_smaller_home_than_its_function_wants_runs_in_that(stage: Script, puppet: Puppet):
    decides(stage, puppet, lambda view: LoadInstance("f", "gpu0", 1))
    stage.ready("f-2")
    masks = []

    def look(view: View) -> Iterable[Decision]:
        masks.extend(found.mask for found in view.slots(view.functions["f"]) if found.instance.id == "f-2")
        return []

    puppet.next = look
    stage.arrives("c5", target="g")
    assert masks == [0b1]


def test_a_device_can_be_asked_for_and_an_empty_one_given_back(stage: Script, puppet: Puppet):
    stage.tell(DeviceJoined(CPU))
    puppet.next = lambda view: [RequestDevice("h200"), ReturnDevice("cpu0")]
    said = stage.arrives("c5", target="g")
    assert said == [AddDevice("h200"), ReleaseDevice("cpu0")]
    assert "cpu0" not in stage.controller.state.devices


def test_a_batch_keeps_the_reason_it_was_started_for(stage: Script, puppet: Puppet):
    decides(stage, puppet, lambda view: Start(jobs_of(view)[:1], opening(view), "because"))
    assert stage.batches[0].why == "because"


def test_an_opening_can_be_asked_for_in_another_size(stage: Script, puppet: Puppet):
    masks = []

    def look(view: View) -> Iterable[Decision]:
        masks.extend(next(iter(view.slots(view.functions["f"], units))).mask for units in (1, 2, 4))
        return []

    puppet.next = look
    stage.arrives("c5", target="g")
    assert masks == [0b1, 0b11, 0b1111]
