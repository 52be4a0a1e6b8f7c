"""Feasibility of a run: the lines of a page are all needed; none is read for a page whose last line would be late."""

from __future__ import annotations

import pytest

from lamina.core.workflow.flow import Each, Flow, Task
from lamina.policies import frontier
from lamina.policies.frontier.config_table import ConfigTables
from lamina.policies.frontier.run_feasibility import RunFeasibility
from lamina.types import DeviceSpec, ScaleSpec, Slo
from tests.script import Script, a_function

MS = 1_000
LINES = Each("lines", Flow("line", {"read": Task("read", "read")}, ("read",)), (), expected_items=1)
PAGE = Flow("page", {"find": Task("find", "find", ("lines",)), "lines": LINES}, ("find",), Slo(latency_us=50 * MS))


def a_page_of(lines: int, script: Script, cores: int, instances: int, read_on=range(1, 9)) -> None:
    """`read_on`: the slices on which anybody knows how long reading takes."""
    scale = ScaleSpec(min=instances, max=instances)
    script.given(
        a_function("find", gpu="no", scale=scale),
        a_function("read", gpu="no", max_batch=8, scale=scale, cores=1),
        flows=[PAGE],
        devices=[DeviceSpec(id="cpu0", kind="cpu", units=cores, memory_mib=8192, family="cpu", owned=True)],
        policy=frontier.Policy(),
        takes={"find": lambda batch, units: 5 * MS, "read": lambda batch, units: 10 * MS * batch * (units in read_on)},
        engine=True,
    )
    script.answers["lines"] = [lines]
    script.at(0).arrives("c1", target="page", within_us=50 * MS)


@pytest.mark.parametrize(
    ("cores", "lines", "ending", "read"),
    [
        pytest.param(1, 4, "reply", 4, id="in time one after the other"),
        pytest.param(1, 8, "deadline", 0, id="too many"),
        pytest.param(2, 8, "reply", 8, id="in time side by side"),
        pytest.param(2, 14, "deadline", 0, id="too many even so"),
    ],
)
def test_a_page_is_given_up_as_a_whole_before_its_lines_are_read(script: Script, cores: int, lines: int, ending: str, read: int):
    """Five milliseconds to find the lines, ten to read each, fifty for all."""
    a_page_of(lines, script, cores, instances=cores)
    script.at(500 * MS)
    assert script.ending("c1") == ending
    assert sum(len(batch.jobs) for batch in script.batches if batch.function == "read") == read


def test_nothing_is_hoped_of_a_slice_that_was_never_tried(script: Script):
    a_page_of(8, script, cores=2, instances=1, read_on=[1])
    script.at(500 * MS)
    assert [batch.function for batch in script.batches] == ["find"]


def test_a_run_that_can_be_in_time_is_asked_about_again_after_a_sixteenth_of_its_time(script: Script):
    """Its lines wait, with forty-five milliseconds left. A moment later reading is thought to be slower."""
    a_page_of(12, script, cores=1, instances=1, read_on=[])
    script.at(5 * MS)
    view, feasibility = script.controller.view, RunFeasibility(ConfigTables())
    read = view.functions["read"]

    def hopeless(at_us: int) -> bool:
        view.now_us = at_us
        return feasibility.is_infeasible(view, read, read.queue.head())

    first = hopeless(5 * MS)
    script.predictor.takes["read"] = 90 * MS
    assert (first, hopeless(7 * MS), hopeless(8 * MS)) == (False, False, True)
