"""Cost of a decision, counted: an event asks about few functions, however many wait."""

from __future__ import annotations

import pytest
from benchmarks.controller import Crowd

from lamina.policies import frontier


@pytest.mark.parametrize("functions", [20, 100])
def test_an_event_asks_about_a_handful_of_functions_however_many_wait(functions: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    decide = frontier.Policy._decide

    def counted(*args: object) -> object:
        asked[-1] += 1
        return decide(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier.Policy, "_decide", counted)
    crowd = Crowd(frontier.Policy(), functions, before=lambda event: asked.append(0))
    crowd.play(1_000)
    crowd.controller.state.check()
    assert len(crowd.controller.state.deferred) > functions // 2
    late = asked[functions * 2 :]
    assert sum(late) / len(late) < 1.5
