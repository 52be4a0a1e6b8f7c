"""Early start: a process that imports what an app will need, before it is known what it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import open_gateway
from lamina.gpu.early_start import EXECUTOR, mentioned_modules, start_early
from lamina.ipc.child_process import WarmProcess, await_setup
from tests.serving import Browser, write_app

APP = """
import lamina
from lamina import kernels

app = lamina.App("early")


@kernels.numpy_kernel
def double(x, y):
    y[...] = x * 2


@app.kernel_graph(gpu=1.0, scale=lamina.Scale(min=1, max=1))
def doubled(g):
    g.launch(double, g.input("x", "float32", (2,)), kernels.out(g.output("y", "float32", (2,))))
"""


def test_what_an_app_and_its_own_modules_import_is_found_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import own, json\nraise SystemExit('this must not run')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("from own import zoo\n")
    (tmp_path / "own" / "zoo.py").write_text("import own\n\ndef build():\n    import torchvision.models\n")
    assert {"own", "json", "torchvision"} <= mentioned_modules(tmp_path / "app.py")
    (tmp_path / "own" / "zoo.py").write_text("import (")
    assert "torchvision" not in mentioned_modules(tmp_path / "app.py")
    assert mentioned_modules(tmp_path / "none.py") == set()


def test_nothing_is_started_for_what_takes_no_time_or_has_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import torch\n")
    (tmp_path / "quick.py").write_text("import json\n")
    assert start_early("no", str(tmp_path / "slow.py")) is None
    assert start_early("null", str(tmp_path / "quick.py:app")) is None


def answered_by(app: Path, warm: WarmProcess) -> tuple[int, list[float]]:
    """The executor that answers, and what."""

    async def play() -> tuple[int, list[float]]:
        runtime = open_local(str(app), gpu="null", warm=warm)
        gateway = await open_gateway(runtime)
        async with Browser(gateway.port) as browser:
            found = await browser.post("/v1/functions/doubled", {"x": [1, 2]})
        (pid,) = [report.pid for report in runtime.driver.engine.executor_reports().values()]  # type: ignore[attr-defined]
        await gateway.stop(5.0)
        return pid, found.json

    return asyncio.run(play())


@pytest.mark.live
def test_the_process_becomes_the_executor_and_ends_with_the_server(tmp_path: Path) -> None:
    warm = WarmProcess.start(EXECUTOR, ["wave", "no_such_module"])
    assert answered_by(write_app(tmp_path, APP), warm) == (warm.process.pid, [2.0, 4.0])
    warm.close()
    assert warm.process.returncode is not None and not warm.take()


@pytest.mark.live
def test_one_that_has_died_meanwhile_is_replaced(tmp_path: Path) -> None:
    warm = WarmProcess.start(EXECUTOR, [])
    os.kill(warm.process.pid, signal.SIGKILL)
    pid, found = answered_by(write_app(tmp_path, APP), warm)
    assert pid != warm.process.pid and found == [2.0, 4.0]


@pytest.mark.live
def test_one_that_is_not_needed_is_ended() -> None:
    warm = WarmProcess.start(EXECUTOR, [])
    warm.close()
    warm.close()
    assert warm.process.returncode == -signal.SIGKILL and not warm.take()


def test_a_process_whose_server_has_ended_is_told_so() -> None:
    import socket

    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(BrokenPipeError):
        await_setup(theirs)
