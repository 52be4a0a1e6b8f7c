"""Fixtures every test may use."""

from __future__ import annotations

import faulthandler
import gc
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.script import Script

# how quick the machine is today is no property of the code
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)  # of `make quick`; all others have 100
settings.load_profile("repeatable")

is_live = True  # the test that runs now

MARKED_BY_FOLDER = {"published": "published", "lab": "published", "examples": "slow", "newcomer": "live"}
"""Tests of published systems and of the lab, of examples with their models, and of what a newcomer does with real servers are
marked by where they are, so that a quick run can leave them out."""

LONG_FOLDERS = ("world", "cluster", "attacks", "examples", "cli", "web")
"""Have the files that take longest, of few tests each: they begin first, so that no process is left with one at the end. Files
that start processes come next, and last those that only compute: they are many and short."""

LEAVE_S = 120


def pytest_unconfigure() -> None:
    """A thread that never ends would keep the process for ever: then say where it is, and go."""
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection makes millions of syntax nodes and keeps thousands of tests: searched for garbage all the while, it takes twice
    as long. What it leaves behind stays for the session, and is not looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The name of a case made of bytes: packed data carries the time it was packed at, and the processes that share the tests
    must agree on their names."""
    return argname if isinstance(val, bytes) and (len(val) > 24 or not val.isascii()) else None


def folder_mark(path: Path) -> str | None:
    return MARKED_BY_FOLDER.get(path.relative_to(Path(__file__).parent).parts[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := folder_mark(item.path):
            item.add_marker(mark)
    starting = {item.path for item in items if any(item.get_closest_marker(mark) for mark in ("live", "slow"))}
    items.sort(key=lambda item: (_folder(item) not in LONG_FOLDERS, item.path not in starting))  # else as they were


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(autouse=True, scope="session")
def _processes_are_of_live_tests(pytestconfig: pytest.Config) -> Iterator[None]:
    """A quick run starts no process, so that it needs nothing of the machine: a test that does is marked so."""

    def checked(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **options: Any) -> Any:
            assert is_live, "this test starts a process: mark it `live`"
            return start(*args, **options)

        return begin

    with pytest.MonkeyPatch.context() as patch:
        if "not live" in pytestconfig.option.markexpr:
            for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start")):
                patch.setattr(owner, name, checked(getattr(owner, name)))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    global is_live  # in tests/gpu a driver may start a process to find its libraries
    is_live = "gpu" in item.path.parts or any(item.get_closest_marker(mark) is not None for mark in ("live", "slow"))


def pytest_runtest_teardown() -> None:
    """A command that ran in this process has set logging up, for a stream that the test took with it: undone, so that later tests
    see what is logged, in whatever order they run."""
    log = logging.getLogger("lamina")
    log.handlers[:] = []
    log.propagate = True
    log.setLevel(logging.NOTSET)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that a run leaves out as a whole (`-m "not live and ..."`) are not imported: half of the time of a collection."""
    expression = config.option.markexpr
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_") or " or " in expression:
        return None
    left_out = set(re.findall(r"\bnot (\w+)", expression))
    marks = set(re.findall(r"\bmark\.(\w+)", "".join(MODULE_MARKS.findall(collection_path.read_text(encoding="utf-8")))))
    return True if left_out & (marks | {folder_mark(collection_path)}) else None


MODULE_MARKS = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)


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
