"""Active apps: the version of each app that is served, and how that changes; all of an app or nothing, while calls go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from lamina.gateway.routes.targets import CallTarget, TargetRegistry, TrafficSplit
from lamina.planner.capacity_check import absent_bodies, check_capacity
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
        self.beside: dict[str, dict[int, AppVersion]] = {}  #: by app and number: versions served beside the active one
        self._splits: dict[str, Callable[[CallTarget], CallTarget]] = {}  #: by app: how its calls are divided
        targets.add_optional(lambda: {name for rollout in self.rollouts.values() for name in rollout.scaled_up})
        targets.add_optional(lambda: {name for more in self.beside.values() for one in more.values() for name in one.names})

    def restore_overrides(self, overrides: dict[str, FunctionOverrides]) -> None:
        """Those that the store has, after a restart."""
        self.overrides = overrides

    def set_override(self, function: str, given: FunctionOverrides) -> None:
        self.overrides[function] = given

    # ------------------------------------------------------------------ permissions

    def visible_to(self, grant: Grant) -> list[AppVersion]:
        return [served for served in self.apps.values() if grant.sees(served.tenant)]

    def find_app(self, grant: Grant, app: str) -> AppVersion:
        """An app, if the caller reaches it."""
        return _reached(grant, self.apps.get(app), "app", app, [one.app for one in self.visible_to(grant)])

    def app_with_function(self, grant: Grant, function: str) -> AppVersion:
        """The app that has this function, if the caller reaches it."""
        seen = [spec.name for one in self.visible_to(grant) for spec in one.manifest.functions]
        return _reached(grant, self._app_with(function), "function", function, seen)

    def _app_with(self, function: str) -> AppVersion | None:
        return next((one for one in self.apps.values() if any(f.name == function for f in one.manifest.functions)), None)

    # ------------------------------------------------------------------- activation

    @property
    def devices(self) -> list[DeviceSpec]:
        return [device.spec for device in self._loop.controller.state.devices.values()]

    def check(self, served: AppVersion, tenant: Tenant | None) -> None:
        """Would it all fit, beside the other apps, and within the tenant's quota?"""
        specs = served.function_specs(self.overrides)
        others = [spec for one in self._loaded_beside(served) for spec in one.function_specs(self.overrides)]
        absent = absent_bodies(served.manifest.flows, {spec.name: spec for spec in specs}, self.devices)
        check_capacity(self.devices, others, [spec for spec in specs if spec.name not in absent])
        mine = [one for one in self.apps.values() if one.tenant == served.tenant and one.app != served.app]
        app_versions.check_quota(tenant, specs + [spec for one in mine for spec in one.function_specs(self.overrides)])

    def _loaded_beside(self, served: AppVersion) -> list[AppVersion]:
        """What else is loaded: other apps, versions that get calls beside them, and for one of those its own app."""
        apps = [one for one in self.apps.values() if one.app != served.app or served.own_names]
        return apps + [one for more in self.beside.values() for one in more.values() if one.names != served.names]

    def activate(self, served: AppVersion) -> None:
        """Serve this version. The controller rejects it before it changes anything, and then nothing changes here either."""
        before = self.apps.get(served.app)
        specs = served.function_specs(self.overrides)
        self._deploy(served, specs, _retired_specs(before, specs, self._functions_known) if before is not None else [])
        self._set_triggers(served)
        self.apps[served.app] = served
        self.failures.pop(served.app, None)
        self._publish()
        if self._triggers is not None:
            self._triggers.refresh()

    def start_beside(self, version: AppVersion) -> Rollout:
        """Load a version beside the active one; it gets calls when a split says so."""
        rollout = Rollout(self._loop, [spec.name for spec in version.manifest.functions])
        self._deploy(version, version.function_specs(self.overrides), [])
        self.beside.setdefault(version.app, {})[version.number] = version
        return rollout

    def retire_beside(self, version: AppVersion) -> None:
        """Let a version go: calls in flight may still need it, but no instance is required."""
        self.beside.get(version.app, {}).pop(version.number, None)
        retired = tuple(_retired_specs(version, [], self._functions_known))
        if retired:
            self._loop.post(Deployed(retired))

    def divide(self, app: str, split: Callable[[CallTarget], CallTarget] | None) -> None:
        """Divide the calls of an app: `split` makes of each target of the active version the one that is published."""
        if split is None:
            self._splits.pop(app, None)
        else:
            self._splits[app] = split
        self._publish()

    def _deploy(self, served: AppVersion, specs: list[FunctionSpec], retired: list[FunctionSpec]) -> None:
        shared = self._loop.engine.shared
        sources_before = shared.sources
        source = TargetSource(served.app, served.tenant, served.path, served.user, served.python)
        sources = {name: msgspec.structs.replace(source, name=served.own_names.get(name, "")) for name in served.names}
        shared.set_sources({**sources_before, **sources})
        try:
            self._loop.post(Deployed((*specs, *retired), served.manifest.flows))
        except BaseException:
            shared.set_sources(sources_before)
            raise

    def _publish(self) -> None:
        """Tell routes what can be called. A target that only a version beside the active one has is that version's alone."""
        found: list[CallTarget] = []
        for served in self.apps.values():
            split = self._splits.get(served.app, _undivided)
            targets = served.call_targets()
            known = {target.name for target in targets}
            for version in self.beside.get(served.app, {}).values() if served.app in self._splits else ():
                for target in version.call_targets():
                    own = version.own_names[target.name]
                    if own not in known:
                        known.add(own)
                        targets.append(replace(target, name=own, split=TrafficSplit(target, [(target, 1)])))
            found += [target if target.split is not None else split(target) for target in targets]
        self._targets.replace(found)

    @property
    def _functions_known(self) -> dict[str, FunctionState]:
        return self._loop.controller.state.functions

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
            "each": [
                {"id": one.id, "device": one.device, "phase": one.phase.value, "old": one.version != function.spec.version}
                for one in function.instances.values()
            ],
            "ready": sum(one.phase is InstancePhase.WARM for one in function.instances.values()),
            "old": len(self._loop.controller.rolling_update.outdated(function)),
            "min": function.spec.scale.min,
            "max": function.spec.scale.max,
            "queue": len(function.queue),
        }

    def _functions(self, served: AppVersion) -> list[FunctionState]:
        functions = self._loop.controller.state.functions
        return [functions[spec.name] for spec in served.manifest.functions]


def _undivided(target: CallTarget) -> CallTarget:
    return target


def _retired_specs(before: AppVersion, specs: list[FunctionSpec], known: dict[str, FunctionState]) -> list[FunctionSpec]:
    """Functions the new version no longer has: runs in flight may still need them, but no instance is required."""
    names = {spec.name for spec in specs}
    old = [known[spec.name].spec for spec in before.manifest.functions if spec.name not in names and spec.name in known]
    return [msgspec.structs.replace(spec, scale=msgspec.structs.replace(spec.scale, min=0)) for spec in old]


def _reached(grant: Grant, found: AppVersion | None, kind: str, name: str, seen: list[str]) -> AppVersion:
    missing = NotFound(f"no {kind} {name[:80]!r}", hint=did_you_mean(name[:80], seen, "lamina ls"))
    if found is None:
        raise missing
    grant.check_owner(found.tenant, missing)
    return found
