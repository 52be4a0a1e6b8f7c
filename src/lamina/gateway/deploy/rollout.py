"""Rollout of a new version: it is served once one instance of each of its functions is warm.

A function that scales to zero is asked for one instance until that is ready, or cannot be loaded; then its own scale holds
again, and the instance leaves when it has been idle for as long as that allows. Where there is no room for one now, nothing
is known against the version, and the rollout does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from lamina.core.events import Deployed
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import LaminaError
from lamina.planner.slo_check import slo_shortfalls
from lamina.types import FunctionSpec

NO_ROOM_S = 3.0
"""Policies with periodic decisions decide more often: a function without an instance by then has no room."""


class Rollout:
    """One rollout. Made before the controller knows the version: load errors of earlier ones are cleared here."""

    def __init__(self, loop: RealtimeDriver, functions: Iterable[str]) -> None:
        self._loop = loop
        self._pending = list(functions)
        self._deadline_s: dict[str, float] = {}  #: by when those without an instance have one, if there is room
        self.scaled_up: set[str] = set()  #: functions that were asked for an instance they need not have
        self.state = "rolling"  #: then `halted`, if one cannot be loaded, or `serving`
        for name in self._pending:
            loop.engine.load_errors.pop(name, None)
            loop.engine.shared.probe_times.pop(name, None)

    def poll(self) -> None:
        """Check progress; called now and then, once the controller knows the version."""
        self._pending = [name for name in self._pending if self._is_pending(self._loop.controller.state.functions[name])]
        if not self._pending and self.state == "rolling":
            self.state = "serving"

    def _is_pending(self, function: FunctionState) -> bool:
        name, version = function.spec.name, function.spec.version
        own = [one for one in function.instances.values() if one.version == version]
        if any(one.phase is not InstancePhase.LOADING for one in own):
            return False
        if name in self._loop.engine.load_errors:
            self.state = "halted"
            return True
        if own or self._loop.controller.rolling_update.outdated(function):
            return True
        now_s = asyncio.get_running_loop().time()
        if name not in self._deadline_s:
            self._deadline_s[name] = now_s + NO_ROOM_S
            self._scale_up(function.spec)
        return now_s < self._deadline_s[name]

    def _scale_up(self, spec: FunctionSpec) -> None:
        if not spec.scale.min:
            self.scaled_up.add(spec.name)
            scale = msgspec.structs.replace(spec.scale, min=1, max=max(1, spec.scale.max))
            with contextlib.suppress(LaminaError):  # the policy has no place for it
                self._loop.post(Deployed((msgspec.structs.replace(spec, scale=scale),)))

    def impossible_slo(self, specs: Sequence[FunctionSpec], flows: Sequence[Flow]) -> str:
        """What is wrong with an SLO of this version, by the times of the first runs of its functions; "": nothing is known."""
        times = self._loop.engine.shared.probe_times
        found = [(spec.name, units, float(us)) for spec in specs for batch, units, us in times.get(spec.name, ()) if batch == 1]
        return "; ".join(f"{one} ({one.hint})" for one in slo_shortfalls(specs, found, flows) if one.is_impossible)

    def finish(self, specs: Iterable[FunctionSpec]) -> None:
        """Restore the scale of functions; `specs` are the ones that hold now."""
        own = tuple(spec for spec in specs if spec.name in self.scaled_up)
        self.scaled_up.clear()
        if own:
            self._loop.post(Deployed(own))
