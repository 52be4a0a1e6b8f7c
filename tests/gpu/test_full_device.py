"""Weights on a device that is fuller than their owner thinks, on stand-ins for driver and torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lamina.gpu.driver import OUT_OF_MEMORY, CudaError
from lamina.gpu.weight_cache import NoDeviceMemory, WeightCache
from lamina.gpu.weights import WeightBlock, WeightStore


class FullDevice:
    """So many pages; `others` are other processes', `cached` torch's."""

    def __init__(self, pages: int, cached: int = 0, others: int = 0) -> None:
        self.pages, self.cached, self.others, self.mapped = pages, cached, others, set[int]()
        self.error = OUT_OF_MEMORY

    def map(self, address: int, size: int) -> int:
        if len(self.mapped) + self.cached + self.others >= self.pages:
            raise CudaError("cuMemCreate", self.error)
        self.mapped.add(address)
        return address

    def unmap(self, address: int, size: int, pages: int) -> None:
        self.mapped.remove(address)

    def copy_in(self, *_: int) -> None:
        pass

    def empty_cache(self) -> None:
        self.cached = 0


def blocks_on(device: FullDevice, *names: str) -> tuple[WeightStore, list[WeightBlock]]:
    weights, driver = WeightStore.__new__(WeightStore), cast(Any, device)
    weights._driver, weights.cache = driver, WeightCache(100)
    weights._torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=device.empty_cache))
    weights._copy = SimpleNamespace(cuda_stream=0)
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    host: Any = SimpleNamespace(tensor=SimpleNamespace(data_ptr=lambda: 0))
    made = [WeightBlock(name, host, 1, at, 1, device="there", arrived=event, pieces=[event]) for at, name in enumerate(names, 1)]
    weights.blocks = {block.key: block for block in made}
    return weights, made


def test_on_a_full_device_what_torch_holds_in_case_goes_first():
    device = FullDevice(pages=2, cached=1)
    weights, (a, b) = blocks_on(device, "a", "b")
    weights.ensure_resident(a)
    weights.ensure_resident(b)
    assert a.pages and b.pages and not device.cached


def test_then_unused_weights_are_evicted():
    device = FullDevice(pages=2, others=1)
    weights, (a, b) = blocks_on(device, "a", "b")
    weights.ensure_resident(a)
    weights.ensure_resident(b)
    assert b.pages and not a.pages and device.mapped == {2} and weights.cache.evictions == 1
    weights.cache.check()


def test_and_where_all_are_used_there_is_no_room_until_one_is_not():
    device = FullDevice(pages=2, others=1)
    weights, (a, b) = blocks_on(device, "a", "b")
    weights.ensure_resident(a)
    weights.cache.pin("a")
    with pytest.raises(NoDeviceMemory, match="full") as found:
        weights.ensure_resident(b)
    assert not found.value.is_permanent and "b" not in weights.cache and a.pages
    weights.cache.unpin("a")
    weights.ensure_resident(b)
    assert b.pages


def test_any_other_error_of_the_driver_is_told_as_it_is():
    device = FullDevice(pages=0)
    weights, (a,) = blocks_on(device, "a")
    device.error = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        weights.ensure_resident(a)
    assert "a" not in weights.cache
