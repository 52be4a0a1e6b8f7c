"""A new version takes over from the old one without a call noticing. Owner of who replaces whom.

One instance of a function at a time: its successor is loaded beside it, or on another device that has the room, and only when
that one is ready does the old one finish what it has and leave. Where there is no room for both, the old one leaves first, and
calls wait for the new one. A successor that cannot be loaded ends the renewal: what is left of the old version goes on serving.
"""

from __future__ import annotations

from collections.abc import Iterable

from lamina.core.fleet import Fleet
from lamina.core.lifecycle import Phase
from lamina.core.policy import LoadOn, UnloadOf
from lamina.core.state import FunctionState, Instance, State
from lamina.errors import PolicyError


class Renewal:
    def __init__(self, state: State, fleet: Fleet) -> None:
        self._state = state
        self._fleet = fleet
        self._replaces: dict[str, str] = {}  #: instances being loaded, and the old ones that will leave for them
        self.halted: dict[str, str] = {}  #: functions whose new version cannot be loaded, and which that is

    def begin(self, functions: Iterable[str]) -> None:
        for name in functions:
            self.halted.pop(name, None)
            self._go_on(self._state.functions[name])

    def ready(self, instance: Instance) -> None:
        """A successor, or any other instance, can take batches now."""
        old = self._replaces.pop(instance.id, "")
        if old in self._state.instances:
            self._fleet.unload(UnloadOf(old))
        self._go_on(self._state.functions[instance.function])

    def lost(self, instance: Instance) -> None:
        """Called before it is forgotten."""
        if self._replaces.pop(instance.id, "") and instance.phase is Phase.LOADING:
            self.halted[instance.function] = instance.version

    def outdated(self, function: FunctionState) -> list[Instance]:
        """Instances of another version that do not leave yet."""
        version = function.spec.version
        return [i for i in function.instances.values() if i.version != version and i.phase is not Phase.DRAINING]

    def _go_on(self, function: FunctionState) -> None:
        name = function.spec.name
        if name in self.halted or any(new in self._replaces for new in function.instances):
            return
        for old in self.outdated(function):
            if old.phase is Phase.LOADING:
                self._fleet.unload(UnloadOf(old.id))  # nobody has seen it yet
                continue
            new = self._successor(function, old)
            if new is not None:
                self._replaces[new.id] = old.id
                return
            self._fleet.unload(UnloadOf(old.id))

    def _successor(self, function: FunctionState, old: Instance) -> Instance | None:
        home_units = self._state.devices[old.device].homes.get(old.id, 0).bit_count()
        for device_id in dict.fromkeys([old.device, *self._state.devices]):
            device = self._state.devices[device_id]
            wanted = function.spec.units_on(device.spec) if home_units else 0
            if not function.spec.fits_family(device.spec.family):
                continue
            if not device.spare(wanted or function.spec.units_on(device.spec), borrow=not wanted):
                continue
            try:
                return self._fleet.load(LoadOn(function.spec.name, device_id, wanted))
            except PolicyError:
                continue  # no room there
        return None
