"""Fixtures every test may use."""

from __future__ import annotations

import pytest

from tests.script import Script


@pytest.fixture
def script() -> Script:
    """A world in a few words: `script.given(...)`, `script.at(5).arrives("c1")`."""
    return Script()
