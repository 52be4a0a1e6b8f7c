"""An `each` over very many items: what one turn of the loop does for them is no work in Python for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lamina
from lamina import encoding
from lamina.core.actions import JobRef, ResolveData
from lamina.core.events import DataResolved
from lamina.core.workflow.engine import MAX_ITEMS
from lamina.core.workflow.flow import Each, Task
from lamina.core.workflow.runs import ROOT
from lamina.units import MIB
from lamina.values.run_values import RunValues
from lamina.values.shm import ShmPool, ShmReader

app = lamina.App("many")


@app.function()
def same(x):
    return x


@app.function()
def length(xs):
    return len(xs)


@app.workflow()
def over_all(xs):
    return length(lamina.each(same, xs))


FLOW = app.workflows["over_all"].flow
[EACH] = [node for node in FLOW.nodes.values() if isinstance(node, Each)]
[LENGTH] = [node for node in FLOW.nodes.values() if isinstance(node, Task)]
[SAME] = EACH.body.nodes


@pytest.fixture(params=["inline", "in shared memory"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> RunValues:
    if request.param == "inline":
        return RunValues(None, None)
    return RunValues(ShmPool(str(tmp_path), "gateway", 16 * MIB), ShmReader(str(tmp_path)))


def ask(values: RunValues, first_scope: int = 1) -> DataResolved:
    return values.resolve(ResolveData("c", ROOT, EACH.name), first_scope)


def put(values: RunValues, scope: int, value: Any) -> None:
    values.put(JobRef(scope, "c", scope, SAME), encoding.encode(value))


def python_calls(act: Callable[[], object]) -> int:
    count = 0

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_the_scopes_of_items_are_made_when_they_are_asked_for(values: RunValues):
    values.open("c", FLOW, {"xs": encoding.encode(list(range(MAX_ITEMS)))})
    assert python_calls(lambda: ask(values)) < 100
    assert values.inputs(JobRef(1, "c", MAX_ITEMS, SAME)).leaves == [(("item", ""), encoding.encode(MAX_ITEMS - 1))]


def test_the_results_of_items_are_joined_without_a_look_at_each(values: RunValues):
    values.open("c", FLOW, {"xs": encoding.encode(list(range(20_000)))})
    assert ask(values).value == 20_000
    for scope in range(1, 20_001):
        put(values, scope, -scope)
    job = JobRef(30_000, "c", ROOT, LENGTH.name)
    assert python_calls(lambda: values.inputs(job)) < 100
    [(_, joined)] = values.inputs(job).leaves
    assert encoding.decode(values._storage.read(joined)) == [-scope for scope in range(1, 20_001)]


def test_scopes_of_an_answer_that_was_not_taken_are_numbered_again(values: RunValues):
    values.open("c", FLOW, {"xs": encoding.encode([1, 2])})
    ask(values)
    put(values, 1, "of the first")
    ask(values)
    put(values, 1, "of the second")
    put(values, 2, "too")
    [(_, joined)] = values.inputs(JobRef(3, "c", ROOT, LENGTH.name)).leaves
    assert encoding.decode(values._storage.read(joined)) == ["of the second", "too"]
