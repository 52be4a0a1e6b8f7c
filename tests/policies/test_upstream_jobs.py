"""Upstream jobs: a step waits for them if one batch is better, and never past a deadline."""

from __future__ import annotations

import pytest

from lamina.core.actions import Reply
from lamina.core.workflow.flow import Flow, Task
from lamina.policies import edf
from lamina.types import DeviceSpec, Slo
from tests.script import Script, a_function

MS = 1_000
TWO = [DeviceSpec(id=name, kind="gpu", units=1, memory_mib=100) for name in ("gpu0", "gpu1")]
CHAIN = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",), slo=Slo(latency_us=200 * MS))


def chain(script: Script, *, g_us: int, max_batch: int = 8) -> Script:
    """`f` takes 2 ms whatever the batch; so does `g`, which takes `g_us`."""
    functions = [a_function("f", max_batch=max_batch, memory_mib=80), a_function("g", max_batch=8, memory_mib=80)]
    takes = {"f": 2 * MS, "g": g_us}
    return script.given(*functions, flows=[CHAIN], devices=TWO, policy=edf.Policy(), takes=takes, engine=True)


def sizes(script: Script, function: str) -> list[int]:
    return [len(batch.jobs) for batch in script.batches if batch.function == function]


def test_a_step_waits_for_those_whose_step_before_is_about_to_end(script: Script):
    chain(script, g_us=20 * MS, max_batch=1).at(0).arrives("c1", "c2", "c3", target="w", within_us=200 * MS)
    script.at(60 * MS)
    assert sizes(script, "f") == [1, 1, 1]
    assert sizes(script, "g") == [3]


def test_it_does_not_wait_where_alone_is_as_good(script: Script):
    chain(script, g_us=1 * MS, max_batch=1).at(0).arrives("c1", "c2", "c3", target="w", within_us=200 * MS)
    script.at(60 * MS)
    assert sizes(script, "g") == [1, 1, 1]


@pytest.mark.parametrize("within_ms", [24, 25, 27])
def test_it_never_waits_past_the_deadline_of_those_that_are_here(script: Script, within_ms: int):
    chain(script, g_us=20 * MS, max_batch=1).at(0).arrives("hurried", target="w", within_us=within_ms * MS)
    script.arrives("c2", "c3", target="w", within_us=200 * MS)
    script.at(200 * MS)
    ending = script.endings["hurried"]
    assert isinstance(ending, Reply)
    assert not ending.late
