"""Critical path of workflows: the time a step must leave for the steps after it. Cached until predictions move."""

from __future__ import annotations

from collections.abc import Callable

from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import Scope


class CriticalPath:
    def __init__(self, fastest_us: Callable[[str], int]) -> None:
        self._fastest_us = fastest_us  #: of a function, on the device that suits it best
        self._remaining_us: dict[int, dict[str, int]] = {}  #: by identity of the flow, which its runs keep alive

    def invalidate(self) -> None:
        self._remaining_us.clear()

    def remaining_us(self, scope: Scope, node: str) -> int:
        """Least time from the end of this node to the end of the run."""
        total_us = self._remaining_in(scope.flow)[node]
        while scope.parent is not None:
            total_us += self._remaining_in(scope.parent.flow)[scope.node]
            scope = scope.parent
        return total_us

    def _remaining_in(self, flow: Flow) -> dict[str, int]:
        remaining_us = self._remaining_us.get(id(flow))
        if remaining_us is None:
            remaining_us = self._remaining_us[id(flow)] = flow.remaining_path_us(self._fastest_us)
        return remaining_us
