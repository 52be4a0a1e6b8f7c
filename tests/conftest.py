"""Fixtures every test may use."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.script import Script

# how quick the machine is today is no property of the code
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


LEAVE_S = 120


def pytest_unconfigure() -> None:
    """A thread that never ends would keep the process for ever: then say where it is, and go."""
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)


@pytest.fixture
def imports_undone() -> Iterator[None]:
    """What a test imports of its own is forgotten after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if not name.startswith("lamina"):
            del sys.modules[name]


@pytest.fixture
def script() -> Script:
    """A world in a few words: `script.given(...)`, `script.at(5).arrives("c1")`."""
    return Script()
