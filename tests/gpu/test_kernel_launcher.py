"""The launcher of CUDA C kernels without a GPU: in which order it asks a driver that is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.gpu import kernel_module


def test_a_thread_that_has_just_begun_is_given_the_context_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def answer(name: str, *values: Any) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            asked.append((name, *args))
            return 0, *values

        return call

    attributes = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )
    driver = SimpleNamespace(
        CUdevice_attribute=attributes,
        cuDeviceGet=answer("device", "gpu1"),
        cuDevicePrimaryCtxRetain=answer("retain", "context of gpu1"),
        cuCtxSetCurrent=answer("use"),
        cuDeviceGetAttribute=answer("attribute", 9),
    )
    modules = {"cuda.bindings.driver": driver, "cuda.bindings.nvrtc": SimpleNamespace(nvrtcVersion=answer("version", 13, 0))}
    monkeypatch.setattr(kernel_module.importlib, "import_module", modules.__getitem__)
    kernel_module.NvrtcLauncher(1)
    assert asked[:3] == [("device", 1), ("retain", "gpu1"), ("use", "context of gpu1")]
