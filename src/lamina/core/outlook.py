"""Expected jobs: those that runs in flight are yet to bring, per function and per run.

A page that is being cut into lines has nothing queued where lines are read, and yet its eight lines are as good as
there: an estimate of completion has to count them.
"""

from __future__ import annotations

from lamina.core.run import Run
from lamina.core.state import State


class Outlook:
    def __init__(self, state: State) -> None:
        self._state = state

    def begin(self, run: Run) -> None:
        run.expected = dict(run.flow.visits)
        for name, count in run.expected.items():
            self._state.functions[name].coming += count

    def queued(self, run: Run, function: str) -> None:
        """Count one expected job as queued; one beyond them changes nothing."""
        came = min(1.0, run.expected.get(function, 0.0))
        if came:
            run.expected[function] -= came
            self._state.functions[function].coming -= came

    def end(self, run: Run) -> None:
        """Take off what an ended run would still have brought."""
        for name, count in run.expected.items():
            self._state.functions[name].coming -= count
        run.expected = {}
