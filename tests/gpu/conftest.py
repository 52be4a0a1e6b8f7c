"""Slicers under test, and why one of them cannot be tried here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lamina.gpu.driver import NoGpu, open_driver
from lamina.gpu.mps import MpsSlicer
from lamina.gpu.slicer import Slicer
from lamina.gpu.slicers.cpu import CpuSlicer
from lamina.gpu.slicers.green import GreenSlicer
from lamina.gpu.slicers.mig import MigSlicer
from lamina.gpu.slicers.null import NullSlicer, null_device
from lamina.types import SliceLimits

SOFT = SliceLimits(batches_per_instance=0, soft=True)


def mps() -> Slicer:
    open_driver()  # the daemon starts without a GPU too, and then serves nobody
    return MpsSlicer()


EVERYWHERE: dict[str, Callable[[], Slicer]] = {
    "null": NullSlicer,
    "cpu": CpuSlicer,
    "null-soft": lambda: NullSlicer(null_device(soft=True)),
    "cpu-soft": lambda: CpuSlicer(soft=True),
}
ON_A_GPU: dict[str, Callable[[], Slicer]] = {
    "green": GreenSlicer,
    "green-soft": lambda: GreenSlicer(limits=SOFT),
    "mps": mps,
    "mig": MigSlicer,
}
BACK_ENDS = [
    *EVERYWHERE,
    *(pytest.param(name, marks=[pytest.mark.gpu, *([pytest.mark.live] if name == "mps" else [])]) for name in ON_A_GPU),
]


def made(name: str) -> Slicer:
    try:
        return (EVERYWHERE | ON_A_GPU)[name]()
    except (NoGpu, ModuleNotFoundError) as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture(params=BACK_ENDS)
def slicer(request: pytest.FixtureRequest) -> Iterator[Slicer]:
    """Every back end in turn."""
    slicer = made(request.param)
    yield slicer
    slicer.close()


@pytest.fixture
def soft_green() -> Iterator[GreenSlicer]:
    pytest.importorskip("torch")
    slicer = made("green-soft")
    assert isinstance(slicer, GreenSlicer)
    yield slicer
    slicer.close()


@pytest.fixture
def green() -> Iterator[GreenSlicer]:
    pytest.importorskip("torch")
    slicer = made("green")
    assert isinstance(slicer, GreenSlicer)
    yield slicer
    slicer.close()
