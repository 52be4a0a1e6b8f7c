"""The bandwidth rule against brute force: everything that lanes on a device may come to run at the same time."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.bandwidth import BandwidthRule, bandwidth_rule
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Batch, Instance
from lamina.predict.interference import BandwidthInterference, LinearInterference
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec
from tests.properties import examples

UNITS = 12
SPEC = DeviceSpec(id="gpu0", kind="gpu", units=UNITS, memory_mib=1_000)
NAMES = ("none", "some", "much", "all")

demands = st.fixed_dictionaries({(name, "gpu"): st.sampled_from([0.0, 0.1, 0.35, 0.7, 1.0]) for name in NAMES})
lanes = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(NAMES), st.none() | st.tuples(st.integers(1, 4), st.sampled_from(NAMES))),
    max_size=3,
)


def running(these: list[tuple[int, str, tuple[int, str] | None]]) -> tuple[Device, dict[int, Batch]]:
    """A device with these batches (units, function), each with the one that is booked behind it, if any."""
    device = Device(SPEC)
    batches: dict[int, Batch] = {}
    low = 0
    for units, function, behind in these:
        batch = made(device, function, ((1 << units) - 1) << low, len(batches) + 1)
        batches[batch.id] = batch
        device.lease(batch.id, batch.mask)
        if behind is not None:
            follower = made(device, behind[1], ((1 << min(units, behind[0])) - 1) << low, len(batches) + 1)
            follower.behind, batch.follower = batch, follower
            batches[follower.id] = follower
        low += units
    return device, batches


def made(device: Device, function: str, mask: int, number: int) -> Batch:
    return Batch(
        number, Instance(f"{function}-1", function, "gpu0", InstancePhase.WARM, 0), device, mask, [], 100, planned_start_us=number
    )


def may(rule: BandwidthRule, function: str, units: int, others: list[Batch]) -> bool:
    """By the words of the rule: whatever each lane runs when the newcomer does."""
    own = rule.demand[function, "gpu"] * units / UNITS
    for moment in product(*[(batch, batch.follower) if batch.follower is not None else (batch,) for batch in others]):
        theirs = sum(rule.demand[batch.instance.function, "gpu"] * batch.mask.bit_count() / UNITS for batch in moment)
        if own and theirs and own + theirs > rule.limit + 1e-9:
            return False
    return True


@examples(300)
@given(demands, lanes, st.sampled_from(NAMES), st.sampled_from([0.5, 0.7, 1.0]))
def test_the_largest_slice_is_the_largest_that_no_moment_forbids(demand, these, function, limit):
    rule, (device, batches) = BandwidthRule(demand, limit), running(these)
    others = [batches[number] for number in device.running]
    most = max((units for units in range(UNITS + 1) if may(rule, function, units, others)), default=0)
    assert rule.max_units(function, device, batches) == most


@examples(200)
@given(demands, lanes.filter(bool), st.sampled_from(NAMES))
def test_behind_a_batch_it_counts_no_more(demand, these, function):
    rule, (device, batches) = BandwidthRule(demand, 0.7), running([(units, name, None) for units, name, _ in these])
    first, *others = (batches[number] for number in device.running)
    most = max((units for units in range(UNITS + 1) if may(rule, function, units, others)), default=0)
    assert rule.max_units(function, device, batches, after=first) == most


@examples(200)
@given(demands, lanes, st.sampled_from(NAMES), st.integers(1, UNITS))
def test_room_comes_when_enough_of_them_have_ended(demand, these, function, units):
    rule, (device, batches) = BandwidthRule(demand, 0.7), running(these)
    ends = sorted([batches[number] for number in device.running], key=lambda batch: batch.expected_end_us)
    left = next(left for left in range(len(ends) + 1) if may(rule, function, units, ends[left:]))
    assert rule.wait_us(function, units, device, batches, 0) == (ends[left - 1].expected_end_us if left else 0)


def test_without_known_demands_there_is_no_rule():
    models = [None, LinearInterference({}, {}), BandwidthInterference({})]
    assert [bandwidth_rule(ProfileTable([], interference=model)) for model in models] == [None] * 3
