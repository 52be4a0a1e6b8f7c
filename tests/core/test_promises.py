"""What broken promises teach, and what they do not."""

from __future__ import annotations

import pytest

from lamina.core.flow import Choice, Flow, Task
from lamina.core.promises import Promises
from lamina.core.queue import Job
from lamina.core.run import Run
from lamina.types import Call

CASCADE = Flow(
    "cascade",
    {
        "small": Task("small", "small", ("sure",)),
        "sure": Choice("sure", (("large",), ()), odds=(0.3, 0.7)),
        "large": Task("large", "large"),
    },
    ("small",),
)


def falls_at(node: str) -> int:
    """The reserve after a run was given up there, of the 40 ms it had."""
    promises, run = Promises(), Run(Call("c", "cascade", 0, 40_000, 40_000), CASCADE)
    run.jobs[1] = Job(1, run, 0, node, node, 0, 40_000, 40_000)
    promises.ended(run, in_time=False)
    return promises.reserve_us("cascade")


@pytest.mark.parametrize(("node", "learnt"), [("small", True), ("large", False)])
def test_only_steps_that_all_runs_come_to_widen_the_reserve(node: str, learnt: bool):
    assert (falls_at(node) > 0) is learnt
