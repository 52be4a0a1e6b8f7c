"""Versions of deployed apps: recorded, so that any of them can be served again."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.core.workflow.flow import Each, Flow, Node, Parallel, Task
from lamina.errors import BadValue, NoCapacity
from lamina.gateway.deploy.overrides import FunctionOverrides
from lamina.gateway.routes.targets import CallTarget, kind_of
from lamina.sdk.app import NAME_PATTERN
from lamina.sdk.triggers import checked_trigger
from lamina.store import kv
from lamina.store.base import Session
from lamina.types import MAX_CONCURRENCY, NEVER_US, WHOLE_UNIT, FunctionSpec, Tenant
from lamina.worker.app_manifest import AppManifest

MAX_FUNCTIONS = 1_000
MAX_SERVED = 20
_SERVED = "deploy-served"


class VersionRecord(Struct, frozen=True, kw_only=True):
    """The record of one upload, as stored."""

    app: str
    number: int
    sha256: str
    entry: str
    bytes: int
    tenant: str
    by: str
    at_us: int  #: since 1970


class AppVersion(Struct, kw_only=True):
    """A version of an app as served. Number 0 is the one the server was started with, or, of another app, an empty one."""

    app: str
    number: int
    tenant: str
    path: str
    manifest: AppManifest
    user: int = 0  #: its functions run as; 0: the server's
    python: str = ""  #: interpreter of its environment; "": the server's own
    own_names: dict[str, str] = {}  #: of a version beside the stable one: what its targets are called in the app

    @property
    def is_empty(self) -> bool:
        """No version of it could be loaded yet."""
        return not self.manifest.functions and not self.manifest.flows

    @property
    def names(self) -> list[str]:
        """Names of its functions and workflows."""
        return [*(spec.name for spec in self.manifest.functions), *(flow.name for flow in self.manifest.flows)]

    def function_specs(self, terms: dict[str, FunctionOverrides]) -> list[FunctionSpec]:
        tag = str(self.number) if self.number else ""
        specs = [msgspec.structs.replace(spec, version=tag) for spec in self.manifest.functions]
        names = [self.own_names.get(spec.name, spec.name) for spec in specs]
        return [terms[name].applied_to(spec) if name in terms else spec for name, spec in zip(names, specs, strict=True)]

    def call_targets(self) -> list[CallTarget]:
        about = {one.name: one for one in self.manifest.about}
        parts = [("function", spec.name, spec.slo, spec.cache_us) for spec in self.manifest.functions]
        parts += [(kind_of(flow), flow.name, flow.slo, 0) for flow in self.manifest.flows]
        return [
            CallTarget(
                *(name, kind, about[name].params, slo, about[name].doc, self.tenant, about[name].signature, about[name].returns),
                version=str(self.number),
                cache_us=cache_us,
            )
            for kind, name, slo, cache_us in parts
        ]

    def beside(self) -> AppVersion:
        """This version as it is served beside the stable one: `price` of version 4 is `price@4`, which no app can call itself."""
        renamed = {name: f"{name}@{self.number}" for name in self.names}
        manifest = msgspec.structs.replace(
            self.manifest,
            functions=tuple(msgspec.structs.replace(spec, name=renamed[spec.name]) for spec in self.manifest.functions),
            flows=tuple(_renamed(flow, renamed, renamed[flow.name]) for flow in self.manifest.flows),
            about=tuple(msgspec.structs.replace(one, name=renamed.get(one.name, one.name)) for one in self.manifest.about),
            triggers=(),
        )
        return msgspec.structs.replace(self, manifest=manifest, own_names={after: name for name, after in renamed.items()})


def _renamed(flow: Flow, names: dict[str, str], name: str) -> Flow:
    """A flow that calls functions by their other names, inner flows included."""

    def node_with(node: Node) -> Node:
        match node:
            case Task():
                return msgspec.structs.replace(node, function=names.get(node.function, node.function))
            case Each():
                return msgspec.structs.replace(node, body=_renamed(node.body, names, node.body.name))
            case Parallel():
                return msgspec.structs.replace(node, branches=tuple(_renamed(one, names, one.name) for one in node.branches))
        return node

    return msgspec.structs.replace(flow, name=name, nodes={key: node_with(node) for key, node in flow.nodes.items()})


def empty_version(app: str, tenant: str) -> AppVersion:
    """The empty version to roll back to before the first."""
    return AppVersion(app=app, number=0, tenant=tenant, path="", manifest=AppManifest(app, (), (), ()))


MAX_TRIGGERS = 1_000


def _check_numbers(value: object) -> None:
    """No number is below zero, or without end; what is data of the app's own is not looked at."""
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            if name != "data":
                _check_numbers(getattr(value, name))
    elif isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_numbers(inner)
    elif isinstance(value, int | float) and not 0 <= value <= NEVER_US:
        raise BadValue(f"package: {value} makes no sense", hint="times, sizes and counts are not below zero")


