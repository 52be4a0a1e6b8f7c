"""How much time a step must leave for those after it. Owner of what has been worked out, until predictions move."""

from __future__ import annotations

from lamina.core.flow import Flow
from lamina.core.policy import Predictor
from lamina.core.run import Run
from lamina.core.state import State


class Slack:
    def __init__(self, state: State, predictor: Predictor) -> None:
        self._state = state
        self._predictor = predictor
        self._tails: dict[int, dict[str, int]] = {}  #: by identity of the flow, which its runs keep alive

    def forget(self) -> None:
        self._tails.clear()

    def tail_us(self, run: Run, scope_id: int, node: str) -> int:
        """Least time from the end of this node to the end of the run."""
        scope = run.scopes[scope_id]
        total_us = self._tails_of(scope.flow)[node]
        while scope.parent is not None:
            total_us += self._tails_of(scope.parent.flow)[scope.each]
            scope = scope.parent
        return total_us

    def fastest_us(self, function: str) -> int:
        """A job alone on the device that suits it best; 0 while nobody knows."""
        spec = self._state.functions[function].spec
        times = [
            self._predictor.latency_us(function, device.spec.kind, 1, spec.units_on(device.spec))
            for device in self._state.devices.values()
            if spec.fits_family(device.spec.family)
        ]
        return min(times, default=0)

    def _tails_of(self, flow: Flow) -> dict[str, int]:
        tails = self._tails.get(id(flow))
        if tails is None:
            tails = self._tails[id(flow)] = flow.tails(self.fastest_us)
        return tails
