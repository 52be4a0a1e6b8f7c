"""Leases of units of a device: found, leased, reserved, released."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lamina.core.invariants import check_device
from lamina.core.scheduling.leases import Device, slice_label
from lamina.core.unit_blocks import find_block
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits


def device(units: int = 8, **limits: object) -> Device:
    return Device(DeviceSpec(id="d", kind="k", units=units, memory_mib=1_000, limits=SliceLimits(**limits)))  # type: ignore[arg-type]


@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.data())
def test_the_lowest_block_is_found_if_there_is_one(total: int, units: int, aligned: bool, data: st.DataObject):
    free = data.draw(st.integers(0, (1 << total) - 1))
    blocks = [((1 << units) - 1) << start for start in range(0, total - units + 1, units if aligned else 1)]
    expected = next((block for block in blocks if free & block == block), 0)
    assert find_block(free, units, aligned, total) == expected


@pytest.mark.parametrize(("mask", "label"), [(0b1, "d/0"), (0b1000, "d/3"), (0b1111_0000, "d/4-7")])
def test_a_slice_is_shown_by_its_first_and_last_unit(mask: int, label: str):
    assert slice_label("d", mask) == label


def test_units_cannot_be_leased_twice():
    it = device()
    it.lease(1, 0b11)
    with pytest.raises(AssertionError, match="leased twice"):
        it.lease(2, 0b10)


@pytest.mark.parametrize("mask", [0, 1 << 8, -1])
def test_units_a_device_does_not_have_cannot_be_leased(mask: int):
    with pytest.raises(AssertionError, match="has no units"):
        device().lease(1, mask)


def test_what_is_given_back_is_free_again():
    it = device()
    it.lease(1, 0b11)
    assert it.release(1) == 0b11
    assert it.find_slice("i", 8, 0) == 0b1111_1111


def test_a_free_slice_is_looked_for_at_home_first():
    it = device()
    it.instances["i"] = None
    it.reserve("i", 0b1100, lend=True)
    assert it.find_slice("i", 2, 0) == 0b1100


def test_a_busy_home_does_not_stop_its_owner():
    it = device()
    it.reserve("i", 0b11, lend=True)
    it.lease(1, 0b01)
    assert it.find_slice("i", 2, 0) == 0b110


def test_a_home_that_is_too_small_is_passed_over():
    it = device()
    it.reserve("i", 0b11, lend=True)
    assert it.find_slice("i", 4, 0) == 0b1111


def test_where_slices_stand_the_home_is_the_only_slice():
    it = device(per_batch=False)
    assert it.find_slice("i", 1, 0) == 0
    it.reserve("i", 0b11, lend=True)
    assert it.find_slice("i", 1, 0) == 0b11
    it.lease(1, 0b11)
    assert it.find_slice("i", 1, 0) == 0


def test_kept_units_are_those_of_homes_that_are_not_lent():
    it = device()
    it.reserve("own", 0b1, lend=False)
    it.reserve("lent", 0b10, lend=True)
    it.reserve("kept", 0b100, lend=False)
    assert it.reserved_units("own") == 0b100
    assert it.reserved_units("own", lent=True) == 0b110


def test_room_for_a_home_is_where_no_other_home_is():
    it = device()
    it.reserve("a", 0b11, lend=True)
    assert it.unreserved_block(2) == 0b1100
    assert it.unreserved_block(2, without={"a"}) == 0b11
    assert it.unreserved_block(2, borrow=True) == 0b11
    assert it.unreserved_block(2, borrow=True, taken=0b1) == 0b110


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (0b11, True),
        (0b110, False),
        (0b1100, True),
        (0b101, False),
        (0b1, False),
        (0b1111, True),
        (0b111, False),
        (0, False),
        (1 << 8, False),
    ],
)
def test_a_device_allows_the_slices_of_its_catalogue(mask: int, allowed: bool):
    assert device(sizes=(2, 4), aligned=True).is_valid_slice(mask) is allowed


def test_forgetting_an_instance_forgets_its_home():
    it = device()
    it.instances["i"] = None
    it.reserve("i", 0b11, lend=True)
    it.remove_instance("i", 0)
    check_device(it)
    assert (it.homes, it.lent, it.instances) == ({}, set(), {})


masks = st.integers(0, 7).flatmap(lambda low: st.integers(1, 8 - low).map(lambda n: ((1 << n) - 1) << low))


@given(st.lists(st.tuples(st.booleans(), masks), max_size=40))
def test_leases_never_overlap_whatever_is_taken_and_given_back(steps: list[tuple[bool, int]]):
    it, held = device(), {}
    for number, (take, mask) in enumerate(steps):
        if take and not any(mask & other for other in held.values()):
            it.lease(number, mask)
            held[number] = mask
        elif not take and held:
            it.release(next(iter(held)))
            held.pop(next(iter(held)))
        check_device(it)
        assert it.busy == sum(held.values())


# ------------------------------------------------------------------------------------------- how many units one wants


@given(
    st.integers(1, 100),
    st.floats(0.0, 1.0),
    st.lists(st.integers(1, 100), max_size=4, unique=True),
)
def test_a_function_wants_a_size_the_device_has(units: int, share: float, sizes: list[int]):
    assume(not sizes or min(sizes) <= units)
    spec = DeviceSpec(id="d", kind="k", units=units, memory_mib=1, limits=SliceLimits(sizes=tuple(sizes)))
    wanted = FunctionSpec(name="f", share=share, gpu="may").units_on(spec)
    assert 1 <= wanted <= units
    assert not sizes or wanted in sizes


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (99, 8), (0, 1)])
def test_on_a_cpu_a_function_wants_its_cores(cores: int, expected: int):
    spec = DeviceSpec(id="d", kind="cpu", family="cpu", units=8, memory_mib=1)
    assert FunctionSpec(name="f", cores=cores).units_on(spec) == expected


@pytest.mark.parametrize(("gpu", "on_cpu", "on_gpu"), [("no", True, False), ("may", True, True), ("must", False, True)])
def test_which_family_suits_a_function(gpu: str, on_cpu: bool, on_gpu: bool):
    spec = FunctionSpec(name="f", gpu=gpu)  # type: ignore[arg-type]
    assert (spec.fits_family("cpu"), spec.fits_family("gpu")) == (on_cpu, on_gpu)


def test_cores_are_held_and_given_back_with_the_lease():
    it = Device(DeviceSpec(id="d", kind="k", units=8, memory_mib=1_000, cores=4))
    it.lease(1, 0b1, cores=3)
    it.lease(2, 0b10, cores=1)
    assert it.cores_free == 0
    it.release(1)
    assert it.cores_free == 3
    it.release(2)
    check_device(it)
    assert it.cores_free == 4


def test_units_come_back_in_the_order_in_which_batches_are_expected_to_end():
    it = device()
    it.lease(1, 0b1, end_us=300)
    it.lease(2, 0b110, end_us=100)
    assert it.ends == it.returns == [(100, 2, 2), (300, 1, 1)]
    it.expect_return(2, 400)
    assert it.ends == [(100, 2, 2), (300, 1, 1)]
    assert it.returns == [(300, 1, 1), (400, 2, 2)]
    it.expect_return(2, 0)
    assert it.returns == it.ends
    it.release(2)
    assert it.ends == it.returns == [(300, 1, 1)]
    check_device(it)
