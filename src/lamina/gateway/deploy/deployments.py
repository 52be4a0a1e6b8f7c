"""Deployments of apps to a running server: upload, check, record, roll out, roll back.

An upload is unpacked, described in a process of its own, checked, recorded, and only then made known to the controller, which
lets the new version take over without a lost call (rolling update). One deployment at a time is made known, and one of each
tenant is unpacked and described: what a tenant's code does while it is imported holds up no other tenant. A version whose
instances cannot be loaded is rolled back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lamina.access.access_control import AccessControl
from lamina.access.authorization import Grant
from lamina.access.records import Identity
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.app_environments import AppEnvironments
from lamina.errors import BadValue, Conflict, Forbidden, LaminaError, LoadFailed, NotFound
from lamina.gateway.deploy import app_package, app_versions, overrides, traffic
from lamina.gateway.deploy.active_apps import ActiveApps, RolloutFailure
from lamina.gateway.deploy.app_versions import AppVersion, VersionRecord
from lamina.gateway.deploy.overrides import FunctionOverrides
from lamina.gateway.deploy.rollout import Rollout
from lamina.gateway.deploy.tenant_isolation import TenantIsolation, give_folder, user_of_folder
from lamina.gateway.deploy.traffic import TrafficControl, TrafficRules, parse_rules
from lamina.gateway.routes.targets import TargetRegistry
from lamina.ipc.confinement import Confinement
from lamina.sdk.app import NAME_PATTERN, App
from lamina.sdk.model_bundle import DATA_MARK
from lamina.state.kv_state import adopt_scopes, owned_scope
from lamina.store.base import Session
from lamina.worker.app_manifest import AppManifest, TargetDescription, describe_app

log = logging.getLogger("lamina")

POLL_S = 0.05
KEPT_VERSIONS = 20
MAX_TRACE_CHARS = 4_000
RESTORE_S = 30.0
"""After a restart, calls are not accepted before the versions served last are warm again, or for at most so long."""


class Deployments:
    """Deploys, rolls back and overrides apps, one at a time."""

    def __init__(
        self,
        app: App,
        loop: RealtimeDriver,
        targets: TargetRegistry,
        access: AccessControl,
        folder: Path,
        file: str = "",
        isolation: TenantIsolation | None = None,
        environments: AppEnvironments | None = None,
    ) -> None:
        deployed = app.deployed()
        about = [
            TargetDescription(target.name, target.params, target.doc, target.signature, target.returns) for target in targets.all
        ]
        first = AppManifest(app.name, deployed.functions, deployed.flows, tuple(about), triggers=tuple(app.triggers))
        self.active = ActiveApps(loop, targets, AppVersion(app=app.name, number=0, tenant="", path=file, manifest=first))
        self._load_errors = loop.engine.load_errors
        self.traffic = TrafficControl(self.active, targets, self._load_error_of)
        self._access = access
        self._folder = folder
        self._isolation = isolation or TenantIsolation(access, None, trusts_deployers=True)
        self._environments = environments or AppEnvironments(folder / ".environments")
        self._lock = asyncio.Lock()  #: around what is served; nothing of a tenant's is read under it
        self._turns: dict[str, asyncio.Lock] = {}  #: of tenants
        self._incoming: dict[str, str] = {}  #: apps that are being unpacked, with their tenants
        self._watchers: set[asyncio.Task[None]] = set()

    async def restore(self) -> None:
        """After a restart: serve what was deployed. What cannot be served is left out, and logged."""
        stage = self.active
        await self._isolation.try_walls()
        stage.restore_overrides(await self._access.read(overrides.load_all))
        for app, number in (await self._access.read(app_versions.current)).items():
            if number:
                try:
                    stage.activate(await self._load_stored(app, number))
                except LaminaError as error:
                    log.warning("version %d of app %s is not served: %s", number, app, error)
                    continue
                if app == stage.initial.app:  # what is changed in its file is not seen, and nothing else says why
                    file = Path(stage.initial.path).name
                    back = f"lamina rollback {app} --to 0 goes back to it"
                    log.warning("app %s is served in version %d, as deployed, not as in %s: %s", app, number, file, back)
        await self._adopt_state()
        if stage.overrides:
            stage.activate(stage.apps[stage.initial.app])
        for app, rules in (await self._access.read(traffic.load_all)).items():
            try:
                if app in stage.apps:
                    await self._divide(stage.apps[app], rules, {})
            except LaminaError as error:
                log.warning("the traffic of app %s is not divided: %s", app, error)
        for _ in range(int(RESTORE_S / POLL_S)):  # the app of the file has begun to load; it is not what is wanted
            if not any(stage.has_outdated_instances(served) for served in stage.apps.values()):
                break
            await asyncio.sleep(POLL_S)

    async def _adopt_state(self) -> None:
        """Give the state of tenants' apps its owner, in a store of before state had owners."""
        owned: dict[str, str] = {}
        for app, number in (await self._access.read(app_versions.current)).items():
            past = await self._access.read(partial(app_versions.history, app=app))
            tenant = next((one.tenant for one in past if one.number == number), "")
            served = self.active.apps.get(app)
            if tenant:
                owned[f"app/{app}"] = owned_scope(tenant, "app", app)
                names = served.names if served is not None else []
                owned |= {f"workflow/{name}": owned_scope(tenant, "workflow", name) for name in names}
        if owned:
            now_us = self._access.now_us()
            await self._access.write(lambda db: adopt_scopes(db, owned, now_us))

    # ------------------------------------------------------------------- commands

    async def deploy(
        self, grant: Grant, app: str, body: bytes, sha256: str, entry: str, percent: float | None = None
    ) -> dict[str, Any]:
        """Record a new version and serve it: with `percent` for so much of the traffic, beside the version served now."""
        await _check_upload(app, body, sha256, entry)
        tenant, _ = await self._owner_of(grant, app)
        await self._prepare_environment(tenant, body)
        async with self._turn(tenant):
            tenant, number = await self._owner_of(grant, app)
            if self._incoming.setdefault(app, tenant) != tenant:
                raise _taken(app)
            try:
                served = await self._unpack(app, number, tenant, body, entry)
                async with self._lock:
                    try:
                        self._check_again(served)
                    except BaseException:
                        await asyncio.to_thread(shutil.rmtree, Path(served.path).parent, ignore_errors=True)
                        raise
                    return await self._serve_new(grant.caller, served, sha256.lower(), len(body), percent)
            finally:
                del self._incoming[app]

    async def _serve_new(
        self, caller: Identity, served: AppVersion, sha256: str, size: int, percent: float | None
    ) -> dict[str, Any]:
        """Record a version that has been unpacked, and serve it."""
        app, number, before = served.app, served.number, self.active.apps.get(served.app)
        version = VersionRecord(
            app=app,
            number=number,
            sha256=sha256,
            entry=Path(served.path).name,
            bytes=size,
            tenant=served.tenant,
            by=caller.name,
            at_us=self._access.now_us(),
        )
        await self._access.write(partial(_save_version, version=version))
        if percent is not None and before is not None and not before.is_empty:
            rules = TrafficRules(weights={before.number: 100 - percent, number: percent})
            await self._set_traffic(caller, before, rules, {number: served})
            return self.active.summary(before)
        await self._end_traffic(app)
        before = before or app_versions.empty_version(app, served.tenant)
        await self._activate(caller, served, before, "deploy", f"version {number}, sha256 {version.sha256}")
        await asyncio.to_thread(self._delete_old, app, number)
        return self.active.summary(served)

    def _turn(self, tenant: str) -> asyncio.Lock:
        return self._turns.setdefault(tenant, asyncio.Lock())

    async def _owner_of(self, grant: Grant, app: str) -> tuple[str, int]:
        """Tenant that an app is or will be of, if the caller may deploy it, and the number of its next version."""
        before = self.active.apps.get(app)
        past = await self._access.read(lambda db: app_versions.history(db, app))
        tenant = before.tenant if before is not None else past[0].tenant if past else grant.tenant
        self._isolation.check_tenant(tenant)
        grant.check_owner(tenant, _taken(app))
        return tenant, past[0].number + 1 if past else 1

    async def _prepare_environment(self, tenant: str, body: bytes) -> None:
        """Build the environment that a package asks for, before its turn: that may take minutes, and others deploy meanwhile."""
        scratch = self._folder / f".incoming-{os.urandom(6).hex()}"
        try:
            await app_package.unpack_apart(body, scratch)
            await self._environment_of(scratch / "app.py", await self._isolation.user_of(tenant))
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))

    async def _environment_of(self, path: Path, user: int) -> str:
        """Interpreter of the environment of an app; "": the server's own."""
        walls: list[Confinement] = []

        def wall(shows: tuple[str, ...]) -> Confinement:
            walls.append(self._isolation.confinement(user, path, shows=shows))
            return walls[0]

        try:
            return await self._environments.ensure(path.parent, user, wall)
        finally:
            for one in walls:
                self._isolation.end(one)

    async def rollback(self, grant: Grant, app: str, number: int | None) -> dict[str, Any]:
        """Back to the version named; without one, away from what was tried last: a canary or shadow, if there is one, else the
        served version, for the one that was served before and was not rolled back itself."""
        async with self._turn(self.active.find_app(grant, app).tenant):
            async with self._lock:
                served = self.active.find_app(grant, app)
                tried = self.traffic.divided(app)
                if number is None and tried is not None and tried.rules.versions != [served.number]:
                    await self._set_traffic(grant.caller, served, TrafficRules(weights={served.number: 100}), {})
                    return self.active.summary(served)
                if number is None:
                    number = await self._previous(served)
                if number == served.number:
                    raise Conflict(f"version {number} of {app!r} is what is served")
            to = await self._find_version(app, number)
            async with self._lock:
                served = self.active.find_app(grant, app)
                self._check_again(to)
                await self._end_traffic(app)
                await self._activate(grant.caller, to, None, "rollback", f"version {to.number}", leaves=served.number)
                return self.active.summary(to)

    async def _previous(self, served: AppVersion) -> int:
        """The version that had the calls of an app before this one. A canary that lost its traffic never had them."""
        app = served.app
        past = await self._access.read(lambda db: app_versions.served(db, app))
        for number in reversed(past[: past.index(served.number)] if served.number in past else past):
            if (app == self.active.initial.app and not number) or (number and (self._folder / app / str(number)).is_dir()):
                return number
        hint = f"lamina history {app} lists all versions: lamina rollback {app} --to N"
        raise NotFound(f"no version of {app!r} was served before version {served.number}", hint=hint)

    async def override(self, grant: Grant, function: str, given: dict[str, Any]) -> dict[str, Any]:
        """Scale or resize one function; another size of its own slice takes new instances."""
        async with self._lock:
            stage = self.active
            owner = stage.app_with_function(grant, function)
            spec = next(one for one in owner.function_specs(stage.overrides) if one.name == function)
            before = stage.overrides.get(function, FunctionOverrides())
            after = before.updated(spec, given, stage.devices)
            stage.set_override(function, after)
            try:
                self._check(owner)
                stage.activate(owner)
            except BaseException:
                stage.set_override(function, before)
                raise
            now_us = self._access.now_us()
            note = msgspec.json.encode(given).decode()
            await self._access.write_audited(
                grant.caller, "change", function, lambda db: overrides.save(db, function, after, now_us), note
            )
            return {
                "function": function,
                **msgspec.to_builtins(after.applied_to(spec).scale),
                "share": after.applied_to(spec).share,
            }

    # ------------------------------------------------------------------- traffic

    async def set_traffic(self, grant: Grant, app: str, given: dict[str, Any]) -> dict[str, Any]:
        """Divide the calls of an app between its versions, or give all of them to one."""
        async with self._turn(self.active.find_app(grant, app).tenant):
            served = self.active.find_app(grant, app)
            past = await self._access.read(lambda db: app_versions.history(db, app))
            known = [one.number for one in past]
            rules = parse_rules(given, [*known, 0] if app == self.active.initial.app else known)
            described = {number: await self._find_version(app, number) for number in rules.versions if number != served.number}
            async with self._lock:
                await self._set_traffic(grant.caller, self.active.find_app(grant, app), rules, described)
                return self.traffic.summary(app)

    def show_traffic(self, grant: Grant, app: str) -> dict[str, Any]:
        return self.traffic.summary(self.active.find_app(grant, app).app)

    async def _set_traffic(
        self, caller: Identity, served: AppVersion, rules: TrafficRules, described: Mapping[int, AppVersion]
    ) -> None:
        app, stable = served.app, rules.stable(served.number)
        if stable != served.number:
            to = described.get(stable) or await self._find_version(app, stable)
            self._check_again(to)
            await self._end_traffic(app)
            await self._activate(caller, to, None, "traffic", f"version {stable}")
            served = to
        if rules.versions == [stable]:
            await self._end_traffic(app)
        else:
            await self._divide(served, rules, described)
        kept = rules if rules.versions != [stable] else None
        now_us, note = self._access.now_us(), msgspec.json.encode(rules).decode()
        await self._access.write_audited(caller, "traffic", app, lambda db: traffic.save(db, app, kept, now_us), note)

    async def _divide(self, served: AppVersion, rules: TrafficRules, described: Mapping[int, AppVersion]) -> None:
        """Load the versions that are to get calls, and look after them."""
        app, stable = served.app, rules.stable(served.number)
        numbers = [number for number in rules.versions if number != stable]
        others = [(described.get(number) or await self._find_version(app, number)).beside() for number in numbers]
        for version in others:
            self._check(version)
        self.traffic.begin(app, rules, stable, others)
        task = asyncio.create_task(self._watch_traffic(app, rules))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch_traffic(self, app: str, rules: TrafficRules) -> None:
        """Take the traffic of a version away that cannot be loaded, or breaks the rule for it."""
        while (divided := self.traffic.divided(app)) is not None and divided.rules == rules:
            found = self.traffic.poll(app)
            if found is not None:
                number, why = found
                async with self._lock:
                    if self.traffic.divided(app) is not divided:
                        return
                    rules = self.traffic.undo(app, number, why)
                    log.warning("app %s: version %d has lost its traffic: %s", app, number, why)
                    with contextlib.suppress(LaminaError):
                        work = partial(traffic.save, app=app, rules=rules, now_us=self._access.now_us())
                        await self._access.write_audited(Identity(), "traffic-rolled-back", app, work, why)
            await asyncio.sleep(POLL_S)

    async def _end_traffic(self, app: str) -> None:
        if self.traffic.divided(app) is not None:
            self.traffic.end(app)
            await self._access.write(lambda db: traffic.save(db, app, None, 0))

    async def _find_version(self, app: str, number: int) -> AppVersion:
        if app == self.active.initial.app and number == 0:
            return self.active.initial
        return await self._load_stored(app, number)

    def _load_error_of(self, function: str) -> str:
        error = self._load_errors.get(function)
        if error is None:
            return ""
        return f"{function}: {error.type}: {error.message}".replace(f"{self._folder}{os.sep}", "")[:500]  # APP/VERSION/FILE

    # --------------------------------------------------------------------- reads

    def list_apps(self, grant: Grant) -> list[dict[str, Any]]:
        return [self.active.summary(served, in_full="deploy" in grant.caller.scopes) for served in self.active.visible_to(grant)]

    async def history(self, grant: Grant, app: str) -> list[dict[str, Any]]:
        served = self.active.find_app(grant, app)
        past = await self._access.read(lambda db: app_versions.history(db, app))
        return [{**msgspec.to_builtins(one), "current": one.number == served.number} for one in past]

    # ------------------------------------------------------------------- how it is done

    async def _unpack(self, app: str, number: int, tenant: str, body: bytes, entry: str) -> AppVersion:
        """Unpack into a folder of its own, describe and check; the folder is removed if that fails."""
        folder = self._folder / app / str(number)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        try:
            await app_package.unpack_apart(body, folder)
            (self._folder / DATA_MARK).touch()
            if not (folder / entry).is_file():
                raise BadValue(f"lamina-entry: no {entry!r} in the package")
            served = await self._describe(app, number, tenant, folder / entry)
            self._check(served)
            return served
        except BaseException:  # what its code has made there goes too, which may take long
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
            raise

    async def _load_stored(self, app: str, number: int) -> AppVersion:
        past = await self._access.read(lambda db: app_versions.history(db, app))
        version = next((one for one in past if one.number == number), None)
        folder = self._folder / app / str(number)
        if version is None or not folder.is_dir():
            raise NotFound(f"no version {number} of {app!r}", hint=f"lamina history {app}")
        return await self._describe(app, number, version.tenant, folder / version.entry)

    async def _describe(self, app: str, number: int, tenant: str, path: Path) -> AppVersion:
        self._isolation.check_tenant(tenant)
        user = await self._isolation.user_of(tenant)
        await asyncio.to_thread(give_folder, path.parent, user)
        python = await self._environment_of(path, user)
        walls = self._isolation.confinement(user, path, python)
        try:
            manifest = await describe_app(str(path), walls, python)
        except LoadFailed as error:
            hint = error.hint
            if (missing := hint.removeprefix("install ")) != hint:
                where = "the packages of its environment" if python else "requirements.txt beside the app"
                hint = f"name {missing} in {where}, or install it in the environment of the server"
            raise LoadFailed(error.message.replace(f"{path.parent}/", ""), hint=hint) from None  # as it is in the package
        finally:
            self._isolation.end(walls)
        app_versions.check_manifest(manifest, app, tenant, self._others(app))
        self._isolation.check_functions(tenant, manifest.functions)
        self._isolation.check_environment(python, manifest.functions, user)
        return AppVersion(app=app, number=number, tenant=tenant, path=str(path), manifest=manifest, user=user, python=python)

    def _others(self, app: str) -> list[AppVersion]:
        return [served for served in self.active.apps.values() if served.app != app]

    def _check(self, served: AppVersion) -> None:
        self.active.check(served, self._access.tenants.get(served.tenant))

    def _check_again(self, served: AppVersion) -> None:
        """Other apps may have changed since a version was described."""
        if served is not self.active.initial:
            app_versions.check_manifest(served.manifest, served.app, served.tenant, self._others(served.app))
        self._check(served)

    async def _activate(
        self, caller: Identity, served: AppVersion, before: AppVersion | None, deed: str, note: str, leaves: int | None = None
    ) -> None:
        """Serve this version from now on, and after a restart. `before` is the version to roll back to if it cannot be loaded;
        `leaves` the one that was rolled back for it."""
        rollout = self.active.start_rollout(served)
        self.traffic.on_activated(served.app)
        await self._record_current(caller, deed, served, note, leaves)
        task = asyncio.create_task(self._watch_rollout(caller, served, before, rollout))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _record_current(
        self, caller: Identity, deed: str, served: AppVersion, note: str, leaves: int | None = None
    ) -> None:
        app, now_us = served.app, self._access.now_us()
        work = partial(app_versions.make_current, app=app, number=served.number, now_us=now_us, leaves=leaves)
        await self._access.write_audited(caller, deed, app, work, note)

    async def _watch_rollout(self, caller: Identity, served: AppVersion, before: AppVersion | None, rollout: Rollout) -> None:
        """Watch the rollout; roll back if one of its functions cannot be loaded."""
        stage = self.active
        while stage.apps.get(served.app) is served:
            rollout.poll()
            state = stage.rollout_state(served)
            if state == "halted" and before is not None:
                await self._roll_back(caller, served, before)
            elif state != "rolling":
                specs = served.function_specs(stage.overrides)
                if before is not None and (impossible := rollout.impossible_slo(specs, served.manifest.flows)):
                    await self._roll_back(caller, served, before, impossible)
                rollout.finish(specs)
                return
            await asyncio.sleep(POLL_S)

    async def _roll_back(self, caller: Identity, served: AppVersion, before: AppVersion, impossible: str = "") -> None:
        """Serve the version before again: this one cannot be loaded, or has an `impossible` SLO."""
        names = [spec.name for spec in served.manifest.functions]
        errors = {name: self._load_errors[name] for name in names if name in self._load_errors}
        said = [f"{name}: {info.type}: {info.message}" for name, info in errors.items()]
        why = "; ".join(said)[:500] or impossible or "its instances could not be loaded"
        traces = "".join(f"\n{info.trace.rstrip()}" for info in errors.values() if info.trace)[:MAX_TRACE_CHARS]
        why, traces = (text.replace(f"{Path(served.path).parent}/", "") for text in (why, traces))  # as they are in the package
        kinds = "; ".join(f"{name}: {info.type}" for name, info in errors.items()) or why
        async with self._lock:
            if self.active.apps.get(served.app) is served:
                self.active.activate(before)
                self.active.rollouts.pop(served.app, None)
                taken = f"version {served.number} was taken back: "
                self.active.failures[served.app] = RolloutFailure(f"{taken}{kinds[:500]}", f"{taken}{why}{traces}")
                log.warning("app %s: version %d was taken back: %s", served.app, served.number, why)
                with contextlib.suppress(LaminaError):
                    await self._record_current(caller, "taken-back", before, why)

    def _delete_old(self, app: str, number: int) -> None:
        for old in range(max(1, number - 2 * KEPT_VERSIONS), number - KEPT_VERSIONS):
            if old != self.active.apps[app].number and old not in self.active.beside.get(app, ()):
                shutil.rmtree(self._folder / app / str(old), ignore_errors=True)
        self._collect_environments()

    def _collect_environments(self) -> None:
        """Remove environments that no kept version asks for."""
        used: set[str] = {Path(sys.prefix).name}
        for folder in self._folder.glob("[!.]*/*"):
            with contextlib.suppress(LaminaError, OSError):
                used.add(self._environments.key_of(folder, user_of_folder(folder)))
        self._environments.collect(used)

    async def stop(self) -> None:
        for task in list(self._watchers):
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _taken(app: str) -> LaminaError:
    return Forbidden(f"the name {app!r} is taken", hint="deploy under another name")


def _save_version(db: Session, version: VersionRecord) -> None:
    adopt_scopes(db, {}, version.at_us)  # of what there is now, nothing is this app's
    app_versions.save(db, version)


async def _check_upload(app: str, body: bytes, sha256: str, entry: str) -> None:
    if not NAME_PATTERN.fullmatch(app):
        raise BadValue(f"app: {app[:80]!r} cannot be used", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first")
    if await asyncio.to_thread(app_package.sha256_hex, body) != sha256.lower():
        hint = "it was cut short or changed on its way: send it again"
        raise BadValue("lamina-sha256: the package has another hash", hint=hint)
    if not app_package.NAME_PART.fullmatch(entry) or not entry.endswith(".py"):
        raise BadValue(f"lamina-entry: {entry[:80]!r} is no Python file at the top of the package")
