"""Function overrides: what an operator may change, and what is rejected before anything changes."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.errors import BadValue
from lamina.gateway.deploy.overrides import FunctionOverrides
from lamina.types import DeviceSpec, FunctionSpec

TWO_CORES = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=1024)
GPU = DeviceSpec(id="gpu0", kind="h200", family="cuda", units=15, memory_mib=1024)
ON_CORES, ON_GPUS = FunctionSpec(name="f"), FunctionSpec(name="f", gpu="must")


def changed(given: dict[str, Any], spec: FunctionSpec = ON_CORES) -> FunctionOverrides:
    return FunctionOverrides().updated(spec, given, [TWO_CORES, GPU])


def test_all_cores_there_are_may_be_had() -> None:
    assert changed({"cores": 2}).cores == 2


@pytest.mark.parametrize(
    ("given", "spec", "says"),
    [
        ({"cores": 64}, ON_CORES, "cores: 64 for 'f' where a device has up to 2\n  hint: give 1 to 2"),
        ({"cores": 0}, ON_CORES, "cores: 0 for 'f' where a device has up to 2\n  hint: give 1 to 2"),
        ({"cores": 1}, ON_GPUS, "cores: 'f' runs on GPUs alone\n  hint: set its share"),
        ({"cores": 1.5}, ON_CORES, "cores: 1.5 is no whole number"),
        ({"min": 0.5}, ON_CORES, "min: 0.5 is no whole number"),
        ({"share": 0.5}, ON_CORES, "share: 'f' does not run on GPUs"),
        ({"share": 2}, ON_GPUS, "share: 2 is not from 0 to 1"),
        ({"cpu": 1}, ON_CORES, "cpu: 1 cannot be set\n  hint: there are cores"),
        ({"max": True}, ON_CORES, "max: True cannot be set"),
        ({"min": 3, "max": 2}, ON_CORES, "scale: min 3 and max 2 make no sense"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, Any], spec: FunctionSpec, says: str) -> None:
    with pytest.raises(BadValue) as caught:
        changed(given, spec)
    assert str(caught.value).startswith(says)
