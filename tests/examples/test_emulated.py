"""The example of emulated GPUs serves as its text says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_testing_server import SRC, post

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.live
def test_two_emulated_gpus_serve_functions_and_workflows() -> None:
    command = next(
        line.split() for line in (ROOT / "examples/emulated/app.py").read_text().splitlines() if "lamina serve examples" in line
    )
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--port", "0", "--json", "--store", "none"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        deadline = "10000"  # a busy machine may be late
        for path in ("functions/resnet50", "functions/mobilenet_v3_large", "workflows/describe"):
            assert post(f"{url}/v1/{path}", {"image": "x"}, **{"lamina-deadline-ms": deadline}) == (200, None)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
