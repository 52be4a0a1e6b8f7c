"""Routes of triggers, `/v1/triggers`: those of apps are listed; others are added to a running server, and removed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import msgspec

from lamina.access.access_control import AccessControl
from lamina.access.authorization import Grant
from lamina.access.records import Identity
from lamina.drivers.engine import EngineShared
from lamina.errors import BadValue, Conflict, LaminaError, NoCapacity, NotFound, StoreDown, UnknownTarget, did_you_mean
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.problems import error_problem, respond_problem
from lamina.gateway.routes.targets import TargetRegistry
from lamina.sdk.app import NAME_PATTERN
from lamina.sdk.triggers import bind_trigger, make_trigger
from lamina.server.exchange import Exchange, HttpRequest
from lamina.state.trigger_records import AddedTrigger, AsideMessage, trigger_digest
from lamina.state.triggers import Triggers

MAX_ADDED = 200
"""Triggers that one tenant may add."""

MAX_BODY_BYTES = 64 * 2**10
MAX_SHOWN_BYTES = 4 * 2**10
"""Of a message that was set aside."""

_TEXTS = ("target", "every", "cron", "zone", "on_change", "workflow", "broker", "topic", "overlap")


class TriggerRoutes:
    """Routes of triggers. A trigger belongs to the tenant of its target. `triggers` are there once the server leads."""

    def __init__(
        self,
        triggers: Callable[[], Triggers | None],
        targets: TargetRegistry,
        shared: EngineShared,
        own_app: str,
        access: AccessControl | None,
        now_us: Callable[[], int],
    ) -> None:
        self._triggers, self._targets, self._shared, self._own_app = triggers, targets, shared, own_app
        self._access, self._now_us = access, now_us
        self._audits: set[asyncio.Task[None]] = set()
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/triggers": self._list,
            "GET /v1/triggers/{trigger}": self._get,
            "PUT /v1/triggers/{trigger}": self._put,
            "DELETE /v1/triggers/{trigger}": self._delete,
        }

    @property
    def _open(self) -> Triggers:
        found = self._triggers()
        if found is None or not found.opened.is_set():
            raise StoreDown("triggers are not read yet", hint="try again in a moment")
        return found

    def _seen(self, grant: Grant) -> list[dict[str, Any]]:
        return sorted(self._open.status(grant.sees), key=lambda one: str(one["id"]))

    def _find(self, id: str, grant: Grant) -> dict[str, Any]:
        found = next(iter(self._open.status(grant.sees, id)), None) if id else None
        if found is None:
            seen = [one["id"] for one in self._seen(grant)]
            raise NotFound(f"no trigger {id[:80]!r}", hint=did_you_mean(id[:80], seen, "GET /v1/triggers"))
        grant.check_owner(found["tenant"], NotFound(f"no trigger {id[:80]!r}"))
        return found

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        query = http_codec.parse_query(request, ("target",))
        found = [one for one in self._seen(grant) if query.get("target", one["target"]) == one["target"]]
        exchange.respond(200, msgspec.json.encode({"triggers": found}), http_codec.JSON)

    def _get(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        about = self._find(id, grant)
        triggers = self._open
        name = next(one.name for one in triggers.all if (one.id or trigger_digest(one.name)) == id)

        def read(found: list[AsideMessage] | LaminaError) -> None:
            if isinstance(found, LaminaError):
                respond_problem(exchange, error_problem(found))
                return
            shown = [{**msgspec.to_builtins(one), "body": _base64(one.body)} for one in found]
            exchange.respond(200, msgspec.json.encode({**about, "aside": shown}), http_codec.JSON)

        triggers.aside(name, read)

    def _put(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        http_codec.check_encoding(request)
        triggers, given = self._open, _checked(request.body)
        if not NAME_PATTERN.fullmatch(id):
            raise BadValue(
                f"trigger: {id[:80]!r} cannot be its name", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first"
            )
        asked = given.pop("target")
        target = next((one for one in self._targets.all if one.name == asked), None)
        seen = [one.name for one in self._targets.all if grant.sees(one.tenant)]
        hint = did_you_mean(asked[:80], seen, "GET /v1/functions and /v1/workflows list them")
        missing = UnknownTarget(f"target: no function or workflow {asked[:80]!r}", hint=hint)
        if target is None:
            raise missing
        grant.check_owner(target.tenant, missing)
        taken = triggers.added.get(id)
        if taken is not None and taken.tenant != target.tenant:
            raise Conflict(f"the name {id!r} is taken", hint="give the trigger another name")
        trigger = bind_trigger(make_trigger(**given, id=id), target)
        if trigger.kind == "message":
            broker = triggers.brokers.get(trigger.broker)
            if broker is None or not broker.serves(target.tenant):
                known = [one.name for one in triggers.brokers.values() if one.serves(target.tenant)]
                hint = f"there are {', '.join(known)}" if known else "the operator names them: lamina serve --broker NAME=URL"
                raise NotFound(f"broker: none is called {trigger.broker[:80]!r} here", hint=hint)
        if taken is None and sum(one.tenant == target.tenant for one in triggers.added.values()) >= MAX_ADDED:
            raise NoCapacity(f"{MAX_ADDED} triggers have been added", hint="remove one: DELETE /v1/triggers/NAME")
        app = self._shared.source(target.name).app or self._own_app
        record = AddedTrigger(trigger=trigger, app=app, tenant=target.tenant, by=grant.caller.name, at_us=self._now_us())

        def written(error: LaminaError | None) -> None:
            if error is not None:
                respond_problem(exchange, error_problem(error))
                return
            self._audit(grant.caller, "trigger", id, request.body[:1_000].decode("utf-8", "replace"))
            about = next(iter(triggers.status(id=id)), {"id": id})
            exchange.respond(200 if taken is not None else 201, msgspec.json.encode(about), http_codec.JSON)

        triggers.add(record, written)

    def _delete(self, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        if self._find(id, grant)["declared"]:
            raise Conflict(f"trigger {id!r} is declared in the app", hint="deploy a version without it")

        def written(error: LaminaError | None) -> None:
            if error is not None:
                respond_problem(exchange, error_problem(error))
                return
            self._audit(grant.caller, "trigger-removed", id, "")
            exchange.respond(204, b"", http_codec.JSON)

        self._open.remove(id, written)

    def _audit(self, caller: Identity, deed: str, subject: str, note: str) -> None:
        if self._access is not None:
            task = asyncio.get_running_loop().create_task(
                self._access.write_audited(caller, deed, subject, lambda db: None, note)
            )
            self._audits.add(task)
            task.add_done_callback(self._audits.discard)


def _checked(body: bytes) -> dict[str, Any]:
    """Terms of a trigger: texts, and an object of inputs."""
    if len(body) > MAX_BODY_BYTES:
        raise BadValue(f"body: {len(body)} bytes", hint=f"at most {MAX_BODY_BYTES}")
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise BadValue("body: no JSON object", hint='{"target": "tidy", "every": "15m"}') from None
    for name, value in given.items():
        if name == "input" and isinstance(value, dict):
            continue
        if name not in _TEXTS:
            what = "no object" if name == "input" else "none of the terms of a trigger"
            raise BadValue(f"{name[:40]}: {what}", hint=f"there are {', '.join((*_TEXTS, 'input'))}")
        if not isinstance(value, str):
            raise BadValue(f"{name}: {str(value)[:40]!r} is no text", hint='such as "every": "15m"')
    if "target" not in given:
        raise BadValue("target: it is not given", hint="the function or workflow to start")
    return given


def _base64(body: bytes) -> str:
    return base64.b64encode(body[:MAX_SHOWN_BYTES]).decode()
