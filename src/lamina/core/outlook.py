"""Jobs that runs in flight are yet to bring. Owner of `coming` of each function and of `expected` of each run.

A page that is being cut into lines has nothing queued where lines are read, and yet its eight lines are as good as
there: whoever promises a finish time has to count them.
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
        """One of those expected is here; one beyond them changes nothing."""
        came = min(1.0, run.expected.get(function, 0.0))
        if came:
            run.expected[function] -= came
            self._state.functions[function].coming -= came

    def end(self, run: Run) -> None:
        """However it ended, it brings no more."""
        for name, count in run.expected.items():
            self._state.functions[name].coming -= count
        run.expected = {}
