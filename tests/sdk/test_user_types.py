"""Decorators must not hide types: the author of an app keeps the help of a type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_app_of_a_user_passes_the_strictest_check() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", str(Path(__file__).with_name("user_app.py"))]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
