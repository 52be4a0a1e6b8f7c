"""Routes of app and workflow state, `/v1/state`: keys listed, read, put and deleted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.drivers.engine import EngineShared
from lamina.errors import BadValue, Conflict, LaminaError, NotFound, checked_text
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.codec_pool import check_light_json
from lamina.gateway.routes.problems import error_problem, respond_problem
from lamina.sdk.app_state import MAX_VALUE_BYTES, StateCell, StateChange, StateKey, apply_change, checked_key, checked_size
from lamina.server.exchange import Exchange, HttpRequest
from lamina.state.kv_state import StateTable, owned_scope, shown_scope

MAX_KEYS = 1_000
MAX_BODY_BYTES = MAX_VALUE_BYTES + 64 * 2**10
KeyAction = Callable[[StateKey, HttpRequest, Exchange], None]
_KNOWN = ("workflow", "app", "prefix", "after")


class StateRoutes:
    """Routes of state. `?workflow=NAME` means the state of that workflow, `?app=NAME` that of that app; without either, that of
    the app the server was started with, or of the only app of a tenant."""

    def __init__(self, table: StateTable, shared: EngineShared) -> None:
        self._table = table
        self._shared = shared
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/state": self._list,
            "GET /v1/state/{key*}": partial(self._on_key, self._get),
            "PUT /v1/state/{key*}": partial(self._on_key, self._put),
            "DELETE /v1/state/{key*}": partial(self._on_key, self._delete),
        }

    def _on_key(self, act: KeyAction, request: HttpRequest, exchange: Exchange, grant: Grant, quoted: str) -> None:
        scope = self._scope(http_codec.parse_query(request, _KNOWN), grant)
        act((scope, checked_key(_key(quoted))), request, exchange)

    def _scope(self, query: dict[str, str], grant: Grant) -> str:
        """Scope that is asked for, of those the caller reaches."""
        if self._table.down is not None:
            raise self._table.down
        kind, name = ("workflow", query["workflow"]) if query.get("workflow") else ("app", query.get("app", ""))
        checked_text(kind, name)
        if kind == "workflow":
            owner = self._shared.source(name).tenant
        elif name:
            source = self._shared.app_source(name)
            owner = source.tenant if source is not None else ""
        else:
            owner = grant.tenant
            apps = {source.app for source in self._shared.sources.values() if source.tenant == owner}
            name = self._table.app if not owner else apps.pop() if len(apps) == 1 else ""
        missing = NotFound(f"no state of {kind} {name[:80]!r}", hint="?app=NAME or ?workflow=NAME, of an app of this tenant")
        if not name:
            raise missing
        grant.check_owner(owner, missing)
        return owned_scope(owner, kind, name)

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        query = http_codec.parse_query(request, _KNOWN)
        scope = self._scope(query, grant)
        prefix, after = query.get("prefix", ""), query.get("after", "")
        found = self._table.list_keys(scope, prefix, after, MAX_KEYS + 1)
        shown = [
            {"key": key, "kind": cell.kind, "version": cell.version, "bytes": len(cell.value or b"")}
            for key, cell in found[:MAX_KEYS]
        ]
        more = found[MAX_KEYS - 1][0] if len(found) > MAX_KEYS else None
        self._respond_confirmed(exchange, 200, msgspec.json.encode({"scope": shown_scope(scope), "keys": shown, "next": more}))

    def _get(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        try:
            cell = self._existing_cell(place)
        except NotFound as error:
            missing = error  # that it is not there is an answer like any other
            self._table.confirm(lambda lost: self._respond(exchange, lost or missing, 404, b""))
            return
        assert cell.value is not None
        encoding.looked_into(cell.value)
        head = msgspec.json.encode({"key": place[1], "kind": cell.kind, "version": cell.version})
        body = head[:-1] + b',"value":' + encoding.to_json(encoding.decode(cell.value)) + b"}"
        self._respond_confirmed(exchange, 200, body, b'etag: "%d"\r\n' % cell.version)

    def _put(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        http_codec.check_encoding(request)
        if len(request.body) > MAX_BODY_BYTES:  # it would be too large as a value; not even looked at
            raise BadValue(
                f"body: {len(request.body)} bytes", hint=f"at most {MAX_VALUE_BYTES} at one key; use several keys, or a file"
            )
        check_light_json(request.body)
        value = encoding.from_json(request.body)
        if value is None:
            raise BadValue("body: null is no value", hint="DELETE removes a key")
        known = self._table.read(place)
        self._check_version(place, known, request)
        op = StateChange("", place[1], "value", "put", checked_size(place[1], encoding.encode(value)))

        def done(error: LaminaError | None) -> None:
            self._respond(exchange, error, 200, body)

        cell = apply_change(known, op)
        self._table.check_room({place: cell})
        version = known.version if cell.value == known.value else cell.version
        body = msgspec.json.encode({"key": place[1], "version": version})
        self._table.put(place, cell, done)

    def _delete(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        known = self._existing_cell(place)
        self._check_version(place, known, request)
        gone = apply_change(known, StateChange("", place[1], "value", "delete"))
        self._table.put(place, gone, lambda error: self._respond(exchange, error, 204, b""))

    def _respond_confirmed(self, exchange: Exchange, status: int, body: bytes, headers: bytes = b"") -> None:
        """Respond with what was read, once it is known to be on disk, and to be the state still."""
        self._table.confirm(lambda error: self._respond(exchange, error, status, body, headers))

    def _respond(self, exchange: Exchange, error: LaminaError | None, status: int, body: bytes, headers: bytes = b"") -> None:
        if error is not None:
            respond_problem(exchange, error_problem(error))
        else:
            exchange.respond(status, body, http_codec.JSON, headers)

    def _existing_cell(self, place: StateKey) -> StateCell:
        cell = self._table.read(place)
        if cell.value is None:
            raise NotFound(f"no key {place[1]!r} in the state of {shown_scope(place[0])}", hint="GET /v1/state lists the keys")
        return cell

    def _check_version(self, place: StateKey, cell: StateCell, request: HttpRequest) -> None:
        """`if-match: "3"`: optimistic concurrency, only if it still has this version."""
        wanted = request.header(b"if-match").strip(b' "')
        if wanted and not wanted.isdigit():
            raise BadValue(f"if-match: {wanted[:40].decode('latin-1')!r} is no version", hint='write it as the ETag says it: "3"')
        if wanted and wanted != b"%d" % cell.version:
            raise Conflict(f"{place[1]!r} has version {cell.version} now", hint="look again before changing it")


def _key(quoted: str) -> str:
    try:
        return unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        raise BadValue("key: not UTF-8 once it is unquoted", hint="percent-encode its UTF-8 bytes") from None
