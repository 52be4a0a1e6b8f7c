"""Batches that give way: those that run in segments, of functions without an SLO, or with one as long as they can wait. Their
units are free for all others."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from lamina import policies
from lamina.core.actions import Kill, Reject, StartBatch
from lamina.core.events import BatchFinished, BatchPaused, Deployed, InstanceLost, InstanceSegmented
from lamina.core.invariants import check_device
from lamina.core.scheduling.leases import Device
from lamina.gateway.routes.status import device_status
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo
from tests.script import Script, Takes

MS = 1_000
GPU = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
LONG = FunctionSpec(name="long", gpu="must", share=1.0, scale=ScaleSpec(min=1, max=1))
QUICK = FunctionSpec(name="quick", gpu="must", share=1 / 4, slo=Slo(latency_us=25 * MS), scale=ScaleSpec(min=1, max=1))
POLICIES = ("fifo", "edf", "frontier")


def only(actions: list[object]) -> StartBatch:
    (found,) = [action for action in actions if isinstance(action, StartBatch)]
    return found


@pytest.fixture(params=POLICIES)
def script(request: pytest.FixtureRequest) -> Script:
    made = Script()
    takes = {"long": 200 * MS, "quick": 2 * MS}
    made.given(LONG, QUICK, devices=[GPU], takes=takes, policy=policies.build(request.param))
    return made


def learnt(script: Script) -> None:
    """Its graphs have been cut."""
    (instance,) = script.controller.state.functions["long"].instances
    script.at(100 * MS).tell(InstanceSegmented(instance, 900))


def test_an_urgent_batch_starts_at_once_on_units_of_one_that_gives_way(script: Script) -> None:
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long"))
    quick = only(script.at(310 * MS).arrives("b", target="quick"))
    assert long.gives_way and not long.overlaps
    assert not quick.gives_way and quick.overlaps == (long.batch_id,) and quick.mask & long.mask


def test_one_that_gives_way_starts_behind_what_runs_on_its_units(script: Script) -> None:
    learnt(script)
    quick = only(script.at(300 * MS).arrives("b", target="quick"))
    long = only(script.at(300 * MS + 100).arrives("a", target="long"))
    assert long.gives_way and long.overlaps == (quick.batch_id,)


def test_of_two_that_give_way_the_second_waits(script: Script) -> None:
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long"))
    assert not [one for one in script.at(301 * MS).arrives("c", target="long") if isinstance(one, StartBatch)]
    assert only(script.at(700 * MS).tell(BatchFinished(long.batch_id, 200 * MS))).gives_way


def test_pauses_are_no_part_of_the_way_to_a_device(script: Script) -> None:
    learnt(script)
    device = script.controller.state.devices["gpu0"]
    way_us = device.way_us
    long = only(script.at(300 * MS).arrives("a", target="long"))
    script.at(900 * MS).tell(BatchFinished(long.batch_id, 200 * MS))
    assert device.way_us == way_us and not device.yielding


def test_a_batch_that_is_paused_does_not_hang(script: Script) -> None:
    """Others may have its units for longer than any batch of its own takes: it was killed, and its executor with it."""
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long"))
    for number in range(1_000):
        quick = only(script.at((318 + 13 * number) * MS).arrives(f"b{number}", target="quick"))
        script.at((330 + 13 * number) * MS).tell(BatchFinished(quick.batch_id, 2 * MS))
    assert not script.all(Kill)
    (batch,) = script.controller.state.batches.values()
    assert (batch.id, batch.pauses.us, batch.pauses.resumes_us) == (long.batch_id, 1_000 * 12 * MS, -1)
    script.at(60_000 * MS)
    assert [kill for _, kill in script.all(Kill)] == [Kill(long.instance, "hung")], "nobody pauses it any more"


def test_the_end_of_a_batch_that_gives_way_is_expected_after_all_that_has_its_units(script: Script) -> None:
    learnt(script)
    first = only(script.at(300 * MS).arrives("b", target="quick"))
    long = only(script.arrives("a", target="long"))
    batch = script.controller.state.batches[long.batch_id]
    assert batch.expected_end_us == 502 * MS, "after what is there"
    script.at(301 * MS).tell(BatchFinished(first.batch_id, 1 * MS))
    assert (batch.expected_end_us, batch.pauses.resumes_us) == (501 * MS, -1)
    second = only(script.at(400 * MS).arrives("c", target="quick"))
    assert (batch.expected_end_us, batch.pauses.resumes_us) == (503 * MS, 402 * MS)
    script.at(405 * MS).tell(BatchFinished(second.batch_id, 2 * MS))
    assert (batch.expected_end_us, batch.pauses.resumes_us) == (506 * MS, -1), "it was slow"


PATIENT = FunctionSpec(name="long", gpu="must", share=1.0, slo=Slo(latency_us=5_000 * MS), scale=ScaleSpec(min=1, max=1))
NEIGHBOUR = FunctionSpec(name="next", gpu="must", share=1.0, slo=Slo(latency_us=900 * MS), scale=ScaleSpec(min=1, max=1))
EACH: dict[str, Takes] = {"long": lambda _, units: whole(200, units), "next": lambda _, units: whole(150, units), "quick": 2 * MS}


def whole(ms: int, units: int) -> int:
    """Of no use on less than all units."""
    return ms * MS if units == GPU.units else 40 * ms * MS // units


@pytest.fixture(params=("edf", "frontier"))
def promising(request: pytest.FixtureRequest) -> Script:
    """Policies that see to it that a batch which gives way is in time."""
    script = Script()
    script.given(PATIENT, QUICK, NEIGHBOUR, devices=[GPU], takes=dict(EACH), policy=policies.build(request.param))
    learnt(script)
    return script


def test_a_policy_that_does_not_see_to_their_promises_has_no_batches_with_an_slo_give_way() -> None:
    script = Script()
    script.given(PATIENT, QUICK, devices=[GPU], takes=dict(EACH), policy=policies.build("fifo"))
    learnt(script)
    assert not only(script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS)).gives_way


def test_a_batch_with_an_slo_gives_way_as_well_while_it_can_wait(promising: Script) -> None:
    long = only(promising.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    quick = only(promising.at(310 * MS).arrives("b", target="quick", within_us=25 * MS))
    assert long.gives_way and quick.overlaps == (long.batch_id,) and quick.mask & long.mask


def test_one_with_little_time_to_spare_keeps_its_units(promising: Script) -> None:
    long = [one for one in promising.at(300 * MS).arrives("a", target="long", within_us=399 * MS) if isinstance(one, StartBatch)]
    assert not any(one.gives_way for one in long)


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_nothing_is_started_on_its_units_that_would_make_it_late(policy: str) -> None:
    script = Script()
    script.given(PATIENT, NEIGHBOUR, devices=[GPU], takes=dict(EACH), policy=policies.build(policy))
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long", within_us=450 * MS))
    assert long.gives_way, "it has 250 ms to spare"
    first = only(script.at(301 * MS).arrives("b", target="next", within_us=900 * MS))
    assert first.overlaps == (long.batch_id,)
    script.at(451 * MS).tell(BatchFinished(first.batch_id, 150 * MS))
    assert script.controller.state.batches[long.batch_id].expected_end_us == 650 * MS, "it has 100 ms to spare"
    second = script.at(452 * MS).arrives("c", target="next", within_us=900 * MS)
    assert not [one for one in second if isinstance(one, StartBatch) and not one.behind]
    script.at(652 * MS).tell(BatchFinished(long.batch_id, 200 * MS))
    assert script.batches[-1].function == "next" and not script.batches[-1].overlaps


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_calls_that_wait_behind_it_have_a_promise_too(policy: str) -> None:
    script, short = Script(), msgspec.structs.replace(NEIGHBOUR, name="short")
    takes = dict(EACH) | {"short": lambda _, units: whole(30, units)}
    script.given(PATIENT, NEIGHBOUR, short, devices=[GPU], takes=takes, policy=policies.build(policy))
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    script.at(301 * MS).arrives("b", target="long", within_us=450 * MS)
    started = script.at(302 * MS).arrives("c", target="next", within_us=900 * MS)
    assert long.gives_way
    assert not [one for one in started if isinstance(one, StartBatch)], "b would be done at 850 ms, not at 700 as it was told"
    assert only(script.at(303 * MS).arrives("d", target="short", within_us=900 * MS)).overlaps == (long.batch_id,)


def test_a_call_that_would_have_to_wait_for_it_is_told_so(promising: Script) -> None:
    """The estimate knows what is not given up: a call is rejected at once, not dropped later."""
    long = only(promising.at(300 * MS).arrives("a", target="long", within_us=401 * MS))
    assert long.gives_way
    first = only(promising.at(301 * MS).arrives("b", target="next", within_us=160 * MS))
    promising.at(451 * MS).tell(BatchFinished(first.batch_id, 150 * MS))
    (said,) = promising.at(452 * MS).arrives("c", target="next", within_us=160 * MS)
    assert isinstance(said, Reject) and said.reason == "deadline"


@pytest.mark.parametrize("policy", ["edf", "frontier"])
@pytest.mark.parametrize(("slo_ms", "has_them"), [(5_000, False), (900, True)])
def test_others_in_segments_have_its_units_if_they_have_much_less_time(policy: str, slo_ms: int, has_them: bool) -> None:
    """Else their graphs work in the same memory as the paused one."""
    script, other = Script(), msgspec.structs.replace(NEIGHBOUR, slo=Slo(latency_us=slo_ms * MS))
    script.given(PATIENT, other, devices=[GPU], takes=dict(EACH), policy=policies.build(policy))
    learnt(script)
    (instance,) = script.controller.state.functions["next"].instances
    script.tell(InstanceSegmented(instance, 900))
    long = only(script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    started = [
        one for one in script.at(301 * MS).arrives("b", target="next", within_us=slo_ms * MS) if isinstance(one, StartBatch)
    ]
    assert long.gives_way and [one.overlaps for one in started] == ([(long.batch_id,)] if has_them else [])
    if not has_them:
        assert only(script.at(502 * MS).tell(BatchFinished(long.batch_id, 200 * MS))).function == "next"


def test_nor_has_one_whose_time_is_not_known() -> None:
    script = Script()
    script.given(PATIENT, NEIGHBOUR, devices=[GPU], takes={"long": EACH["long"]}, policy=policies.build("frontier"))
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    assert long.gives_way
    assert not [one for one in script.at(301 * MS).arrives("b", target="next") if isinstance(one, StartBatch)]


def test_what_its_device_says_is_left_of_it_is_believed(promising: Script) -> None:
    long = only(promising.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    promising.at(310 * MS).arrives("b", target="quick", within_us=25 * MS)
    promising.at(311 * MS).tell(BatchPaused(long.batch_id, 170, 170 * MS))
    batch = promising.controller.state.batches[long.batch_id]
    assert (batch.expected_end_us, batch.pauses.remaining_segments) == (482 * MS, 170)
    promising.tell(BatchPaused(long.batch_id, 160, 0))
    assert (batch.expected_end_us, batch.pauses.remaining_segments) == (482 * MS, 160), "it cannot say how long they take"
    promising.tell(BatchPaused(long.batch_id + 99, 1, 1))  # of one that is over


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_homes_of_others_are_theirs_at_any_time(policy: str) -> None:
    script, owner = Script(), msgspec.structs.replace(QUICK, home=True, lend=True)
    script.given(PATIENT, owner, devices=[GPU], takes=dict(EACH), policy=policies.build(policy))
    learnt(script)
    assert script.controller.state.devices["gpu0"].homes
    started = script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS)
    assert not [one for one in started if isinstance(one, StartBatch) and one.gives_way]


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_nor_does_an_owner_give_up_its_own_to_those_that_may_borrow_it(policy: str) -> None:
    script, owner = Script(), msgspec.structs.replace(PATIENT, home=True, lend=True)
    script.given(owner, QUICK, devices=[GPU], takes=dict(EACH), policy=policies.build(policy))
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long", within_us=5_000 * MS))
    quick = [one for one in script.at(310 * MS).arrives("b", target="quick", within_us=25 * MS) if isinstance(one, StartBatch)]
    assert not long.gives_way and not quick


def test_until_it_is_known_that_batches_can_be_paused_they_do_not_give_way() -> None:
    script = Script()
    script.given(LONG, devices=[GPU], takes={"long": 200 * MS})
    assert not only(script.at(0).arrives("a", target="long")).gives_way


def test_what_is_booked_before_one_that_gives_way_begins_pauses_it_too() -> None:
    """It is on its way to the device, and begins without another word."""
    script = Script()
    script.given(LONG, QUICK, devices=[msgspec.structs.replace(GPU, units=2)], takes={"long": 200 * MS, "quick": 2 * MS})
    learnt(script)
    first, second = (only(script.at(at_us).arrives(str(at_us), target="quick")) for at_us in (300 * MS, 300 * MS + 10))
    booked = only(script.at(301 * MS + 950).arrives("c", target="quick"))
    assert booked.behind in (first.batch_id, second.batch_id)
    long = only(script.arrives("a", target="long"))
    assert set(long.overlaps) == {first.batch_id, second.batch_id, booked.batch_id}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_slo_that_is_deployed_meanwhile_leaves_what_runs_as_it_is(policy: str) -> None:
    """Nothing is booked behind a batch that gives way: whatever runs on its units then has them first."""
    script, one_at_a_time = Script(), msgspec.structs.replace(GPU, limits=SliceLimits(batches_per_instance=1))
    script.given(LONG, QUICK, devices=[one_at_a_time], takes={"long": 200 * MS, "quick": 2 * MS}, policy=policies.build(policy))
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long"))
    assert long.gives_way
    script.tell(Deployed((msgspec.structs.replace(LONG, slo=Slo(latency_us=900 * MS)),)))
    script.at(301 * MS).arrives("c", target="long", within_us=900 * MS)
    script.at(499 * MS)
    assert long.batch_id not in [batch.behind for batch in script.batches]
    script.tell(InstanceLost(long.instance))
    assert not script.controller.state.devices["gpu0"].yielding


def test_on_fixed_slices_a_batch_gives_way_on_its_home_alone() -> None:
    fixed = msgspec.structs.replace(GPU, limits=SliceLimits(per_batch=False))
    patient, urgent = (msgspec.structs.replace(one, share=1 / 2, home=True) for one in (LONG, QUICK))
    script = Script()
    script.given(urgent, patient, devices=[fixed], takes={"long": 200 * MS, "quick": 2 * MS}, policy=policies.build("edf"))
    learnt(script)
    homes = script.controller.state.devices["gpu0"].homes
    long = only(script.at(300 * MS).arrives("a", target="long"))
    assert long.gives_way and long.mask == homes[long.instance]


@pytest.mark.parametrize("policy", ["kaas_rr", "kaas_srtf", "kaas_mlfq", "knix"])
def test_a_policy_with_slots_of_its_own_has_units_that_no_other_gets(policy: str) -> None:
    script = Script()
    both = [msgspec.structs.replace(one, slo=Slo(), share=1.0, home=policy == "knix") for one in (LONG, QUICK)]
    devices = [msgspec.structs.replace(GPU, id=name) for name in ("gpu0", "gpu1")]
    takes = {"long": 200 * MS, "quick": 2 * MS}
    script.given(*both, devices=devices, takes=takes, policy=policies.build(policy), warm=policy == "knix", engine=True)
    for number in range(40):
        script.at((100 + number * 30) * MS).arrives(f"a{number}", target="long")
        script.arrives(f"b{number}", target="quick")
        for name in list(script.controller.state.instances):
            script.tell(InstanceSegmented(name, 900))
    assert len(script.batches) > 10 and not any(batch.gives_way or batch.overlaps for batch in script.batches)


def test_a_batch_that_gives_way_is_shown_on_its_units(script: Script) -> None:
    """As any other: a device with long work alone was shown as idle."""
    learnt(script)
    long = only(script.at(300 * MS).arrives("a", target="long"))
    state = script.controller.state
    loop = SimpleNamespace(engine=None, controller=script.controller)
    shown = device_status(state, loop, state.devices["gpu0"], 301 * MS)  # type: ignore[arg-type]
    assert shown["leased"] == 8 and [(one["mask"], one["gives_way"]) for one in shown["slices"]] == [(long.mask, True)]
    script.at(310 * MS).arrives("b", target="quick")
    shown = device_status(state, loop, state.devices["gpu0"], 311 * MS)  # type: ignore[arg-type]
    assert shown["leased"] == 8 and [one["gives_way"] for one in shown["slices"]] == [False, True]


def test_units_that_are_given_up_are_leased_once_on_either_side() -> None:
    device = Device(GPU)
    device.lease_yielding(1, 0b1111)
    device.lease(2, 0b0011)
    assert device.overlapping(0b0110, gives_way=False) == (1,)
    assert device.overlapping(0b1110, gives_way=True) == (2,)
    with pytest.raises(AssertionError, match="give way"):
        device.lease_yielding(3, 0b1000)
    check_device(device)
    assert device.release(1) == 0b1111 and device.busy == 0b0011
    check_device(device)
