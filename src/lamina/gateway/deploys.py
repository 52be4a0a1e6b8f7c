"""Apps come to a running server: an upload is unpacked, looked at in a process of its own, checked, written down, and only then
made known to the controller, which lets the new version take over without a lost call (`core/renewal.py`).

One deployment at a time. A version whose instances cannot be loaded is taken back by itself.
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
from lamina.core.events import Deployed
from lamina.core.lifecycle import Phase
from lamina.errors import BadValue, Conflict, Forbidden, LaminaError, NotFound
from lamina.gateway import package, versions
from lamina.gateway.api import Api
from lamina.gateway.versions import Served, Terms, Version
from lamina.live.describe import Described, Manifest, describe
from lamina.live.loop import LiveLoop
from lamina.live.triggers import Triggers
from lamina.planner.room import check_room
from lamina.sdk.app import NAME, App
from lamina.types import FunctionSpec, Scale

log = logging.getLogger("lamina")

LOOK_EVERY_S = 0.05
KEPT_VERSIONS = 20
RESTORE_S = 30.0
"""After a restart, calls are not taken before the versions served last stand again, or for so long."""


class Deploys:
    def __init__(self, app: App, loop: LiveLoop, api: Api, access: Access, folder: Path, file: str = "") -> None:
        self._loop = loop
        self._api = api
        self._triggers: Triggers | None = None
        self._access = access
        self._folder = folder
        self._lock = asyncio.Lock()
        self._watch: set[asyncio.Task[None]] = set()
        self.terms: dict[str, Terms] = {}
        deployed = app.deployed()
        about = [Described(target.name, target.params, target.doc, target.signature) for target in api.targets]
        first = Manifest(app.name, deployed.functions, deployed.flows, tuple(about), triggers=tuple(app.triggers))
        self._first = Served(app=app.name, number=0, tenant="", path=file, manifest=first)
        self.served: dict[str, Served] = {app.name: self._first}
        self.failed: dict[str, str] = {}  #: by app: why the last version was taken back

    async def restore(self) -> None:
        """After a restart: what was deployed is served again. What cannot be is left out, and said."""
        self.terms = await self._access.read(versions.all_terms)
        for app, number in (await self._access.read(versions.current)).items():
            if number:
                try:
                    self._activate(await self._stored(app, number))
                except LaminaError as error:
                    log.warning("version %d of app %s is not served: %s", number, app, error)
        if self.terms:
            self._activate(self.served[self._first.app])
        for _ in range(int(RESTORE_S / LOOK_EVERY_S)):  # the app of the file has begun to load; it is not what is wanted
            if all(self.about(served)["state"] != "rolling" for served in self.served.values()):
                break
            await asyncio.sleep(LOOK_EVERY_S)

    # --------------------------------------------------------------------- deeds

    async def deploy(self, who: Identity, app: str, body: bytes, sha256: str, entry: str) -> dict[str, Any]:
        _named(app, "app")
        if package.digest(body) != sha256.lower():
            raise BadValue(
                "lamina-sha256: the package has another hash", hint="it was cut short or changed on its way: send it again"
            )
        if not package.PART.fullmatch(entry) or not entry.endswith(".py"):
            raise BadValue(f"lamina-entry: {entry[:80]!r} is no Python file at the top of the package")
        async with self._lock:
            before = self.served.get(app)
            self._may_touch(who, before)
            past = await self._access.read(lambda db: versions.history(db, app))
            number = past[0].number + 1 if past else 1
            folder = self._folder / app / str(number)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                await asyncio.to_thread(package.unpack, body, folder)
                if not (folder / entry).is_file():
                    raise BadValue(f"lamina-entry: no {entry!r} in the package")
                served = await self._look(app, number, who.tenant if before is None else before.tenant, folder / entry)
                self._check(served)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            version = Version(
                app=app,
                number=number,
                sha256=sha256.lower(),
                entry=entry,
                bytes=len(body),
                tenant=served.tenant,
                by=who.name,
                at_us=self._access.now_us(),
            )
            await self._access.write(lambda db: versions.save(db, version))
            self._activate(served)
            await self._is_current(who, "deploy", app, number, f"version {number}, sha256 {version.sha256}")
            await asyncio.to_thread(self._forget_old, app, number)
            self._follow(who, served, before)
            return self.about(served)

    async def rollback(self, who: Identity, app: str, number: int | None) -> dict[str, Any]:
        """To a version before, or to the one named."""
        async with self._lock:
            served = self._known(who, app)
            past = await self._access.read(lambda db: versions.history(db, app))
            if number is None:
                number = max((one.number for one in past if one.number < served.number), default=0)
            if number == served.number:
                raise Conflict(f"version {number} of {app!r} is what is served")
            to = self._first if number == 0 and app == self._first.app else await self._stored(app, number)
            self._check(to)
            self._activate(to)
            await self._is_current(who, "rollback", app, to.number, f"version {to.number}")
            self._follow(who, to, None)
            return self.about(to)

    async def change(self, who: Identity, function: str, given: dict[str, Any]) -> dict[str, Any]:
        """Scale or resize one function; what asks for another size of its own slice takes new instances."""
        async with self._lock:
            owner = next((one for one in self.served.values() if function in {f.name for f in one.manifest.functions}), None)
            if owner is None or not _sees(who, owner):
                raise NotFound(f"no function {function[:80]!r}", hint="lamina ls")
            self._may_touch(who, owner)
            spec = next(one for one in owner.functions(self.terms) if one.name == function)
            before = self.terms.get(function, Terms())
            after = _changed(spec, before, given)
            self.terms[function] = after
            try:
                self._check(owner)
                self._activate(owner)
            except BaseException:
                self.terms[function] = before
                raise
            now_us = self._access.now_us()
            note = msgspec.json.encode(given).decode()
            await self._access.change(who, "change", function, lambda db: versions.save_terms(db, function, after, now_us), note)
            return {"function": function, **msgspec.to_builtins(after.of(spec).scale), "share": after.of(spec).share}

    # --------------------------------------------------------------------- reads

    def about(self, served: Served) -> dict[str, Any]:
        state = self._loop.controller.state
        renewal = self._loop.controller.renewal
        functions = [state.functions[spec.name] for spec in served.manifest.functions]
        old = sum(len(renewal.outdated(one)) for one in functions)
        halted = [one.spec.name for one in functions if one.spec.name in renewal.halted]
        failed = self.failed.get(served.app, "")
        return {
            "app": served.app,
            "version": served.number,
            "tenant": served.tenant,
            "state": "halted" if halted else "rolling" if old else "serving",
            "failed": failed,
            "functions": [
                {
                    "name": one.spec.name,
                    "instances": len(one.instances),
                    "ready": sum(i.phase is Phase.WARM for i in one.instances.values()),
                    "old": len(renewal.outdated(one)),
                    "min": one.spec.scale.min,
                    "max": one.spec.scale.max,
                    "queue": len(one.queue),
                }
                for one in functions
            ],
            "workflows": [flow.name for flow in served.manifest.flows],
        }

    def listed(self, who: Identity) -> list[dict[str, Any]]:
        return [self.about(served) for served in self.served.values() if _sees(who, served)]

    async def history(self, who: Identity, app: str) -> list[dict[str, Any]]:
        served = self._known(who, app)
        past = await self._access.read(lambda db: versions.history(db, app))
        return [{**msgspec.to_builtins(one), "current": one.number == served.number} for one in past]

    # ------------------------------------------------------------------- how it is done

    async def _stored(self, app: str, number: int) -> Served:
        past = await self._access.read(lambda db: versions.history(db, app))
        version = next((one for one in past if one.number == number), None)
        folder = self._folder / app / str(number)
        if version is None or not folder.is_dir():
            raise NotFound(f"no version {number} of {app!r}", hint=f"lamina history {app}")
        return await self._look(app, number, version.tenant, folder / version.entry)

    async def _look(self, app: str, number: int, tenant: str, path: Path) -> Served:
        manifest = await describe(str(path), self._folder / app / f"{number}.json")
        others = [served for served in self.served.values() if served.app != app]
        versions.check_manifest(manifest, app, others)
        return Served(app=app, number=number, tenant=tenant, path=str(path), manifest=manifest)

    def _check(self, served: Served) -> None:
        """Would it all fit?"""
        state = self._loop.controller.state
        specs = served.functions(self.terms)
        others = [spec for one in self.served.values() if one.app != served.app for spec in one.functions(self.terms)]
        check_room([device.spec for device in state.devices.values()], others, specs)
        mine = [one for one in self.served.values() if one.tenant == served.tenant and one.app != served.app]
        owned = specs + [spec for one in mine for spec in one.functions(self.terms)]
        versions.check_quota(self._access.tenants.get(served.tenant), owned)

    def open_triggers(self, triggers: Triggers | None) -> None:
        """They are opened after what is deployed: those of the app the server was started with may not be its own any more."""
        self._triggers = triggers
        for served in self.served.values():
            self._set_triggers(served)

    def _set_triggers(self, served: Served) -> None:
        if self._triggers is not None:
            self._triggers.set_app(served.app, served.manifest.triggers, [spec.name for spec in served.manifest.functions])

    def _activate(self, served: Served) -> None:
        """From now on. All of it or nothing: the controller says no before it changes anything."""
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

    async def _is_current(self, who: Identity, what: str, app: str, number: int, note: str) -> None:
        now_us = self._access.now_us()
        await self._access.change(who, what, app, lambda db: versions.make_current(db, app, number, now_us), note)

    def _follow(self, who: Identity, served: Served, before: Served | None) -> None:
        task = asyncio.create_task(self._until_it_stands(who, served, before))
        self._watch.add(task)
        task.add_done_callback(self._watch.discard)

    async def _until_it_stands(self, who: Identity, served: Served, before: Served | None) -> None:
        """Take the version back if one of its functions cannot be loaded."""
        while self.served.get(served.app) is served:
            about = self.about(served)
            if about["state"] == "serving":
                return
            if about["state"] == "halted":
                if before is not None:
                    await self._take_back(who, served, before)
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _take_back(self, who: Identity, served: Served, before: Served) -> None:
        errors = self._loop.engine.load_errors
        said = [f"{name}: {info.type}: {info.message}" for name, info in errors.items()]
        why = "; ".join(said)[:500] or "its instances could not be loaded"
        async with self._lock:
            if self.served.get(served.app) is served:
                self._activate(before)
                self.failed[served.app] = f"version {served.number} was taken back: {why}"
                log.warning("app %s: %s", served.app, self.failed[served.app])
                with contextlib.suppress(LaminaError):
                    await self._is_current(who, "taken-back", served.app, before.number, why)

    def _forget_old(self, app: str, number: int) -> None:
        keep = {number, self.served[app].number}
        for old in range(max(1, number - 2 * KEPT_VERSIONS), number - KEPT_VERSIONS):
            if old not in keep:
                shutil.rmtree(self._folder / app / str(old), ignore_errors=True)

    def tenant_of(self, function: str) -> str:
        return next((one.tenant for one in self.served.values() if any(f.name == function for f in one.manifest.functions)), "")

    def _known(self, who: Identity, app: str) -> Served:
        served = self.served.get(app)
        if served is None or not _sees(who, served):
            raise NotFound(f"no app {app[:80]!r}", hint="lamina ls")
        return served

    def _may_touch(self, who: Identity, served: Served | None) -> None:
        if served is not None and who.tenant and served.tenant != who.tenant:
            raise Forbidden(f"the app {served.app!r} is not of tenant {who.tenant!r}", hint="deploy under another name")

    async def stop(self) -> None:
        for task in list(self._watch):
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)


def _sees(who: Identity, served: Served) -> bool:
    return not who.tenant or not served.tenant or served.tenant == who.tenant


def _named(name: str, field: str) -> None:
    if not NAME.fullmatch(name):
        raise BadValue(f"{field}: {name[:80]!r} cannot be used", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first")


def _retired(before: Served, specs: list[FunctionSpec], known: Any) -> list[FunctionSpec]:
    """Functions the new version has no more: runs in flight may still need them, but none must stand."""
    names = {spec.name for spec in specs}
    old = [known[spec.name].spec for spec in before.manifest.functions if spec.name not in names and spec.name in known]
    return [msgspec.structs.replace(spec, scale=msgspec.structs.replace(spec.scale, min=0)) for spec in old]


def _changed(spec: FunctionSpec, before: Terms, given: dict[str, Any]) -> Terms:
    known = {"min", "max", "idle_us", "share", "cores", "memory_mib"}
    for key, value in given.items():
        if key not in known or not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
            raise BadValue(f"{key[:40]}: {str(value)[:40]} cannot be set", hint=f"there are {', '.join(sorted(known))}")
    scale = Scale(
        min=int(given.get("min", spec.scale.min)),
        max=int(given.get("max", spec.scale.max)),
        idle_us=int(given.get("idle_us", spec.scale.idle_us)),
    )
    if scale.max < 1 or scale.min > scale.max:
        raise BadValue(f"scale: min {scale.min} and max {scale.max} make no sense", hint="0 <= min <= max")
    if given.get("cores", 1) < 1:
        raise BadValue(f"cores: {given['cores']:g} is less than one")
    if not 0 <= given.get("share", 0) <= 1:
        raise BadValue(f"share: {given['share']:g} is not from 0 to 1")
    resized = any(key in given for key in ("share", "cores", "memory_mib")) and (spec.home or "memory_mib" in given)
    return Terms(
        scale=scale,
        cores=int(given["cores"]) if "cores" in given else before.cores,
        share=float(given["share"]) if "share" in given else before.share,
        memory_mib=int(given["memory_mib"]) if "memory_mib" in given else before.memory_mib,
        round=before.round + resized,
    )
