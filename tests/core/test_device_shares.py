"""Shares of a device in units: those that add up to one run side by side, and none loses much by rounding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.scheduling.leases import Device
from lamina.core.unit_blocks import aligned_starts
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits
from tests.script import Script, a_function

H200 = DeviceSpec(id="gpu0", kind="gpu", units=15, memory_mib=1_000, limits=SliceLimits(aligned=True, batches_per_instance=0))


def units_of(share: float, units: int, *sizes: int) -> int:
    device = DeviceSpec(id="d", kind="k", units=units, memory_mib=1, limits=SliceLimits(sizes=sizes))
    return FunctionSpec(name="f", share=share, gpu="may").units_on(device)


@pytest.mark.parametrize(
    ("share", "units", "expected"),
    [
        (0.5, 15, 7), (1 / 3, 15, 5), (0.25, 15, 3), (0.2, 15, 3), (1 / 7, 15, 2), (0.9, 15, 13), (1.0, 15, 15), (0.0, 15, 15),
        (0.5, 7, 3), (0.5, 16, 8), (0.26, 16, 4), (0.33, 100, 33),
    ],
)  # fmt: skip
def test_a_share_is_rounded_down_to_units(share: float, units: int, expected: int):
    assert units_of(share, units) == expected


@pytest.mark.parametrize(("share", "units", "expected"), [(1 / 8, 15, 2), (0.1, 15, 2), (0.001, 16, 1), (0.7, 2, 2)])
def test_it_is_rounded_up_where_down_would_take_more_than_a_quarter_of_it(share: float, units: int, expected: int):
    assert units_of(share, units) == expected


@pytest.mark.parametrize(("share", "units", "expected"), [(0.33, 15, 5), (0.28, 7, 2), (0.14, 7, 1)])
def test_a_part_written_with_two_digits_is_that_part(share: float, units: int, expected: int):
    assert units_of(share, units) == expected


def test_where_there_are_few_sizes_it_is_the_next_one_that_covers_the_units():
    assert [units_of(share, 7, 1, 2, 3, 4, 7) for share in (0.5, 0.9, 1.0)] == [3, 7, 7]


@given(st.integers(3, 120), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40))
def test_shares_of_three_units_or_more_that_add_up_to_one_device_fit_into_it(units: int, parts: list[float]):
    shares = [part / sum(parts) for part in parts]
    if min(shares) * units >= 3:
        assert sum(units_of(share, units) for share in shares) <= units


@given(st.integers(1, 120), st.floats(0.001, 1.0))
def test_rounding_takes_no_more_than_a_quarter_of_a_share_and_adds_no_unit(units: int, share: float):
    wanted = units_of(share, units)
    assert 0.75 * share * units <= wanted < share * units + 1


@given(st.integers(2, 64), st.data())
def test_two_blocks_that_fit_into_a_device_have_a_place_beside_each_other_in_either_order(units: int, data: st.DataObject):
    one = data.draw(st.integers(1, units - 1))
    other = data.draw(st.integers(1, units - one))
    device = Device(DeviceSpec(id="d", kind="k", units=units, memory_mib=1, limits=SliceLimits(aligned=True)))
    device.lease(1, device.find_slice("", one, 0))
    assert device.find_slice("", other, 0)


@given(st.integers(1, 64), st.integers(1, 64))
def test_as_many_equal_blocks_as_there_is_room_for_have_a_place(units: int, size: int):
    device = Device(DeviceSpec(id="d", kind="k", units=units, memory_mib=1, limits=SliceLimits(aligned=True)))
    for number in range(units // size):
        device.lease(number, device.find_slice("", size, 0))
    assert device.busy.bit_count() == units // size * size


def test_a_catalogue_has_blocks_at_multiples_of_their_size_from_either_end():
    assert (aligned_starts(7, 15), aligned_starts(5, 15), aligned_starts(13, 15)) == ((0, 7, 8, 1), (0, 5, 10), (0, 2))


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.25,) * 4, (1 / 3,) * 3, (0.2,) * 5, (0.1, 0.9), (0.9, 0.1), (0.3, 0.7), (0.5, 0.25, 0.25)]
)
def test_functions_that_ask_for_a_whole_device_between_them_run_there_at_once(script: Script, shares: tuple[float, ...]):
    functions = [a_function(f"f{n}", share=share) for n, share in enumerate(shares)]
    script.given(*functions, devices=[H200], takes={spec.name: 5_000 for spec in functions})
    for spec in functions:
        script.arrives(f"c-{spec.name}", target=spec.name)
    assert len(script.running) == len(shares)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.9), (0.7, 0.3), (0.25,) * 4])
def test_and_so_do_the_slices_that_they_keep(script: Script, shares: tuple[float, ...]):
    script.given(*[a_function(f"f{n}", share=share, home=True) for n, share in enumerate(shares)], devices=[H200])
    assert len(script.controller.state.devices["gpu0"].homes) == len(shares)
