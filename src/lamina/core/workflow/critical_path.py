"""Critical path of workflows: the time a step must leave for the steps after it. Cached until predictions move."""

from __future__ import annotations

from lamina.core.policy import Predictor
from lamina.core.scheduling.state import ControllerState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import WorkflowRun


class CriticalPath:
    def __init__(self, state: ControllerState, predictor: Predictor, *, any_size: bool = False) -> None:
        self._state = state
        self._picks_slice_size = any_size  #: the policy may take the largest slices where it must
        self._predictor = predictor
        self._remaining_us: dict[int, dict[str, int]] = {}  #: by identity of the flow, which its runs keep alive

    def invalidate(self) -> None:
        self._remaining_us.clear()

    def remaining_us(self, run: WorkflowRun, scope_id: int, node: str) -> int:
        """Least time from the end of this node to the end of the run."""
        scope = run.scopes[scope_id]
        total_us = self._remaining_in(scope.flow)[node]
        while scope.parent is not None:
            total_us += self._remaining_in(scope.parent.flow)[scope.node]
            scope = scope.parent
        return total_us

    def fastest_us(self, function: str) -> int:
        """Latency of a job alone on the device that suits it best; 0 while not known."""
        spec = self._state.functions[function].spec
        times: dict[tuple[str, int], int] = {}
        for device in self._state.devices.values():
            where = device.spec
            if spec.fits_family(where.family) and (where.kind, where.units) not in times:
                us = 0
                if self._picks_slice_size and where.limits.per_batch:
                    us = self._predictor.latency_us(
                        function, where.kind, 1, max(where.limits.sizes, default=where.units), where.cores
                    )
                us = us or self._predictor.latency_us(function, where.kind, 1, spec.units_on(where), spec.cores_on(where))
                times[where.kind, where.units] = us
        return min(times.values(), default=0)

    def _remaining_in(self, flow: Flow) -> dict[str, int]:
        tails = self._remaining_us.get(id(flow))
        if tails is None:
            tails = self._remaining_us[id(flow)] = flow.remaining_path_us(self.fastest_us)
        return tails
