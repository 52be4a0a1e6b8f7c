"""Processes of their own on GPUs: which functions get one, and which may have packages of their own there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.engines.gpu_processes import ON_GPU, GpuProcesses
from lamina.errors import BadValue
from lamina.gpu.slicers.null import null_device
from lamina.types import FunctionSpec

ALONE = FunctionSpec(name="alone", gpu="must", share=0.25, memory_mib=300, isolated=True, home=True)
SHARED = FunctionSpec(name="shared", gpu="must", share=0.25)
ON_CORES = FunctionSpec(name="plain")
DEVICE = null_device(16)


def daemon() -> Any:
    def environment(mask: int, memory_mib: int) -> dict[str, str]:
        return {"SHARE": f"{mask.bit_count()}", "MEMORY": f"{memory_mib}"}

    return SimpleNamespace(environment=environment)


def test_isolated_functions_have_a_process_on_their_gpu_and_no_others():
    gpus = GpuProcesses([("null", DEVICE)])
    found = [gpus.isolates(spec, device, 0) for spec in (ALONE, SHARED, None) for device in (DEVICE.id, "cpu0")]
    assert found == [True, False, False, False, False, False]


def test_a_process_under_mps_is_held_to_its_share_and_knows_its_device():
    gpus = GpuProcesses([("green", DEVICE)], daemon())
    assert gpus.environment(ALONE, DEVICE.id) == {"SHARE": "4", "MEMORY": "300", **ON_GPU}
    assert gpus.environment(ALONE, "cpu0") == {}


@pytest.mark.parametrize(
    ("gpus", "spec", "user", "why"),
    [
        (GpuProcesses(), SHARED, 0, "isolated=True"),
        (GpuProcesses([("null", DEVICE)]), SHARED, 0, "isolated=True"),
        (GpuProcesses([("green", DEVICE)]), ALONE, 0, "no MPS daemon runs here"),
        (GpuProcesses([("green", DEVICE)], daemon()), ALONE, 200_001, "the server's user only"),
        (GpuProcesses([("green", DEVICE)], daemon()), ALONE, 0, ""),
        (GpuProcesses([("null", DEVICE)]), ALONE, 200_001, ""),
        (GpuProcesses(), ALONE, 0, ""),  # agents may have the GPU
        (GpuProcesses([("green", DEVICE)]), ON_CORES, 0, ""),
    ],
)
def test_packages_of_an_app_are_for_cores_and_processes_of_their_own(gpus: GpuProcesses, spec: FunctionSpec, user: int, why: str):
    said = ""
    try:
        gpus.check_packages([ON_CORES, spec], user)
    except BadValue as error:
        said = f"{error.message} {error.hint}"
    assert why in said and bool(why) == bool(said)
    if not why and gpus.devices and spec.isolated:
        assert gpus.isolates(spec, DEVICE.id, user)
