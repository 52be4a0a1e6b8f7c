"""The collection of tests: its names and their order depend on the code alone.

Processes that share the tests compare what they have collected, and none runs if a name has an address, a time or the order of a
set in it. So the tests are collected once more, at another time and with another seed for hashes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAST = 5_000
"""There are more tests than that; a collection that found less has found nothing."""


def collected(seed: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests"], cwd=ROOT, env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """Of a run of all tests those that this process has collected itself, with a seed of its own."""
    asked = request.config.option
    own = [item.nodeid for item in request.session.items]
    return own if len(own) > LEAST and not (asked.markexpr or asked.keyword or asked.deselect) else collected("1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_names_and_order_are_the_same_in_every_process(names: list[str]) -> None:
    again = collected("2")
    assert len(names) > LEAST
    assert [pair for pair in zip(names, again, strict=False) if pair[0] != pair[1]] == []
    assert len(names) == len(again)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_two_tests_have_the_same_name(names: list[str]) -> None:
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_name_has_an_address_in_it(request: pytest.FixtureRequest) -> None:
    """Cheap, and therefore in every run: of the tests that this process has collected."""
    assert [item.nodeid for item in request.session.items if re.search(r"0x[0-9a-f]{8,}", item.nodeid)] == []
