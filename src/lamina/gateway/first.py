"""The first calls of a function wait for its first load, and nobody knows beforehand how long that takes.

An SLO is no reason to turn them away: refused, they would learn nothing, and given up after the wait they would have waited
for nothing. So until one load of everything a target needs has been seen (or its profile says how long one takes), what is late
is served, and counted as late. From then on admission knows what a cold start costs. A deadline that the caller sent stays one.
"""

from __future__ import annotations

import msgspec

from lamina.core.lifecycle import Phase
from lamina.core.state import FunctionState
from lamina.live.loop import LiveLoop
from lamina.types import Slo


class FirstCalls:
    def __init__(self, loop: LiveLoop) -> None:
        self._loop = loop
        self._known: set[str] = set()

    def slo(self, target: str, slo: Slo) -> Slo:
        """What this call is held to, if the caller says nothing."""
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
