"""Output of `lamina serve` on a machine without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import lamina
from lamina.cli._serve_command import introduce
from lamina.gpu.driver import NoGpu
from lamina.gpu.slicers import open_slicer
from lamina.types import DeviceSpec

CPU = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=2, memory_mib=1_000)
GPU = DeviceSpec(id="gpu0", kind="h200", units=15, memory_mib=1_000)


def said(capsys: pytest.CaptureFixture[str], *devices: DeviceSpec) -> str:
    app = lamina.App("asked")
    app.function(name="wishes", gpu="1/4")(lambda x: x)
    app.function(name="plain")(lambda x: x)
    gateway = SimpleNamespace(
        app=app,
        driver=SimpleNamespace(engine=SimpleNamespace(devices=list(devices))),
        targets=SimpleNamespace(all=[]),
        durable=None,
        cluster=None,
        is_open_to_all=False,
        grpc_port=0,
        url="http://here",
    )
    introduce(gateway, "frontier", "local")
    return capsys.readouterr().out


def test_functions_that_ask_for_a_gpu_are_said_to_run_on_cores(capsys: pytest.CaptureFixture[str]):
    assert "no GPU    on cores instead: wishes;" in said(capsys, CPU)


def test_where_there_is_one_nothing_is_said(capsys: pytest.CaptureFixture[str]):
    assert "no GPU" not in said(capsys, CPU, GPU)


def test_asking_for_hardware_slices_by_name_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whatever this machine has
    with pytest.raises(NoGpu) as error:
        open_slicer("green")
    assert error.value.hint or "sees 0" in str(error.value)
