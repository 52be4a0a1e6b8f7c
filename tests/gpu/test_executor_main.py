"""Standby process: what it does before its promotion."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.gpu.executor_main import wait_for_promotion
from lamina.gpu.protocol import ExecutorSetup, ImportModules, Promote, to_executor_reader
from lamina.ipc.protocol import FrameChannel, StopProcess, pack

SETUP = ExecutorSetup(app="nowhere.py", device="gpu0", slicer="null", folder="", owner="a", values_owner="b", pool_bytes=0)


def waited(*frames: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack(*frames))
        wait_for_promotion(FrameChannel(theirs, to_executor_reader()))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "lamina_spare_probe.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lamina_spare_probe"
    sys.modules.pop("lamina_spare_probe", None)


def test_a_spare_imports_what_the_executor_had_imported_and_passes_over_what_it_cannot(module: str):
    waited(ImportModules(["lamina_no_such_module", module]), Promote())
    assert module in sys.modules


def test_a_spare_that_is_told_anything_else_first_ends():
    with pytest.raises(BrokenPipeError):
        waited(StopProcess())
