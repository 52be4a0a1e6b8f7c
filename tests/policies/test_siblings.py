"""The lines of a page are needed all: none is read for a page whose last line would be late."""

from __future__ import annotations

import pytest

from lamina.core.flow import Each, Flow, Task
from lamina.policies import frontier
from lamina.types import DeviceSpec, Scale, Slo
from tests.script import Script, a_function

MS = 1_000
LINES = Each("lines", Flow("line", {"read": Task("read", "read")}, ("read",)), (), expect=1)
PAGE = Flow("page", {"find": Task("find", "find", ("lines",)), "lines": LINES}, ("find",), Slo(latency_us=50 * MS))


@pytest.mark.parametrize(
    ("cores", "lines", "ending", "read"),
    [
        pytest.param(1, 4, "reply", 4, id="in time one after the other"),
        pytest.param(1, 8, "deadline", 0, id="too many"),
        pytest.param(2, 8, "reply", 8, id="in time side by side"),
        pytest.param(2, 12, "deadline", 0, id="too many even so"),
    ],
)
def test_a_page_is_given_up_as_a_whole_before_its_lines_are_read(script: Script, cores: int, lines: int, ending: str, read: int):
    """Five milliseconds to find the lines, ten to read each, fifty for all."""
    scale = Scale(min=cores, max=cores)
    script.given(
        a_function("find", gpu="no", scale=scale),
        a_function("read", gpu="no", max_batch=8, scale=scale),
        flows=[PAGE],
        devices=[DeviceSpec(id="cpu0", kind="cpu", units=cores, memory_mib=8192, family="cpu", owned=True)],
        policy=frontier.Policy(),
        takes={"find": lambda batch, units: 5 * MS, "read": lambda batch, units: 10 * MS * batch},
        engine=True,
    )
    script.answers["lines"] = [lines]
    script.at(0).arrives("c1", target="page", within_us=50 * MS)
    script.at(500 * MS)
    assert script.ending("c1") == ending
    assert sum(len(batch.jobs) for batch in script.batches if batch.function == "read") == read
