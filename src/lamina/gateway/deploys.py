"""Deployments of apps to a running server: upload, check, record, roll out, roll back.

An upload is unpacked, described in a process of its own, checked, recorded, and only then made known to the controller, which
lets the new version take over without a lost call (rolling update). One deployment at a time. A version whose instances cannot
be loaded is rolled back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec

from lamina.access.access import Access
from lamina.access.records import Identity
from lamina.errors import BadValue, Conflict, LaminaError, NotFound
from lamina.gateway import package, terms, versions
from lamina.gateway.api import Api
from lamina.gateway.stage import Failed, Stage
from lamina.gateway.terms import Terms
from lamina.gateway.trial import Trial
from lamina.gateway.versions import Served, Version
from lamina.live.describe import Described, Manifest, describe
from lamina.live.loop import LiveLoop
from lamina.sdk.app import NAME, App

log = logging.getLogger("lamina")

LOOK_EVERY_S = 0.05
KEPT_VERSIONS = 20
MOST_TRACE = 4_000
RESTORE_S = 30.0
"""After a restart, calls are not accepted before the versions served last are warm again, or for at most so long."""


class Deploys:
    """Deploys, rolls back and overrides apps, one at a time."""

    def __init__(self, app: App, loop: LiveLoop, api: Api, access: Access, folder: Path, file: str = "") -> None:
        deployed = app.deployed()
        about = [Described(target.name, target.params, target.doc, target.signature) for target in api.targets]
        first = Manifest(app.name, deployed.functions, deployed.flows, tuple(about), triggers=tuple(app.triggers))
        self.stage = Stage(loop, api, Served(app=app.name, number=0, tenant="", path=file, manifest=first))
        self._load_errors = loop.engine.load_errors
        self._access = access
        self._folder = folder
        self._lock = asyncio.Lock()
        self._watch: set[asyncio.Task[None]] = set()

    async def restore(self) -> None:
        """After a restart: serve what was deployed. What cannot be served is left out, and logged."""
        stage = self.stage
        stage.terms = await self._access.read(terms.everything)
        for app, number in (await self._access.read(versions.current)).items():
            if number:
                try:
                    stage.activate(await self._stored(app, number))
                except LaminaError as error:
                    log.warning("version %d of app %s is not served: %s", number, app, error)
        if stage.terms:
            stage.activate(stage.served[stage.first.app])
        for _ in range(int(RESTORE_S / LOOK_EVERY_S)):  # the app of the file has begun to load; it is not what is wanted
            if not any(stage.is_mixed(served) for served in stage.served.values()):
                break
            await asyncio.sleep(LOOK_EVERY_S)

    # ------------------------------------------------------------------- commands

    async def deploy(self, who: Identity, app: str, body: bytes, sha256: str, entry: str) -> dict[str, Any]:
        _check_upload(app, body, sha256, entry)
        async with self._lock:
            before = self.stage.served.get(app)
            self.stage.may_touch(who, before)
            past = await self._access.read(lambda db: versions.history(db, app))
            number = past[0].number + 1 if past else 1
            tenant = who.tenant if before is None else before.tenant
            served = await self._unpacked(app, number, tenant, body, entry)
            version = Version(
                app=app,
                number=number,
                sha256=sha256.lower(),
                entry=entry,
                bytes=len(body),
                tenant=tenant,
                by=who.name,
                at_us=self._access.now_us(),
            )
            await self._access.write(lambda db: versions.save(db, version))
            before = before or versions.nothing_of(app, tenant)
            await self._serve(who, served, before, "deploy", f"version {number}, sha256 {version.sha256}")
            await asyncio.to_thread(self._forget_old, app, number)
            return self.stage.about(served)

    async def rollback(self, who: Identity, app: str, number: int | None) -> dict[str, Any]:
        """Back to the version before, or to the one named."""
        async with self._lock:
            served = self.stage.known(who, app)
            self.stage.may_touch(who, served)
            past = await self._access.read(lambda db: versions.history(db, app))
            if number is None:
                number = max((one.number for one in past if one.number < served.number), default=0)
            if number == served.number:
                raise Conflict(f"version {number} of {app!r} is what is served")
            to = self.stage.first if number == 0 and app == self.stage.first.app else await self._stored(app, number)
            self._check(to)
            await self._serve(who, to, None, "rollback", f"version {to.number}")
            return self.stage.about(to)

    async def change(self, who: Identity, function: str, given: dict[str, Any]) -> dict[str, Any]:
        """Scale or resize one function; another size of its own slice takes new instances."""
        async with self._lock:
            stage = self.stage
            owner = stage.owner_of(who, function)
            spec = next(one for one in owner.functions(stage.terms) if one.name == function)
            before = stage.terms.get(function, Terms())
            after = before.changed(spec, given, stage.devices)
            stage.terms[function] = after
            try:
                self._check(owner)
                stage.activate(owner)
            except BaseException:
                stage.terms[function] = before
                raise
            now_us = self._access.now_us()
            note = msgspec.json.encode(given).decode()
            await self._access.change(who, "change", function, lambda db: terms.save(db, function, after, now_us), note)
            return {"function": function, **msgspec.to_builtins(after.of(spec).scale), "share": after.of(spec).share}

    # --------------------------------------------------------------------- reads

    def listed(self, who: Identity) -> list[dict[str, Any]]:
        return [self.stage.about(served, in_full="deploy" in who.scopes) for served in self.stage.seen_by(who)]

    async def history(self, who: Identity, app: str) -> list[dict[str, Any]]:
        served = self.stage.known(who, app)
        past = await self._access.read(lambda db: versions.history(db, app))
        return [{**msgspec.to_builtins(one), "current": one.number == served.number} for one in past]

    # ------------------------------------------------------------------- how it is done

    async def _unpacked(self, app: str, number: int, tenant: str, body: bytes, entry: str) -> Served:
        """Unpack into a folder of its own, describe and check; the folder is removed if that fails."""
        folder = self._folder / app / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await asyncio.to_thread(package.unpack, body, folder)
            if not (folder / entry).is_file():
                raise BadValue(f"lamina-entry: no {entry!r} in the package")
            served = await self._look(app, number, tenant, folder / entry)
            self._check(served)
            return served
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _stored(self, app: str, number: int) -> Served:
        past = await self._access.read(lambda db: versions.history(db, app))
        version = next((one for one in past if one.number == number), None)
        folder = self._folder / app / str(number)
        if version is None or not folder.is_dir():
            raise NotFound(f"no version {number} of {app!r}", hint=f"lamina history {app}")
        return await self._look(app, number, version.tenant, folder / version.entry)

    async def _look(self, app: str, number: int, tenant: str, path: Path) -> Served:
        manifest = await describe(str(path), self._folder / app / f"{number}.json")
        others = [served for served in self.stage.served.values() if served.app != app]
        versions.check_manifest(manifest, app, others)
        return Served(app=app, number=number, tenant=tenant, path=str(path), manifest=manifest)

    def _check(self, served: Served) -> None:
        self.stage.check(served, self._access.tenants.get(served.tenant))

    async def _serve(self, who: Identity, served: Served, before: Served | None, deed: str, note: str) -> None:
        """Serve this version from now on, and after a restart. `before` is the version to roll back to if it cannot be loaded."""
        trial = self.stage.try_out(served)
        await self._is_current(who, deed, served, note)
        task = asyncio.create_task(self._until_it_stands(who, served, before, trial))
        self._watch.add(task)
        task.add_done_callback(self._watch.discard)

    async def _is_current(self, who: Identity, deed: str, served: Served, note: str) -> None:
        app, number, now_us = served.app, served.number, self._access.now_us()
        await self._access.change(who, deed, app, lambda db: versions.make_current(db, app, number, now_us), note)

    async def _until_it_stands(self, who: Identity, served: Served, before: Served | None, trial: Trial) -> None:
        """Watch the rollout; roll back if one of its functions cannot be loaded."""
        stage = self.stage
        while stage.served.get(served.app) is served:
            trial.look()
            state = stage.state_of(served)
            if state == "halted" and before is not None:
                await self._take_back(who, served, before)
            elif state != "rolling":
                trial.end(served.functions(stage.terms))
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _take_back(self, who: Identity, served: Served, before: Served) -> None:
        names = [spec.name for spec in served.manifest.functions]
        errors = {name: self._load_errors[name] for name in names if name in self._load_errors}
        said = [f"{name}: {info.type}: {info.message}" for name, info in errors.items()]
        why = "; ".join(said)[:500] or "its instances could not be loaded"
        traces = "".join(f"\n{info.trace.rstrip()}" for info in errors.values() if info.trace)[:MOST_TRACE]
        traces = traces.replace(f"{Path(served.path).parent}/", "")  # names as they are in the package
        kinds = "; ".join(f"{name}: {info.type}" for name, info in errors.items()) or why
        async with self._lock:
            if self.stage.served.get(served.app) is served:
                self.stage.activate(before)
                self.stage.trials.pop(served.app, None)
                taken = f"version {served.number} was taken back: "
                self.stage.failed[served.app] = Failed(f"{taken}{kinds[:500]}", f"{taken}{why}{traces}")
                log.warning("app %s: version %d was taken back: %s", served.app, served.number, why)
                with contextlib.suppress(LaminaError):
                    await self._is_current(who, "taken-back", before, why)

    def _forget_old(self, app: str, number: int) -> None:
        for old in range(max(1, number - 2 * KEPT_VERSIONS), number - KEPT_VERSIONS):
            if old != self.stage.served[app].number:
                shutil.rmtree(self._folder / app / str(old), ignore_errors=True)

    async def stop(self) -> None:
        for task in list(self._watch):
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)


def _check_upload(app: str, body: bytes, sha256: str, entry: str) -> None:
    if not NAME.fullmatch(app):
        raise BadValue(f"app: {app[:80]!r} cannot be used", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first")
    if package.digest(body) != sha256.lower():
        hint = "it was cut short or changed on its way: send it again"
        raise BadValue("lamina-sha256: the package has another hash", hint=hint)
    if not package.PART.fullmatch(entry) or not entry.endswith(".py"):
        raise BadValue(f"lamina-entry: {entry[:80]!r} is no Python file at the top of the package")
