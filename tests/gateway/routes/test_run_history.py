"""History of a run as events."""

from __future__ import annotations

import pytest

from lamina.core.actions import Reply
from lamina.gateway.routes.runs import run_events
from lamina.store.runs import RunRow


@pytest.mark.parametrize("kind", ["function", "workflow"])
def test_what_has_one_step_says_where_it_ran(kind: str) -> None:
    row = RunRow("r1", kind, "take_in", "", "succeeded", 0, 0.0, 0, 100, 0, 200, 900, "")
    reply = Reply("r1", 700, late=False, queue_us=50, batch=1, slice="cpu0/0", cost=0.0)
    [step] = [event for event in run_events(row, [], reply) if event["kind"] == "step"]
    assert (step["step"], step["slice"], step["began_us"], step["ended_us"]) == ("take_in", "cpu0/0", 250, 900)


def test_what_has_no_step_shows_none() -> None:
    row = RunRow("r1", "workflow", "tidy", "", "succeeded", 0, 0.0, 0, 100, 0, 200, 900, "")
    assert [event["kind"] for event in run_events(row, [], Reply("r1", 700, late=False))] == ["accepted", "began", "ended"]
