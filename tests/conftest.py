"""Fixtures every test may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.script import Script

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def script() -> Script:
    """A world in a few words: `script.given(...)`, `script.at(5).arrives("c1")`."""
    return Script()
