"""Active apps: the version of each app that is served, and how that changes; all of an app or nothing, while calls go on."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from lamina.access.authorization import Grant
from lamina.core.events import Deployed
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import FunctionState
from lamina.drivers.engine import TargetSource
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import NotFound, did_you_mean
from lamina.gateway.deploy import app_versions
from lamina.gateway.deploy.app_versions import AppVersion
from lamina.gateway.deploy.overrides import FunctionOverrides
from lamina.gateway.deploy.rollout import Rollout
from lamina.gateway.routes.targets import TargetRegistry
from lamina.planner.capacity_check import check_capacity
from lamina.state.triggers import Triggers
from lamina.types import DeviceSpec, FunctionSpec, Tenant


class RolloutFailure(Struct, frozen=True):
    """Why a rollout failed. Messages and traces of code are for identities that may deploy it; others get the kind of error."""

    in_short: str
    in_full: str


class ActiveApps:
    """The active version of every app. `initial` is the app the server was started with."""

    def __init__(self, loop: RealtimeDriver, targets: TargetRegistry, initial: AppVersion) -> None:
        self._loop = loop
        self._targets = targets
        self._triggers: Triggers | None = None
        self.initial = initial
        self.apps: dict[str, AppVersion] = {initial.app: initial}
        self.overrides: dict[str, FunctionOverrides] = {}
        self.failures: dict[str, RolloutFailure] = {}  #: by app: why the last version was taken back
        self.rollouts: dict[str, Rollout] = {}  #: by app: of a version that is not known to stand yet
        targets.add_optional(lambda: {name for rollout in self.rollouts.values() for name in rollout.scaled_up})

    # ------------------------------------------------------------------ permissions

    def visible_to(self, grant: Grant) -> list[AppVersion]:
        return [served for served in self.apps.values() if grant.sees(served.tenant)]

    def find_app(self, grant: Grant, app: str) -> AppVersion:
        """An app, if the caller reaches it."""
        served = self.apps.get(app)
        seen = [one.app for one in self.visible_to(grant)]
        missing = NotFound(f"no app {app[:80]!r}", hint=did_you_mean(app[:80], seen, "lamina ls"))
        if served is None:
            raise missing
        grant.check_owner(served.tenant, missing)
        return served

    def app_with_function(self, grant: Grant, function: str) -> AppVersion:
        """The app that has this function, if the caller reaches it."""
        owner = self._app_with(function)
        seen = [spec.name for one in self.visible_to(grant) for spec in one.manifest.functions]
        missing = NotFound(f"no function {function[:80]!r}", hint=did_you_mean(function[:80], seen, "lamina ls"))
        if owner is None:
            raise missing
        grant.check_owner(owner.tenant, missing)
        return owner

    def _app_with(self, function: str) -> AppVersion | None:
        return next((one for one in self.apps.values() if any(f.name == function for f in one.manifest.functions)), None)

    # ------------------------------------------------------------------- activation

    @property
    def devices(self) -> list[DeviceSpec]:
        return [device.spec for device in self._loop.controller.state.devices.values()]

    def check(self, served: AppVersion, tenant: Tenant | None) -> None:
        """Would it all fit, beside the other apps, and within the tenant's quota?"""
        specs = served.function_specs(self.overrides)
        others = [spec for one in self.apps.values() if one.app != served.app for spec in one.function_specs(self.overrides)]
        check_capacity(self.devices, others, specs)
        mine = [one for one in self.apps.values() if one.tenant == served.tenant and one.app != served.app]
        app_versions.check_quota(tenant, specs + [spec for one in mine for spec in one.function_specs(self.overrides)])

    def activate(self, served: AppVersion) -> None:
        """Serve this version. The controller rejects it before it changes anything, and then nothing changes here either."""
        before = self.apps.get(served.app)
        specs = served.function_specs(self.overrides)
        gone = _retired_specs(before, specs, self._loop.controller.state.functions) if before is not None else []
        shared = self._loop.engine.shared
        sources_before = shared.sources
        source = TargetSource(served.app, served.tenant, served.path, served.user)
        shared.set_sources({**sources_before, **dict.fromkeys(served.names, source)})
        try:
            self._loop.post(Deployed((*specs, *gone), served.manifest.flows))
        except BaseException:
            shared.set_sources(sources_before)
            raise
        self._set_triggers(served)
        self.apps[served.app] = served
        self.failures.pop(served.app, None)
        self._targets.replace([target for one in self.apps.values() for target in one.call_targets()])

    def start_rollout(self, served: AppVersion) -> Rollout:
        """Serve this version, and watch whether it can be loaded."""
        rollout = Rollout(self._loop, [spec.name for spec in served.manifest.functions])
        self.activate(served)
        self.rollouts[served.app] = rollout
        return rollout

    def open_triggers(self, triggers: Triggers) -> None:
        """Set the triggers of all apps. Opened after deployments: those of the initial app may have been replaced."""
        self._triggers = triggers
        for served in self.apps.values():
            self._set_triggers(served)

    def _set_triggers(self, served: AppVersion) -> None:
        if self._triggers is not None:
            self._triggers.set_app(served.app, served.manifest.triggers, served.tenant)

    # ----------------------------------------------------------------------- status

    def rollout_state(self, served: AppVersion) -> str:
        """`rolling` until the version is warm and no older one is left, `halted` if it cannot be loaded, else `serving`."""
        rollout = self.rollouts.get(served.app)
        halted = self._loop.controller.rolling_update.halted
        if (served.is_empty and served is not self.initial) or (rollout is not None and rollout.state == "halted"):
            return "halted"
        if any(spec.name in halted for spec in served.manifest.functions):
            return "halted"
        return (
            "rolling"
            if (rollout is not None and rollout.state == "rolling") or self.has_outdated_instances(served)
            else "serving"
        )

    def has_outdated_instances(self, served: AppVersion) -> bool:
        """Are there instances of an older version?"""
        return any(self._loop.controller.rolling_update.outdated(one) for one in self._functions(served))

    def summary(self, served: AppVersion, *, in_full: bool = True) -> dict[str, Any]:
        """Summary of an app. `in_full`: for identities that may deploy it, also what its code said when it failed."""
        failed = self.failures.get(served.app)
        return {
            "app": served.app,
            "version": served.number,
            "tenant": served.tenant,
            "state": self.rollout_state(served),
            "failed": "" if failed is None else failed.in_full if in_full else failed.in_short,
            "functions": [self._function_summary(one) for one in self._functions(served)],
            "workflows": [flow.name for flow in served.manifest.flows],
            "triggers": [trigger.name for trigger in served.manifest.triggers],
        }

    def _function_summary(self, function: FunctionState) -> dict[str, Any]:
        return {
            "name": function.spec.name,
            "instances": len(function.instances),
            "ready": sum(one.phase is InstancePhase.WARM for one in function.instances.values()),
            "old": len(self._loop.controller.rolling_update.outdated(function)),
            "min": function.spec.scale.min,
            "max": function.spec.scale.max,
            "queue": len(function.queue),
        }

    def _functions(self, served: AppVersion) -> list[FunctionState]:
        functions = self._loop.controller.state.functions
        return [functions[spec.name] for spec in served.manifest.functions]


def _retired_specs(before: AppVersion, specs: list[FunctionSpec], known: dict[str, FunctionState]) -> list[FunctionSpec]:
    """Functions the new version no longer has: runs in flight may still need them, but no instance is required."""
    names = {spec.name for spec in specs}
    old = [known[spec.name].spec for spec in before.manifest.functions if spec.name not in names and spec.name in known]
    return [msgspec.structs.replace(spec, scale=msgspec.structs.replace(spec.scale, min=0)) for spec in old]
