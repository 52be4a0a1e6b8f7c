"""Routes of the admin server, on a listener of their own: none of them can be reached where calls come in.

Every route names the scope it takes. Slow work (a password, the store, an upload) runs in a task, not on the loop's turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from lamina.access.access_control import AccessControl
from lamina.access.admin_service import AdminService
from lamina.access.records import Identity, Scope
from lamina.errors import BadValue, LaminaError, NotFound, Refused, Unauthorized
from lamina.gateway.auth import Authenticator
from lamina.gateway.deploy.deployments import Deployments
from lamina.gateway.observability.function_logs import FunctionLogs
from lamina.gateway.routes.http_codec import check_encoding
from lamina.gateway.routes.problems import error_problem, make_problem, respond_problem
from lamina.server.exchange import Exchange, HttpRequest

log = logging.getLogger("lamina")

Given = dict[str, Any]
Work = Coroutine[Any, Any, Any]


class AdminRoutes:
    """Admin routes: log-in, users and tokens, deployments, function logs."""

    def __init__(
        self, access: AccessControl, auth: Authenticator, admin: AdminService, deployments: Deployments, logs: FunctionLogs
    ) -> None:
        self._access = access
        self._auth = auth
        self._admin = admin
        self._deployments = deployments
        self._function_logs = logs
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        try:
            work = self._route(request, exchange)
        except LaminaError as error:
            self._problem(exchange, error)
            return
        if work is not None:
            task = asyncio.create_task(self._answer(work, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _route(self, request: HttpRequest, exchange: Exchange) -> Work | None:
        """The work for a request. The path is not percent-decoded: no name has a character that needs it."""
        check_encoding(request)
        parts = request.path.decode("latin-1").split("/")[1:]
        match (request.method, *parts):
            case ("GET", "healthz"):
                exchange.respond(200, b'{"status":"ok"}')
                return None
            case ("POST", "v1", "auth", "log-in"):
                given = _body(request)
                return self._log_in(_text(given, "name"), _text(given, "password"))
            case ("POST", "v1", "auth", "sign-up"):
                given = _body(request)
                return self._sign_up(_text(given, "name"), _text(given, "password"), _text(given, "code"))
            case ("POST", "v1", "auth", "log-out"):
                return self._log_out(request)
            case ("GET", "v1", "whoami"):
                return _now(_shown(self._identify(request, "read")))
            case ("POST", "v1", "admin", noun, verb):
                return self._admin.perform(self._identify(request, "admin"), f"{noun}/{verb}", _body(request))
            case ("GET", "v1", "apps"):
                return _now(self._deployments.list_apps(self._identify(request, "read")))
            case ("PUT", "v1", "apps", app):
                caller = self._identify(request, "deploy")
                sha256, entry = request.header(b"lamina-sha256"), request.header(b"lamina-entry")
                return self._deployments.deploy(caller, app, request.body, sha256.decode("latin-1"), entry.decode("latin-1"))
            case ("GET", "v1", "apps", app, "history"):
                return self._deployments.history(self._identify(request, "read"), app)
            case ("POST", "v1", "apps", app, "rollback"):
                caller, version = self._identify(request, "deploy"), _body(request).get("version")
                if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
                    raise BadValue(f"version: {str(version)[:40]!r} is not a number")
                return self._deployments.rollback(caller, app, version)
            case ("POST", "v1", "functions", function, "terms"):
                return self._deployments.override(self._identify(request, "deploy"), function, _body(request))
            case ("GET", "v1", "logs"):
                caller = self._identify(request, "read")
                self._function_logs.serve(request, exchange, self._functions_of(caller), caller.tenant)
                return None
            case _:
                self._identify(request, "read")
                where = f"{request.method} {request.path[:80].decode('latin-1')}"
                raise NotFound(
                    f"nothing at {where!r}", hint="docs/how-to/authentication.md and docs/how-to/deploy.md list what there is"
                )

    def _identify(self, request: HttpRequest, scope: Scope) -> Identity:
        return self._auth.authorize(request, scope)

    def _functions_of(self, caller: Identity) -> set[str]:
        """Functions whose logs this identity may read."""
        apps = [app for app in self._deployments.list_apps(caller) if not caller.tenant or app["tenant"] == caller.tenant]
        return {function["name"] for app in apps for function in app["functions"]}

    async def _log_in(self, name: str, password: str) -> Given:
        token, visit = await self._access.log_in(name, password)
        left_s = (visit.until_us - self._access.now_us()) // 1_000_000
        return {"token": token, "expires_s": left_s, **_shown(visit.identity)}

    async def _sign_up(self, name: str, password: str, code: str) -> Given:
        await self._access.sign_up(name, password, code)
        return {"name": name}

    async def _log_out(self, request: HttpRequest) -> Given:
        header = request.header(b"authorization")
        self._auth.authenticate(header or None)
        self._access.log_out(header[7:].strip().decode("latin-1"))
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
        problem = error_problem(error)
        if isinstance(error, Refused):
            problem.reason, problem.retry_after_s = error.reason, error.retry_after_s
        respond_problem(exchange, problem)

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
    try:
        given = msgspec.json.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadValue("body: not JSON", hint="send one JSON object, in UTF-8") from None
    if not isinstance(given, dict):
        raise BadValue(
            f"body: {type(given).__name__} given where an object is needed", hint="docs/how-to/authentication.md lists the fields"
        )
    return given


def _text(given: Given, field: str) -> str:
    value = given.get(field)
    if not isinstance(value, str) or not 1 <= len(value) <= 1_000:
        raise Unauthorized(f"{field}: not given", hint="send name and password as JSON")
    return value
