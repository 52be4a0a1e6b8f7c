"""REST routes of the protocol under /v2. Errors are `{"error": text}` there, which is all its clients can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lamina import values
from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.gateway import logs, wire
from lamina.gateway.api import Api
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.oip import about, generate
from lamina.gateway.oip.errors import error_text, refuse
from lamina.gateway.oip.infer import infer
from lamina.gateway.oip.models import Model
from lamina.gateway.oip.packed import opened
from lamina.gateway.oip.repository import Repository
from lamina.gateway.oip.serving import Serving

_encode = msgspec.json.encode


class Rest:
    """Routes under /v2."""

    def __init__(self, api: Api, serving: Serving, repository: Repository, body_limit: int) -> None:
        self._api = api
        self._serving = serving
        self._repository = repository
        self._limit = body_limit

    def handle(self, request: Request, exchange: Exchange) -> None:
        try:
            encoding = request.header(b"content-encoding")
            if encoding and encoding != b"identity":
                self._api.allow(request, "invoke")  # opening it is work
                opened(request.body, encoding, self._limit, lambda found: self._unpacked(request, exchange, found))
            else:
                self._route(request, exchange)
        except LaminaError as error:
            refuse(exchange, wire.error_problem(error))

    def _unpacked(self, request: Request, exchange: Exchange, found: bytes | LaminaError) -> None:
        try:
            if isinstance(found, LaminaError):
                raise found
            whole = Request(request.method, request.path, request.query, request.headers, found, request.keep_alive)
            self._route(whole, exchange)
        except LaminaError as error:
            refuse(exchange, wire.error_problem(error))

    # -------------------------------------------------------------------- routes

    def _route(self, request: Request, exchange: Exchange) -> None:
        match request.path.rstrip(b"/").decode("latin-1").split("/")[2:]:
            case ["models", name, "infer"]:
                self._infer(request, exchange, name, "")
            case ["models", name, "versions", version, "infer"]:
                self._infer(request, exchange, name, version)
            case []:
                self._tell(request, exchange, lambda tenant: about.server())
            case ["health", "live"]:
                self._health(request, exchange, "live", True)
            case ["health", "ready"]:
                self._health(request, exchange, "ready", not self._api.closing and self._api.ready())
            case ["models", "stats"]:
                self._tell(request, exchange, self._repository.statistics)
            case ["models", name, "versions", version, *rest]:
                self._model(request, exchange, name, version, rest)
            case ["models", name, *rest]:
                self._model(request, exchange, name, "", rest)
            case ["repository", "index"]:
                self._index(request, exchange)
            case ["repository", "models", name, ("load" | "unload") as verb]:
                self._change(request, exchange, name, verb)
            case _:
                raise _nothing_at(request, "GET /v2 tells about this server, POST /v2/repository/index lists the models")

    def _model(self, request: Request, exchange: Exchange, name: str, version: str, rest: list[str]) -> None:
        catalogue = self._serving.catalogue

        def model(tenant: str) -> Model:
            return catalogue.find(name, version, tenant)

        match rest:
            case []:
                self._tell(request, exchange, lambda tenant: about.metadata(catalogue, model(tenant)))
            case ["ready"]:
                tenant = self._api.allow(request, "read").tenant
                self._health(request, exchange, "ready", catalogue.is_loaded(model(tenant)), {"name": name})
            case ["config"]:
                self._tell(request, exchange, lambda tenant: about.config(catalogue, model(tenant)))
            case ["stats"]:
                self._tell(request, exchange, lambda tenant: {"model_stats": [self._serving.statistics.shown(model(tenant))]})
            case [("generate" | "generate_stream") as verb]:
                if self._need(request, exchange, "POST"):
                    caller = self._api.allow(request, "invoke")
                    in_pieces = verb == "generate_stream"
                    generate.answer(self._serving, model(caller.tenant), request, exchange, caller, in_pieces=in_pieces)
            case _:
                raise _nothing_at(request, "of a model there are infer, ready, config, stats, generate, generate_stream")

    # --------------------------------------------------------------------- reads

    def _need(self, request: Request, exchange: Exchange, *methods: str) -> bool:
        if request.method in methods:
            return True
        allowed = ", ".join(methods)
        problem = wire.method_problem(request, allowed)
        logs.refused(problem)
        headers = problem.headers() + b"allow: %s\r\n" % allowed.encode()
        exchange.respond(405, _encode({"error": error_text(problem)}), wire.JSON, headers)
        return False

    def _tell(self, request: Request, exchange: Exchange, what: Callable[[str], Any]) -> None:
        """Respond with a document; `what` gets the client's tenant."""
        if self._need(request, exchange, "GET", "HEAD"):
            exchange.respond(200, _encode(what(self._api.allow(request, "read").tenant)))

    def _health(self, request: Request, exchange: Exchange, word: str, is_well: bool, more: dict[str, Any] | None = None) -> None:
        """Health with a body: some clients look at the status alone, some at the word."""
        if self._need(request, exchange, "GET", "HEAD"):
            exchange.respond(200 if is_well else 400, _encode({**(more or {}), word: is_well}))

    # ---------------------------------------------------------------- repository

    def _index(self, request: Request, exchange: Exchange) -> None:
        if self._need(request, exchange, "POST"):
            tenant = self._api.allow(request, "read").tenant
            only_ready = _object(request.body).get("ready") is True
            exchange.respond(200, _encode(about.index(self._serving.catalogue, only_ready, tenant)))

    def _change(self, request: Request, exchange: Exchange, name: str, verb: str) -> None:
        if not self._need(request, exchange, "POST"):
            return
        tenant = self._api.allow(request, "deploy").tenant
        parameters = _object(request.body).get("parameters") or {}

        def on_end(error: LaminaError | None) -> None:
            if error is None:
                exchange.respond(200, b"{}")
            else:
                refuse(exchange, wire.error_problem(error))

        if verb == "load":
            self._repository.load(name, tenant, parameters, on_end)
        else:
            self._repository.unload(name, tenant, parameters, on_end)

    # --------------------------------------------------------------------- infer

    def _infer(self, request: Request, exchange: Exchange, name: str, version: str) -> None:
        if not self._need(request, exchange, "POST"):
            return
        caller = self._api.allow(request, "invoke")
        infer(self._serving, self._serving.catalogue.find(name, version, caller.tenant), caller, request, exchange)


def _nothing_at(request: Request, hint: str) -> UnknownTarget:
    return UnknownTarget(f"nothing at {request.path[:80].decode('latin-1')!r}", hint=hint)


def _object(text: bytes) -> dict[str, Any]:
    found = values.from_json(text) if text.strip() else {}
    if not isinstance(found, dict) or not isinstance(found.get("parameters", {}), dict | None):
        raise BadValue("body: not a JSON object", hint='send {}, or {"parameters": {...}}')
    return found
