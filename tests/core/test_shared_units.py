"""Units in parts: of light functions, and of those that serve several calls at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import policies
from lamina.core.actions import Reply, StartBatch
from lamina.core.invariants import check_device
from lamina.core.scheduling.leases import Device
from lamina.types import WHOLE_UNIT, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, call_parts
from tests.script import Script

MS = 1_000
CORES = DeviceSpec(
    id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=1_000, limits=SliceLimits(batches_per_instance=1), owned=True
)
POLICIES = ("fifo", "edf", "frontier")


def a_function(name: str, concurrency: int = 1, part: float = 1.0, most: int = 1) -> FunctionSpec:
    parts = call_parts(part, concurrency)
    return FunctionSpec(name=name, concurrency=concurrency, parts=parts, scale=ScaleSpec(min=1, max=most))


def started(script: Script) -> list[StartBatch]:
    return script.batches


def a_world(policy: str, *functions: FunctionSpec) -> Script:
    script = Script()
    takes = {one.name: 200 * MS for one in functions}
    script.given(*functions, devices=[CORES], takes=takes, policy=policies.build(policy), engine=True)
    return script


@given(st.lists(st.tuples(st.integers(1, 15), st.sampled_from((1, 25, 250, 333, 999))), max_size=40), st.data())
def test_no_more_of_a_unit_is_leased_than_there_is(wanted: list[tuple[int, int]], data: st.DataObject):
    device = Device(DeviceSpec(id="d", kind="k", units=4, memory_mib=1))
    held: dict[int, tuple[int, int]] = {}
    for number, (mask, parts) in enumerate(wanted):
        there = [max((sum(p for m, p in held.values() if m >> unit & 1)), 0) for unit in range(4) if mask >> unit & 1]
        assert (not mask & ~device.open_units(parts)) == all(taken + parts <= WHOLE_UNIT for taken in there)
        assert (not mask & ~device.open_units(WHOLE_UNIT)) == (not any(there))
        if not mask & ~device.open_units(parts):
            device.lease(number, mask, parts=parts)
            held[number] = (mask, parts)
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            device.release(gone)
            del held[gone]
        check_device(device)
    for number in held:
        device.release(number)
    assert not device.busy
    assert not device.shared.taken


@pytest.mark.parametrize("policy", POLICIES)
def test_one_instance_serves_as_many_calls_at_once_as_it_says_on_one_core(policy: str):
    script = a_world(policy, a_function("wait", concurrency=40), a_function("work"))
    script.at(1_000 * MS)
    for number in range(41):
        script.arrives(f"c{number}", target="wait")
    found = started(script)
    assert len(found) == 40
    assert {one.instance for one in found} == {"wait-1"}
    assert len({one.mask for one in found}) == 1
    assert all(one.part == pytest.approx(1 / 40) for one in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_needs_a_whole_core_has_the_other_one(policy: str):
    script = a_world(policy, a_function("wait", concurrency=40), a_function("work"))
    script.at(1_000 * MS)
    for number in range(20):
        script.arrives(f"c{number}", target="wait")
    script.arrives("w", target="work")
    *waits, work = started(script)
    assert work.function == "work"
    assert work.part == 1
    assert not work.mask & waits[0].mask


@pytest.mark.parametrize("policy", POLICIES)
def test_four_light_functions_share_a_core(policy: str):
    script = a_world(policy, *(a_function(name, part=0.25) for name in "abcd"), a_function("work"))
    script.at(1_000 * MS)
    for name in "abcd":
        script.arrives(name, target=name)
    script.arrives("w", target="work")
    found = started(script)
    assert len(found) == 5
    assert len({one.mask for one in found[:4]}) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_pays_for_its_part(policy: str):
    costs: list[float] = []
    for concurrency in (1, 10):
        script = a_world(policy, a_function("f", concurrency=concurrency))
        script.at(1_000 * MS)
        script.arrives("c", target="f")
        script.at(2_000 * MS)
        (ending,) = script.endings.values()
        assert isinstance(ending, Reply)
        costs.append(ending.cost)
    assert costs[1] == pytest.approx(costs[0] / 10)
