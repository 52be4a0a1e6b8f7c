"""Active apps: the version of each app that is served, and how that changes; all of an app or nothing, while calls go on."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from lamina.access.records import Identity
from lamina.core.events import Deployed
from lamina.core.lifecycle import Phase
from lamina.core.state import FunctionState
from lamina.errors import Forbidden, NotFound, did_you_mean
from lamina.gateway import versions
from lamina.gateway.api import Api
from lamina.gateway.terms import Terms
from lamina.gateway.trial import Trial
from lamina.gateway.versions import Served
from lamina.live.loop import LiveLoop
from lamina.live.triggers import Triggers
from lamina.planner.room import check_room
from lamina.types import DeviceSpec, FunctionSpec, Tenant


class Failed(Struct, frozen=True):
    """Why a rollout failed. Messages and traces of code are for identities that may deploy it; others get the kind of error."""

    in_short: str
    in_full: str


class Stage:
    """The active version of every app. `first` is the app the server was started with."""

    def __init__(self, loop: LiveLoop, api: Api, first: Served) -> None:
        self._loop = loop
        self._api = api
        self._triggers: Triggers | None = None
        self.first = first
        self.served: dict[str, Served] = {first.app: first}
        self.terms: dict[str, Terms] = {}
        self.failed: dict[str, Failed] = {}  #: by app: why the last version was taken back
        self.trials: dict[str, Trial] = {}  #: by app: of a version that is not known to stand yet
        api.needless = lambda: {name for trial in self.trials.values() for name in trial.raised}

    # ------------------------------------------------------------------ permissions

    def seen_by(self, who: Identity) -> list[Served]:
        return [served for served in self.served.values() if _sees(who, served)]

    def known(self, who: Identity, app: str) -> Served:
        served = self.served.get(app)
        if served is None or not _sees(who, served):
            seen = [one.app for one in self.seen_by(who)]
            raise NotFound(f"no app {app[:80]!r}", hint=did_you_mean(app[:80], seen, "lamina ls"))
        return served

    def owner_of(self, who: Identity, function: str) -> Served:
        """The app that has this function, if this identity may change it."""
        owner = self._app_with(function)
        if owner is None or not _sees(who, owner):
            seen = [spec.name for one in self.seen_by(who) for spec in one.manifest.functions]
            raise NotFound(f"no function {function[:80]!r}", hint=did_you_mean(function[:80], seen, "lamina ls"))
        self.may_touch(who, owner)
        return owner

    def may_touch(self, who: Identity, served: Served | None) -> None:
        if served is not None and who.tenant and served.tenant != who.tenant:
            raise Forbidden(f"the app {served.app!r} is not of tenant {who.tenant!r}", hint="deploy under another name")

    def tenant_of(self, function: str) -> str:
        owner = self._app_with(function)
        return owner.tenant if owner is not None else ""

    def _app_with(self, function: str) -> Served | None:
        return next((one for one in self.served.values() if any(f.name == function for f in one.manifest.functions)), None)

    # ------------------------------------------------------------------- activation

    @property
    def devices(self) -> list[DeviceSpec]:
        return [device.spec for device in self._loop.controller.state.devices.values()]

    def check(self, served: Served, tenant: Tenant | None) -> None:
        """Would it all fit, beside the other apps, and within the tenant's quota?"""
        specs = served.functions(self.terms)
        others = [spec for one in self.served.values() if one.app != served.app for spec in one.functions(self.terms)]
        check_room(self.devices, others, specs)
        mine = [one for one in self.served.values() if one.tenant == served.tenant and one.app != served.app]
        versions.check_quota(tenant, specs + [spec for one in mine for spec in one.functions(self.terms)])

    def activate(self, served: Served) -> None:
        """Serve this version. The controller rejects it before it changes anything, and then nothing changes here either."""
        before = self.served.get(served.app)
        specs = served.functions(self.terms)
        gone = _retired(before, specs, self._loop.controller.state.functions) if before is not None else []
        engine = self._loop.engine
        places: list[dict[str, str]] = [part.apps for part in getattr(engine, "parts", [engine]) if hasattr(part, "apps")]
        before_paths = [dict(place) for place in places]
        for place in places:
            place.update({spec.name: served.path for spec in specs if served.path})
        try:
            self._loop.post(Deployed((*specs, *gone), served.manifest.flows))
        except BaseException:
            for place, was in zip(places, before_paths, strict=True):
                place.clear()
                place.update(was)
            raise
        self._set_triggers(served)
        self.served[served.app] = served
        self.failed.pop(served.app, None)
        self._api.set_targets([target for one in self.served.values() for target in one.targets()])

    def try_out(self, served: Served) -> Trial:
        """Serve this version, and watch whether it can be loaded."""
        trial = Trial(self._loop, [spec.name for spec in served.manifest.functions])
        self.activate(served)
        self.trials[served.app] = trial
        return trial

    def open_triggers(self, triggers: Triggers | None) -> None:
        """Set the triggers of all apps. Opened after deployments: those of the initial app may have been replaced."""
        self._triggers = triggers
        for served in self.served.values():
            self._set_triggers(served)

    def _set_triggers(self, served: Served) -> None:
        if self._triggers is not None:
            self._triggers.set_app(served.app, served.manifest.triggers, [spec.name for spec in served.manifest.functions])

    # ----------------------------------------------------------------------- status

    def state_of(self, served: Served) -> str:
        """`rolling` until the version is warm and no older one is left, `halted` if it cannot be loaded, else `serving`."""
        trial = self.trials.get(served.app)
        halted = self._loop.controller.renewal.halted
        if (served.is_empty and served is not self.first) or (trial is not None and trial.state == "halted"):
            return "halted"
        if any(spec.name in halted for spec in served.manifest.functions):
            return "halted"
        return "rolling" if (trial is not None and trial.state == "rolling") or self.is_mixed(served) else "serving"

    def is_mixed(self, served: Served) -> bool:
        """Are there instances of an older version?"""
        return any(self._loop.controller.renewal.outdated(one) for one in self._functions(served))

    def about(self, served: Served, *, in_full: bool = True) -> dict[str, Any]:
        """Summary of an app. `in_full`: for identities that may deploy it, also what its code said when it failed."""
        failed = self.failed.get(served.app)
        return {
            "app": served.app,
            "version": served.number,
            "tenant": served.tenant,
            "state": self.state_of(served),
            "failed": "" if failed is None else failed.in_full if in_full else failed.in_short,
            "functions": [self._about(one) for one in self._functions(served)],
            "workflows": [flow.name for flow in served.manifest.flows],
            "triggers": [trigger.name for trigger in served.manifest.triggers],
        }

    def _about(self, function: FunctionState) -> dict[str, Any]:
        return {
            "name": function.spec.name,
            "instances": len(function.instances),
            "ready": sum(one.phase is Phase.WARM for one in function.instances.values()),
            "old": len(self._loop.controller.renewal.outdated(function)),
            "min": function.spec.scale.min,
            "max": function.spec.scale.max,
            "queue": len(function.queue),
        }

    def _functions(self, served: Served) -> list[FunctionState]:
        functions = self._loop.controller.state.functions
        return [functions[spec.name] for spec in served.manifest.functions]


def _sees(who: Identity, served: Served) -> bool:
    return not who.tenant or not served.tenant or served.tenant == who.tenant


def _retired(before: Served, specs: list[FunctionSpec], known: dict[str, FunctionState]) -> list[FunctionSpec]:
    """Functions the new version no longer has: runs in flight may still need them, but no instance is required."""
    names = {spec.name for spec in specs}
    old = [known[spec.name].spec for spec in before.manifest.functions if spec.name not in names and spec.name in known]
    return [msgspec.structs.replace(spec, scale=msgspec.structs.replace(spec.scale, min=0)) for spec in old]
