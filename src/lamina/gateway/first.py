"""Grace for cold starts: until one has been observed, calls past their SLO are served late instead of shed.

The first calls of a function wait for its first load, and how long that takes is not known before. A rejected call would teach
nothing, and one dropped after the wait would have waited for nothing. So until one load of everything a target needs has been
observed (or its profile says how long one takes), late calls are served, and counted as late. From then on admission knows what
a cold start costs. A deadline that the client sent stays one.
"""

from __future__ import annotations

import msgspec

from lamina.core.lifecycle import Phase
from lamina.core.state import FunctionState
from lamina.live.loop import LiveLoop
from lamina.types import Slo


class FirstCalls:
    """Decides which SLO a call is held to."""

    def __init__(self, loop: LiveLoop) -> None:
        self._loop = loop
        self._known: set[str] = set()

    def slo(self, target: str, slo: Slo) -> Slo:
        """The SLO of a call without a deadline of its own."""
        if target in self._known or slo.on_miss == "serve":
            return slo
        state = self._loop.controller.state
        flow = state.flows.get(target)
        if flow is None or all(self._is_known(state.functions[name]) for name in flow.functions):
            self._known.add(target)
            return slo
        return msgspec.structs.replace(slo, on_miss="serve")

    def _is_known(self, function: FunctionState) -> bool:
        if any(instance.phase is Phase.WARM for instance in function.instances.values()):
            return True
        controller = self._loop.controller
        kinds = {device.spec.kind for device in controller.state.devices.values()}
        return any(controller.predictor.load_us(function.spec.name, kind) for kind in kinds)
