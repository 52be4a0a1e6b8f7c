"""REST routes of the protocol under /v2. Errors are `{"error": text}` there, which is all its clients can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lamina import encoding
from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.gateway.auth import Authorize
from lamina.gateway.observability import logs
from lamina.gateway.oip import model_catalog
from lamina.gateway.oip.inference import error_text, respond_error
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.rest_infer import handle_generate, handle_infer
from lamina.gateway.routes.http_codec import JSON
from lamina.gateway.routes.problems import error_problem, method_problem
from lamina.server.compression import decompress
from lamina.server.exchange import Exchange, HttpRequest

_encode = msgspec.json.encode


class OpenInferenceRoutes:
    """Routes under /v2."""

    def __init__(
        self,
        authorize: Authorize,
        inference: InferenceService,
        repository: ModelRepository,
        is_ready: Callable[[], bool],
        body_limit: int,
    ) -> None:
        self._authorize = authorize
        self._is_ready = is_ready
        self._inference = inference
        self._repository = repository
        self._limit = body_limit

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        try:
            compression = request.header(b"content-encoding")
            if compression and compression != b"identity":
                self._authorize(request, "invoke")  # opening it is work
                decompress(request.body, compression, self._limit, lambda found: self._on_decompressed(request, exchange, found))
            else:
                self._route(request, exchange)
        except LaminaError as error:
            respond_error(exchange, error_problem(error))

    def _on_decompressed(self, request: HttpRequest, exchange: Exchange, found: bytes | LaminaError) -> None:
        try:
            if isinstance(found, LaminaError):
                raise found
            whole = HttpRequest(request.method, request.path, request.query, request.headers, found, request.keep_alive)
            self._route(whole, exchange)
        except LaminaError as error:
            respond_error(exchange, error_problem(error))

    # -------------------------------------------------------------------- routes

    def _route(self, request: HttpRequest, exchange: Exchange) -> None:
        match request.path.rstrip(b"/").decode("latin-1").split("/")[2:]:
            case ["models", name, "infer"]:
                self._infer(request, exchange, name, "")
            case ["models", name, "versions", version, "infer"]:
                self._infer(request, exchange, name, version)
            case []:
                self._respond_document(request, exchange, lambda tenant: model_catalog.server_metadata())
            case ["health", "live"]:
                self._health(request, exchange, "live", True)
            case ["health", "ready"]:
                self._health(request, exchange, "ready", self._is_ready())
            case ["models", "stats"]:
                self._respond_document(request, exchange, self._repository.statistics)
            case ["models", name, "versions", version, *rest]:
                self._model(request, exchange, name, version, rest)
            case ["models", name, *rest]:
                self._model(request, exchange, name, "", rest)
            case ["repository", "index"]:
                self._index(request, exchange)
            case ["repository", "models", name, ("load" | "unload") as verb]:
                self._change(request, exchange, name, verb)
            case _:
                raise _not_found(request, "GET /v2 tells about this server, POST /v2/repository/index lists the models")

    def _model(self, request: HttpRequest, exchange: Exchange, name: str, version: str, rest: list[str]) -> None:
        catalogue = self._inference.catalogue

        def model(tenant: str) -> ServedModel:
            return catalogue.find(name, version, tenant)

        match rest:
            case []:
                self._respond_document(request, exchange, lambda tenant: model_catalog.model_metadata(catalogue, model(tenant)))
            case ["ready"]:
                tenant = self._authorize(request, "read").tenant
                self._health(request, exchange, "ready", catalogue.is_loaded(model(tenant)), {"name": name})
            case ["config"]:
                self._respond_document(request, exchange, lambda tenant: model_catalog.model_config(catalogue, model(tenant)))
            case ["stats"]:
                self._respond_document(
                    request, exchange, lambda tenant: {"model_stats": [self._inference.statistics.as_dict(model(tenant))]}
                )
            case [("generate" | "generate_stream") as verb]:
                if self._check_method(request, exchange, "POST"):
                    caller = self._authorize(request, "invoke")
                    in_pieces = verb == "generate_stream"
                    handle_generate(self._inference, model(caller.tenant), request, exchange, caller, in_pieces=in_pieces)
            case _:
                raise _not_found(request, "of a model there are infer, ready, config, stats, generate, generate_stream")

    # --------------------------------------------------------------------- reads

    def _check_method(self, request: HttpRequest, exchange: Exchange, *methods: str) -> bool:
        if request.method in methods:
            return True
        allowed = ", ".join(methods)
        problem = method_problem(request, allowed)
        logs.log_rejection(problem)
        headers = problem.headers() + b"allow: %s\r\n" % allowed.encode()
        exchange.respond(405, _encode({"error": error_text(problem)}), JSON, headers)
        return False

    def _respond_document(self, request: HttpRequest, exchange: Exchange, what: Callable[[str], Any]) -> None:
        """Respond with a document; `what` gets the client's tenant."""
        if self._check_method(request, exchange, "GET", "HEAD"):
            exchange.respond(200, _encode(what(self._authorize(request, "read").tenant)))

    def _health(
        self, request: HttpRequest, exchange: Exchange, word: str, is_well: bool, more: dict[str, Any] | None = None
    ) -> None:
        """Health with a body: some clients look at the status alone, some at the word."""
        if self._check_method(request, exchange, "GET", "HEAD"):
            exchange.respond(200 if is_well else 400, _encode({**(more or {}), word: is_well}))

    # ---------------------------------------------------------------- repository

    def _index(self, request: HttpRequest, exchange: Exchange) -> None:
        if self._check_method(request, exchange, "POST"):
            tenant = self._authorize(request, "read").tenant
            only_ready = _object(request.body).get("ready") is True
            exchange.respond(200, _encode(model_catalog.repository_index(self._inference.catalogue, only_ready, tenant)))

    def _change(self, request: HttpRequest, exchange: Exchange, name: str, verb: str) -> None:
        if not self._check_method(request, exchange, "POST"):
            return
        tenant = self._authorize(request, "deploy").tenant
        parameters = _object(request.body).get("parameters") or {}

        def on_end(error: LaminaError | None) -> None:
            if error is None:
                exchange.respond(200, b"{}")
            else:
                respond_error(exchange, error_problem(error))

        if verb == "load":
            self._repository.load(name, tenant, parameters, on_end)
        else:
            self._repository.unload(name, tenant, parameters, on_end)

    # --------------------------------------------------------------------- infer

    def _infer(self, request: HttpRequest, exchange: Exchange, name: str, version: str) -> None:
        if not self._check_method(request, exchange, "POST"):
            return
        caller = self._authorize(request, "invoke")
        handle_infer(self._inference, self._inference.catalogue.find(name, version, caller.tenant), caller, request, exchange)


def _not_found(request: HttpRequest, hint: str) -> UnknownTarget:
    return UnknownTarget(f"nothing at {request.path[:80].decode('latin-1')!r}", hint=hint)


def _object(text: bytes) -> dict[str, Any]:
    found = encoding.from_json(text) if text.strip() else {}
    if not isinstance(found, dict) or not isinstance(found.get("parameters", {}), dict | None):
        raise BadValue("body: not a JSON object", hint='send {}, or {"parameters": {...}}')
    return found
