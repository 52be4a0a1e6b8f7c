"""Whole servers in virtual time: clients leave and repeat themselves, servers die, freeze and take over, disks and workers fail.

Each seed is a world; the history that its clients have seen is checked at its end. `make soak` plays a hundred thousand of them,
`python -m tests.soak server SEED --loud` one, with the server's log.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def worlds(seeds: str, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of their own: there, the clock is the world's."""
    command = [sys.executable, "-m", "tests.soak", "server", seeds, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


@pytest.mark.slow
def test_thirty_worlds_lose_nothing_and_double_nothing():
    played = worlds("0:30")
    assert played.returncode == 0, played.stdout + played.stderr


@pytest.mark.slow
@pytest.mark.timeout(1_500)  # a minute where nothing else runs; its threads wait for each other a hundred thousand times
def test_a_thousand_worlds_lose_nothing_and_double_nothing():
    played = worlds("30:1000", "--jobs", "2")
    assert played.returncode == 0, played.stdout + played.stderr


@pytest.mark.slow
def test_a_world_is_the_same_when_it_is_played_again():
    once, again = worlds("17", "--trace"), worlds("17", "--trace")
    assert once.returncode == again.returncode == 0
    assert "digest" in once.stdout and once.stdout == again.stdout