def check_manifest(manifest: AppManifest, app: str, tenant: str, others: list[AppVersion]) -> None:
    """Validate what an app of this tenant says of itself. Its code has written it, and may have written anything."""
    if manifest.app != app:
        raise BadValue(f"package: it holds the app {manifest.app[:80]!r}, not {app!r}", hint="deploy it under its own name")
    names = [spec.name for spec in manifest.functions] + [flow.name for flow in manifest.flows]
    if not 1 <= len(names) <= MAX_FUNCTIONS:
        raise BadValue(f"package: {len(names)} functions and workflows", hint=f"1 to {MAX_FUNCTIONS}")
    known = {one.name for one in manifest.about}
    taken = {target.name: other.app for other in others for target in other.call_targets()}
    for name in names:
        if not NAME_PATTERN.fullmatch(name) or name not in known:
            raise BadValue(f"package: {name[:80]!r} cannot be a name", hint="up to 63 of a-z 0-9 . _ -")
        if name in taken:
            raise BadValue(f"{name!r} belongs to the app {taken[name]!r}", hint="give one of them another name")
    usable = {spec.name for one in others if not tenant or one.tenant in ("", tenant) for spec in one.manifest.functions}
    usable |= {spec.name for spec in manifest.functions}
    for flow in manifest.flows:
        for function in flow.functions:
            if function not in usable:
                raise BadValue(f"package: {flow.name!r} calls {function[:80]!r}, which this app does not have")
    _check_numbers((manifest.functions, manifest.flows))
    if len(manifest.triggers) > MAX_TRIGGERS:
        raise BadValue(f"package: {len(manifest.triggers)} triggers", hint=f"at most {MAX_TRIGGERS}")
    for trigger in manifest.triggers:
        if trigger.target not in names:
            raise BadValue(f"package: a trigger starts {trigger.target[:80]!r}, which this app does not have")
        if trigger.id:
            raise BadValue("package: a trigger has the name of one that was added", hint="names are for those: PUT /v1/triggers")
        checked_trigger(trigger)
    for spec in manifest.functions:
        sound = spec.max_batch >= 1 and spec.memory_mib >= 0 and 0 <= spec.scale.min <= max(1, spec.scale.max)
        sound = (
            sound
            and spec.cores >= 1
            and spec.share <= 1
            and spec.max_queue >= 1
            and 1 <= spec.parts <= WHOLE_UNIT
            and 1 <= spec.concurrency <= MAX_CONCURRENCY
            and (spec.home or not spec.isolated)
        )
        if not sound:
            raise BadValue(f"package: {spec.name!r} asks for what makes no sense")


def check_quota(tenant: Tenant | None, specs: list[FunctionSpec]) -> None:
    """All the instances it may ever have must fit into the tenant's memory."""
    if tenant is None or not tenant.memory_mib:
        return
    asked = sum(spec.memory_mib * spec.scale.max for spec in specs)
    if asked > tenant.memory_mib:
        raise NoCapacity(
            f"tenant {tenant.name!r} may have {tenant.memory_mib} MiB; its functions ask for up to {asked} MiB",
            hint="lower scale.max or memory, or ask for a larger quota",
        )


# ------------------------------------------------------------------ written down


def save(db: Session, version: VersionRecord) -> None:
    kv.put(db, f"deploy/{version.app}", f"{version.number:08d}", "version", msgspec.json.encode(version), version.at_us)


def make_current(db: Session, app: str, number: int, now_us: int, *, leaves: int | None = None) -> None:
    """Serve this version from now on. One that has served before is gone back to: those after it are no versions to go back to
    later, nor is one that it `leaves` for good."""
    before = [one for one in served(db, app) if one != leaves]
    since = before[: before.index(number)] if number in before else before
    kv.put(db, _SERVED, app, "numbers", msgspec.json.encode([*since, number][-MAX_SERVED:]), now_us)
    kv.put(db, "deploy", app, "number", str(number).encode(), now_us)


def served(db: Session, app: str) -> list[int]:
    """Versions that have been the current one and were not rolled back, in the order in which they became that."""
    if (entry := kv.get(db, _SERVED, app)) is not None:
        return msgspec.json.decode(entry.value, type=list[int])
    number = current(db).get(app, 0)  # a store of before this was recorded: all up to the current one
    return [0, *(one.number for one in reversed(history(db, app)) if one.number <= number)]


def history(db: Session, app: str) -> list[VersionRecord]:
    """Records of an app, newest first, the last hundred."""
    found = kv.entries(db, f"deploy/{app}", limit=100_000)
    return [msgspec.json.decode(entry.value, type=VersionRecord) for entry in reversed(found[-100:])]


def current(db: Session) -> dict[str, int]:
    """The current version number of every app."""
    return {entry.key: int(entry.value) for entry in kv.entries(db, "deploy", limit=kv.ALL)}
