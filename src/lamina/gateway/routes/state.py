"""Routes of app and workflow state, `/v1/state`: keys listed, read, put and deleted."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from lamina import encoding
from lamina.access.records import Identity
from lamina.drivers.engine import EngineShared
from lamina.errors import BadValue, Conflict, NotFound
from lamina.gateway.auth import Authorize
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.problems import reject_method
from lamina.sdk.app_state import StateCell, StateChange, StateKey, apply_change, checked_key, checked_size
from lamina.server.exchange import Exchange, HttpRequest
from lamina.state.kv_state import StateTable, owned_scope, shown_scope

PREFIX = b"/v1/state"
MAX_KEYS = 1_000
_KNOWN = ("workflow", "app", "prefix", "after")


class StateRoutes:
    """Routes of state. `?workflow=NAME` means the state of that workflow, `?app=NAME` that of that app; without either, that of
    the app the server was started with, or of the only app of a tenant."""

    def __init__(self, authorize: Authorize, table: StateTable, shared: EngineShared) -> None:
        self._authorize = authorize
        self._table = table
        self._shared = shared
        self._verbs: dict[str, Callable[[StateKey, HttpRequest, Exchange], None]] = {
            "GET": self._get,
            "HEAD": self._get,
            "PUT": self._put,
            "DELETE": self._delete,
        }

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        query = http_codec.parse_query(request, _KNOWN)
        if self._table.down is not None:
            raise self._table.down
        rest = request.path[len(PREFIX) :]
        key = _key(rest[1:])
        if request.method not in (self._verbs if key else ("GET", "HEAD")):
            reject_method(request, exchange, "GET, HEAD, PUT, DELETE" if key else "GET, HEAD")
            return
        caller = self._authorize(request, "read" if request.method in ("GET", "HEAD") else "invoke")
        scope = self._scope(query, caller)
        if key:
            self._verbs[request.method]((scope, checked_key(key)), request, exchange)
        else:
            self._list(scope, query, exchange)

    def _scope(self, query: dict[str, str], caller: Identity) -> str:
        """Scope that is asked for. That of another tenant, and the operator's own, is not there for a tenant."""
        kind, name = ("workflow", query["workflow"]) if query.get("workflow") else ("app", query.get("app", ""))
        if kind == "workflow":
            owner = self._shared.source(name).tenant
        elif name:
            source = self._shared.app_source(name)
            owner = source.tenant if source is not None else ""
        else:
            apps = {source.app for source in self._shared.sources.values() if source.tenant == caller.tenant}
            owner, name = caller.tenant, (self._table.app if not caller.tenant else apps.pop() if len(apps) == 1 else "")
        if not name or (caller.tenant and owner != caller.tenant):
            raise NotFound(
                f"no state of {kind} {name[:80]!r}" if name else "whose state is meant is not said",
                hint="?app=NAME or ?workflow=NAME, of an app of this tenant",
            )
        return owned_scope(owner, kind, name)

    def _list(self, scope: str, query: dict[str, str], exchange: Exchange) -> None:
        prefix, after = query.get("prefix", ""), query.get("after", "")
        found = sorted(
            (key, cell)
            for (where, key), cell in self._table.cells.items()
            if where == scope and cell.value is not None and key.startswith(prefix) and key > after
        )
        shown = [
            {"key": key, "kind": cell.kind, "version": cell.version, "bytes": len(cell.value or b"")}
            for key, cell in found[:MAX_KEYS]
        ]
        more = found[MAX_KEYS - 1][0] if len(found) > MAX_KEYS else None
        exchange.respond(200, msgspec.json.encode({"scope": shown_scope(scope), "keys": shown, "next": more}))

    def _get(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        cell = self._existing_cell(place)
        assert cell.value is not None
        head = msgspec.json.encode({"key": place[1], "kind": cell.kind, "version": cell.version})
        body = head[:-1] + b',"value":' + encoding.to_json(encoding.decode(cell.value)) + b"}"
        exchange.respond(200, body, http_codec.JSON, b'etag: "%d"\r\n' % cell.version)

    def _put(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        http_codec.check_encoding(request)
        value = encoding.from_json(request.body)
        if value is None:
            raise BadValue("body: null is no value", hint="DELETE removes a key")
        known = self._table.read(place)
        self._check_version(place, known, request)
        op = StateChange("", place[1], "value", "put", checked_size(place[1], encoding.encode(value)))
        self._table.put(place, apply_change(known, op))
        exchange.respond(200, msgspec.json.encode({"key": place[1], "version": self._table.read(place).version}))

    def _delete(self, place: StateKey, request: HttpRequest, exchange: Exchange) -> None:
        known = self._existing_cell(place)
        self._check_version(place, known, request)
        self._table.put(place, apply_change(known, StateChange("", place[1], "value", "delete")))
        exchange.respond(204, b"")

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


def _key(quoted: bytes) -> str:
    try:
        return unquote(quoted.decode("latin-1"), errors="strict")
    except UnicodeDecodeError:
        raise BadValue("key: not UTF-8 once it is unquoted", hint="percent-encode its UTF-8 bytes") from None
