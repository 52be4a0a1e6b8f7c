"""Fixtures every test may use."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path

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


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The name of a case made of bytes: packed data carries the time it was packed at, and the processes that share the tests
    must agree on their names."""
    return argname if isinstance(val, bytes) and (len(val) > 24 or not val.isascii()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of published systems and of the lab, of examples with their models, and of what a newcomer does with real servers are
    marked by where they are, so that a quick run can leave them out."""
    for item in items:
        part = item.path.relative_to(Path(__file__).parent).parts[0]
        if part in ("published", "lab"):
            item.add_marker(pytest.mark.published)
        elif part == "examples":
            item.add_marker(pytest.mark.slow)
        elif part == "newcomer":
            item.add_marker(pytest.mark.live)


@pytest.fixture
def imports_undone() -> Iterator[None]:
    """What a test imports of its own is forgotten after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.partition(".")[0] not in {"lamina", *sys.stdlib_module_names}:  # some of the library must not be there twice
            del sys.modules[name]


@pytest.fixture
def script() -> Script:
    """A world in a few words: `script.given(...)`, `script.at(5).arrives("c1")`."""
    return Script()
