"""Slicer contract: what every back end must do."""

from __future__ import annotations

import os

import pytest

from lamina.core.scheduling.leases import Device
from lamina.errors import BadValue
from lamina.gpu.slicer import Slicer, SlicerClosed, all_masks


def smallest(slicer: Slicer) -> int:
    return all_masks(slicer.device)[0]


def whole(slicer: Slicer) -> int:
    return (1 << slicer.device.units) - 1


def in_process(slicer: Slicer) -> Slicer:
    if not slicer.in_process:
        pytest.skip(f"{slicer.name} makes no slices inside a process")
    return slicer


def test_the_device_has_units_memory_and_a_kind(slicer: Slicer):
    assert slicer.device.units >= 1 and slicer.device.kind and slicer.device.id


def test_every_block_of_the_catalogue_is_one_the_core_may_lease(slicer: Slicer):
    device = Device(slicer.device)
    assert all(device.is_valid_slice(mask) for mask in all_masks(slicer.device))


def test_the_same_units_are_always_the_same_slice(slicer: Slicer):
    mask = smallest(in_process(slicer))
    assert slicer.slice(mask) is slicer.slice(mask)


def test_a_slice_knows_its_units(slicer: Slicer):
    assert in_process(slicer).slice(whole(slicer)).mask == whole(slicer)


def test_slices_of_other_units_are_other_slices(slicer: Slicer):
    masks = [mask for mask in all_masks(in_process(slicer).device) if mask.bit_count() == 1]
    assert len({id(slicer.slice(mask)) for mask in masks}) == len(masks)


@pytest.mark.parametrize("wrong", [0, -1, "beyond", "gap"])
def test_what_is_no_block_of_the_device_is_refused_with_a_hint(slicer: Slicer, wrong: int | str):
    mask = {"beyond": 1 << slicer.device.units, "gap": 0b101}.get(str(wrong), wrong)
    ask = slicer.slice if slicer.in_process else slicer.environment
    with pytest.raises(BadValue) as caught:
        ask(mask)
    assert caught.value.hint


def test_a_slice_can_be_entered_twice_and_leaves_no_trace(slicer: Slicer):
    slice_ = in_process(slicer).slice(smallest(slicer))
    before = os.sched_getaffinity(0)
    with slice_, slice_:
        pass
    assert os.sched_getaffinity(0) == before


def test_the_environment_for_a_process_is_text_and_changes_nothing_here(slicer: Slicer):
    before = dict(os.environ)
    added = slicer.environment(smallest(slicer), memory_mib=512)
    assert all(isinstance(text, str) for pair in added.items() for text in pair) and dict(os.environ) == before


def test_a_back_end_without_slices_in_the_process_says_what_to_do(slicer: Slicer):
    if slicer.in_process:
        pytest.skip(f"{slicer.name} has them")
    with pytest.raises(BadValue, match="inside a process"):
        slicer.slice(smallest(slicer))


def test_after_the_end_there_are_no_slices(slicer: Slicer):
    slicer.close()
    slicer.close()
    with pytest.raises(SlicerClosed):
        (slicer.slice if slicer.in_process else slicer.environment)(smallest(slicer))
