"""Capacity for what must always be loaded, checked before anything is deployed."""

from __future__ import annotations

import msgspec
import pytest

from lamina.errors import NoCapacity
from lamina.planner.capacity_check import check_capacity
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits

GPU = DeviceSpec(id="gpu0", kind="h200", units=16, memory_mib=1_000)
CPU = DeviceSpec(id="cpu0", kind="cpu", units=4, memory_mib=500, family="cpu")
SHARED = msgspec.structs.replace(GPU, limits=SliceLimits(batches_per_instance=0))


def function(name: str, *, count: int = 1, share: float = 0.25, memory_mib: int = 100, home: bool = False) -> FunctionSpec:
    return FunctionSpec(name=name, gpu="must", share=share, memory_mib=memory_mib, home=home, scale=ScaleSpec(min=count, max=8))


def refused(*coming: FunctionSpec, standing: tuple[FunctionSpec, ...] = (), devices: tuple[DeviceSpec, ...] = (GPU,)) -> str:
    with pytest.raises(NoCapacity) as error:
        check_capacity(devices, standing, coming)
    return f"{error.value.message} | {error.value.hint}"


def test_what_fits_is_let_in() -> None:
    check_capacity([GPU, CPU], [function("a", home=True)], [function("b", count=3, home=True)])


def test_sixty_and_sixty_percent_are_too_much_for_one_gpu() -> None:
    said = refused(function("b", share=0.6, home=True), standing=(function("a", share=0.6, home=True),))
    assert said == (
        "no room for instance 1 of 1 of 'b': it lacks 9 units of its own (most left on one device: 7)"
        " | best offer: up to 7 units and 900 MiB"
    )


def test_two_gpus_have_room_for_both() -> None:
    second = DeviceSpec(id="gpu1", kind="h200", units=16, memory_mib=1_000)
    check_capacity([GPU, second], [function("a", share=0.6, home=True)], [function("b", share=0.6, home=True)])


def test_the_offer_says_how_many_instances_would_fit() -> None:
    assert "instance 3 of 8 of 'a': it lacks 400 MiB (most left on one device: 200) | best offer: min=2" in refused(
        function("a", count=8, memory_mib=400)
    )


def test_what_needs_no_standing_instance_needs_no_room_now() -> None:
    check_capacity([GPU], [function("a", count=2, memory_mib=500)], [function("b", count=0, memory_mib=900)])


def test_larger_than_any_device_is_refused_even_when_nothing_stands() -> None:
    assert "needs 2000 MiB on one device; the largest here has 1000 MiB | best offer: memory up to 1000 MiB" in refused(
        function("a", count=0, memory_mib=2_000)
    )


def test_without_a_gpu_it_says_so() -> None:
    assert "'a' needs a GPU; the devices here are cpu" in refused(function("a"), devices=(CPU,))


def test_units_on_one_device_and_memory_on_another_are_no_place() -> None:
    full = function("m", memory_mib=1_000, share=0.01)
    owned = function("u", memory_mib=10, share=1.0, home=True)
    second = DeviceSpec(id="gpu1", kind="h200", units=16, memory_mib=1_000)
    said = refused(function("a", share=0.5, home=True, memory_mib=995), standing=(owned, full), devices=(GPU, second))
    assert "it lacks" in said


def test_no_more_instances_of_a_function_than_a_device_has_slices_for() -> None:
    said = refused(FunctionSpec(name="a", cores=2, scale=ScaleSpec(min=3, max=8)), devices=(CPU,))
    assert said == "no room for instance 3 of 3 of 'a': the devices here have slices for 2 | best offer: min=2"


def test_one_instance_serves_a_whole_gpu_so_a_second_is_not_promised() -> None:
    assert "the devices here have slices for 1 | best offer: min=1" in refused(function("a", count=2), devices=(SHARED,))
    check_capacity([SHARED, msgspec.structs.replace(SHARED, id="gpu1")], [], [function("a", count=2)])
