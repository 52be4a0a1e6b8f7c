"""Grace for cold starts: until one has been observed, calls past their SLO are served late instead of shed.

The first calls of a function wait for its first load, and how long that takes is not known before. A rejected call would teach
nothing, and one dropped after the wait would have waited for nothing. So until one load of everything a target needs has been
observed (or its profile says how long one takes), late calls are served, and counted as late. From then on admission knows what
a cold start costs. A deadline that the client sent stays one.
"""

from __future__ import annotations

import msgspec

from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import FunctionState
from lamina.drivers.realtime import RealtimeDriver
from lamina.types import Slo


class ColdStartGrace:
    """Decides which SLO a call is held to."""

    def __init__(self, loop: RealtimeDriver) -> None:
        self._loop = loop
        self.observed: set[str] = set()  #: targets whose loads were: they are held to their own SLO

    def effective_slo(self, target: str, slo: Slo) -> Slo:
        """The SLO of a call without a deadline of its own."""
        if target in self.observed or slo.on_miss == "serve":
            return slo
        state = self._loop.controller.state
        flow = self._loop.controller.flows.get(target)
        if flow is None or all(self._has_observed_load(state.functions[name]) for name in flow.functions):
            self.observed.add(target)
            return slo
        return msgspec.structs.replace(slo, on_miss="serve")

    def _has_observed_load(self, function: FunctionState) -> bool:
        if any(instance.phase is InstancePhase.WARM for instance in function.instances.values()):
            return True
        controller = self._loop.controller
        kinds = {device.spec.kind for device in controller.state.devices.values()}
        return any(controller.predictor.load_us(function.spec.name, kind) for kind in kinds)
