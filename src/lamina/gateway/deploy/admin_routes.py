"""Routes of the admin server, on a listener of their own: none of them can be reached where calls come in.

Slow work (a password, the store, an upload) runs in a task, not on the loop's turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec

from lamina.access.access_control import AccessControl
from lamina.access.admin_service import AdminService
from lamina.access.authorization import UNKNOWN_ROUTE, Grant, RouteMap
from lamina.access.records import Identity
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.errors import BadValue, LaminaError, NotFound, Unauthorized
from lamina.gateway.auth import Authenticator
from lamina.gateway.deploy.deployments import Deployments
from lamina.gateway.observability.function_logs import FunctionLogs
from lamina.gateway.routes.codec_pool import check_light_json
from lamina.gateway.routes.http_codec import check_encoding
from lamina.gateway.routes.problems import error_problem, make_problem, respond_problem
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.process_status import ProcessStatus

log = logging.getLogger("lamina")

Given = dict[str, Any]
Work = Coroutine[Any, Any, Any]
AdminHandler = Callable[..., Work | None]
"""The work for a request, with its exchange, its grant and what its path names; None if it has been answered."""


class AdminRoutes:
    """Admin routes: log-in, users and tokens, deployments, function logs."""

    def __init__(
        self,
        access: AccessControl,
        auth: Authenticator,
        admin: AdminService,
        deployments: Deployments,
        logs: FunctionLogs,
        process: ProcessStatus,
        cluster: ClusterEngine | None = None,
        more: Mapping[str, AdminHandler] | None = None,
    ) -> None:
        """`more` are routes of the console, where there is one."""
        self._cluster = cluster
        self._process = process
        self._access = access
        self._auth = auth
        self._admin = admin
        self._deployments = deployments
        self._function_logs = logs
        self._tasks: set[asyncio.Task[None]] = set()
        handlers: dict[str, AdminHandler] = {
            "GET /healthz": lambda request, exchange, grant: _now({"status": "ok"}),
            "POST /v1/auth/log-in": self._log_in,
            "POST /v1/auth/sign-up": self._sign_up,
            "POST /v1/auth/log-out": self._log_out,
            "GET /v1/whoami": lambda request, exchange, grant: _now(_shown(grant.caller)),
            "GET /v1/apps": lambda request, exchange, grant: _now(deployments.list_apps(grant)),
            "PUT /v1/apps/{app}": self._deploy,
            "GET /v1/apps/{app}/history": lambda request, exchange, grant, app: deployments.history(grant, app),
            "POST /v1/apps/{app}/rollback": self._rollback,
            "GET /v1/apps/{app}/traffic": lambda request, exchange, grant, app: _now(deployments.show_traffic(grant, app)),
            "PUT /v1/apps/{app}/traffic": self._set_traffic,
            "POST /v1/functions/{function}/terms": self._override,
            "GET /v1/logs": self._serve_logs,
            "GET /v1/nodes": lambda request, exchange, grant: _now(cluster.list_nodes() if cluster is not None else []),
            "POST /v1/nodes/{node}/drain": self._drain,
        }
        handlers |= {f"POST /v1/admin/{what}": partial(self._administer, what) for what in admin.actions}
        self._routes: RouteMap[AdminHandler] = RouteMap("management", handlers | dict(more or {}))

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        try:
            work = self._start(request, exchange)
        except LaminaError as error:
            self._problem(exchange, error)
            return
        if work is not None:
            task = asyncio.create_task(self._answer(work, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _start(self, request: HttpRequest, exchange: Exchange) -> Work | None:
        """The work for a request, if its caller may ask for it."""
        check_encoding(request)
        is_static = request.path == b"/healthz" or request.path.startswith(b"/console")
        if self._process.is_standby and self._process.refusal is not None and not is_static:
            raise self._process.refusal()
        found = self._routes.find(request.method, request.path)
        if found is None or isinstance(found, str):
            self._auth.authorize(request, UNKNOWN_ROUTE)
            where = f"{request.method} {request.path[:80].decode('latin-1')}"
            raise NotFound(
                f"nothing at {where!r}", hint="docs/how-to/authentication.md and docs/how-to/deploy.md list what there is"
            )
        grant = Grant(self._auth.authorize(request, found.rule), found.rule)
        if request.path != b"/healthz":
            self._access.check_current()
        return found.handler(request, exchange, grant, *found.params)

    # ----------------------------------------------------------------------- routes

    def _administer(self, what: str, request: HttpRequest, exchange: Exchange, grant: Grant) -> Work:
        return self._admin.perform(grant.caller, what, _body(request))

    def _deploy(self, request: HttpRequest, exchange: Exchange, grant: Grant, app: str) -> Work:
        sha256, entry = request.header(b"lamina-sha256"), request.header(b"lamina-entry")
        percent = _percent(request.header(b"lamina-traffic"))
        return self._deployments.deploy(grant, app, request.body, sha256.decode("latin-1"), entry.decode("latin-1"), percent)

    def _set_traffic(self, request: HttpRequest, exchange: Exchange, grant: Grant, app: str) -> Work:
        return self._deployments.set_traffic(grant, app, _body(request))

    def _rollback(self, request: HttpRequest, exchange: Exchange, grant: Grant, app: str) -> Work:
        version = _body(request).get("version")
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise BadValue(f"version: {str(version)[:40]!r} is not a number")
        return self._deployments.rollback(grant, app, version)

    def _override(self, request: HttpRequest, exchange: Exchange, grant: Grant, function: str) -> Work:
        return self._deployments.override(grant, function, _body(request))

    def _serve_logs(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        known = {function["name"] for app in self._deployments.list_apps(grant) for function in app["functions"]}
        self._function_logs.serve(request, exchange, known, grant)

    async def _drain(self, request: HttpRequest, exchange: Exchange, grant: Grant, node: str) -> Given:
        if self._cluster is None:
            raise NotFound("this server has no nodes", hint="agents join a server that was started with --agents HOST:PORT")
        self._cluster.drain(node)
        return next(one for one in self._cluster.list_nodes() if one["name"] == node)

    async def _log_in(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Given:
        given = _body(request)
        token, visit = await self._access.log_in(_text(given, "name"), _text(given, "password"), exchange.address)
        left_s = (visit.until_us - self._access.now_us()) // 1_000_000
        return {"token": token, "expires_s": left_s, **_shown(visit.identity)}

    async def _sign_up(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Given:
        given = _body(request)
        name = _text(given, "name")
        await self._access.sign_up(name, _text(given, "password"), _text(given, "code"), exchange.address)
        return {"name": name}

    async def _log_out(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Given:
        self._access.log_out(request.header(b"authorization")[7:].strip().decode("latin-1"))
        return {"logged_out": True}

    async def _answer(self, work: Work, exchange: Exchange) -> None:
        try:
            exchange.respond(200, msgspec.json.encode(await work))
        except LaminaError as error:
            self._problem(exchange, error)
        except Exception:
            problem = make_problem(500, "it failed; the log says why, under this id", code="internal")
            log.exception("management request %s failed", problem.id)
            respond_problem(exchange, problem)

    def _problem(self, exchange: Exchange, error: LaminaError) -> None:
        respond_problem(exchange, error_problem(error))

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _now(value: Any) -> Any:
    return value


def _shown(caller: Identity) -> Given:
    return {"name": caller.name, "tenant": caller.tenant, "scopes": sorted(caller.scopes)}


def _body(request: HttpRequest) -> Given:
    if not request.body:
        return {}
    check_light_json(request.body)
    try:
        given = msgspec.json.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadValue("body: not JSON", hint="send one JSON object, in UTF-8") from None
    if not isinstance(given, dict):
        raise BadValue(
            f"body: {type(given).__name__} given where an object is needed", hint="docs/how-to/authentication.md lists the fields"
        )
    return given


def _percent(text: bytes) -> float | None:
    """Share of the traffic that an upload is to get; None: all of it."""
    if not text:
        return None
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 <= percent < 100:
        raise BadValue(f"lamina-traffic: {text[:40].decode('latin-1')!r} is no percentage", hint="from 0 to below 100")
    return percent


def _text(given: Given, field: str) -> str:
    value = given.get(field)
    if not isinstance(value, str) or not 1 <= len(value) <= 1_000:
        raise Unauthorized(f"{field}: not given", hint="send name and password as JSON")
    return value
