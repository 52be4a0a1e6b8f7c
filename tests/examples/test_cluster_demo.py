"""Demo of a cluster: a machine is killed under load, and everything is accounted for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.live
@pytest.mark.slow
def test_a_killed_and_a_drained_machine_lose_no_call_and_no_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "demo.png"
    command = [sys.executable, str(REPO / "examples/cluster/demo.py"), "--seconds", "6", "--rate", "20", "--out", str(plot)]
    env = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert "0 failed, 0 wrong, 0 lost" in done.stdout
    assert "red is killed" in done.stdout and "green is drained" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
