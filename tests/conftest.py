"""Fixtures every test may use."""

from __future__ import annotations

import faulthandler

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
def script() -> Script:
    """A world in a few words: `script.given(...)`, `script.at(5).arrives("c1")`."""
    return Script()
