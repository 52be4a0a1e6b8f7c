"""REST routes of the protocol under /v2. Errors are `{"error": text}` there, which is all its clients can read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from lamina import encoding
from lamina.access.authorization import UNKNOWN_ROUTE, Grant, MatchedRoute, RouteMap
from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.gateway.auth import Authorize
from lamina.gateway.observability import logs
from lamina.gateway.oip import model_catalog
from lamina.gateway.oip.inference import error_text, respond_error
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.rest_infer import handle_generate, handle_infer
from lamina.gateway.routes.codec_pool import CodecPool, CodecTooLarge, check_light_json, is_heavy_json
from lamina.gateway.routes.explain import SampledRefusals
from lamina.gateway.routes.http_codec import JSON
from lamina.gateway.routes.problems import error_problem, method_problem
from lamina.server.compression import decompress
from lamina.server.exchange import Exchange, HttpRequest

RestHandler = Callable[..., None]
"""Handles a request with its exchange, its grant, and the model and version of its path."""

_encode = msgspec.json.encode


class OpenInferenceRoutes:
    """Routes under /v2."""

    def __init__(
        self,
        authorize: Authorize,
        inference: InferenceService,
        repository: ModelRepository,
        is_ready: Callable[[], bool],
        refusals: SampledRefusals,
        body_limit: int,
        codecs: CodecPool | None = None,
    ) -> None:
        self._authorize = authorize
        self._codecs = codecs
        self._is_ready = is_ready
        self._inference = inference
        self._repository = repository
        self._limit = body_limit
        routes: dict[str, RestHandler] = {
            "GET /v2": self._document(lambda grant: model_catalog.server_metadata()),
            "GET /v2/health/live": lambda request, exchange, grant: _health(exchange, "live", True),
            "GET /v2/health/ready": lambda request, exchange, grant: _health(exchange, "ready", is_ready()),
            "GET /v2/models/stats": self._document(repository.statistics),
            "POST /v2/repository/index": self._index,
            "POST /v2/repository/models/{model}/load": partial(self._change, repository.load),
            "POST /v2/repository/models/{model}/unload": partial(self._change, repository.unload),
        }
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes |= {
                f"GET {model}": self._model_document(lambda found: model_catalog.model_metadata(inference.catalogue, found)),
                f"GET {model}/config": self._model_document(lambda found: model_catalog.model_config(inference.catalogue, found)),
                f"GET {model}/stats": self._model_document(lambda found: {"model_stats": [inference.statistics.as_dict(found)]}),
                f"GET {model}/ready": self._model_ready,
                f"POST {model}/infer": self._infer,
                f"POST {model}/generate": partial(self._generate, False),
                f"POST {model}/generate_stream": partial(self._generate, True),
            }
        self._routes: RouteMap[RestHandler] = RouteMap("calls", routes)
        self._refusals = refusals

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        try:
            found = self._routes.find(request.method, request.path.rstrip(b"/"))
            if isinstance(found, str):
                _reject_method(request, exchange, found)
                return
            if found is None:
                self._authorize(request, UNKNOWN_ROUTE)
                raise _not_found(request)
            grant = Grant(self._authorize(request, found.rule), found.rule)  # before a body is opened, which is work
            compression = request.header(b"content-encoding")
            if compression and compression != b"identity":
                then = partial(self._on_decompressed, found, grant, request, exchange)
                decompress(request.body, compression, self._limit, then)
            else:
                found.handler(request, exchange, grant, *found.params)
        except LaminaError as error:
            problem = error_problem(error)
            respond_error(exchange, problem)
            self._refusals.record_problem(problem, request.path.decode("latin-1"))

    def _on_decompressed(
        self,
        route: MatchedRoute[RestHandler],
        grant: Grant,
        request: HttpRequest,
        exchange: Exchange,
        found: bytes | LaminaError,
    ) -> None:
        if isinstance(found, LaminaError):  # raised, it would be held by its own frames, with the body
            respond_error(exchange, error_problem(found))
            return
        try:
            whole = HttpRequest(request.method, request.path, request.query, request.headers, found, request.keep_alive)
            route.handler(whole, exchange, grant, *route.params)
        except LaminaError as error:
            respond_error(exchange, error_problem(error))

    # --------------------------------------------------------------------- reads

    def _document(self, make: Callable[[Grant], Any]) -> RestHandler:
        def respond(request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
            exchange.respond(200, _encode(make(grant)))

        return respond

    def _model_document(self, make: Callable[[ServedModel], Any]) -> RestHandler:
        def respond(request: HttpRequest, exchange: Exchange, grant: Grant, name: str, version: str = "") -> None:
            exchange.respond(200, _encode(make(self._inference.catalogue.find(name, version, grant))))

        return respond

    def _model_ready(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str, version: str = "") -> None:
        catalogue = self._inference.catalogue
        _health(exchange, "ready", catalogue.is_loaded(catalogue.find(name, version, grant)), {"name": name})

    # ---------------------------------------------------------------- repository

    def _index(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        check_light_json(request.body)
        only_ready = _object(request.body).get("ready") is True
        exchange.respond(200, _encode(model_catalog.repository_index(self._inference.catalogue, only_ready, grant)))

    def _change(self, change: Callable[..., None], request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> None:
        check_light_json(request.body)
        parameters = _object(request.body).get("parameters") or {}

        def on_end(error: LaminaError | None) -> None:
            if error is None:
                exchange.respond(200, b"{}")
            else:
                respond_error(exchange, error_problem(error))

        change(name, grant, parameters, on_end)

    # --------------------------------------------------------------------- infer

    def _infer(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str, version: str = "") -> None:
        model = self._inference.catalogue.find(name, version, grant)
        handle_infer(self._inference, model, grant.caller, request, exchange, self._codecs)

    def _generate(
        self, in_pieces: bool, request: HttpRequest, exchange: Exchange, grant: Grant, name: str, version: str = ""
    ) -> None:
        model = self._inference.catalogue.find(name, version, grant)
        if is_heavy_json(request.body):
            raise CodecTooLarge(f"body: {len(request.body)} bytes with many parts", hint="send tensors to infer, as binary data")
        handle_generate(self._inference, model, request, exchange, grant.caller, self._codecs, in_pieces=in_pieces)


def _health(exchange: Exchange, word: str, is_well: bool, more: dict[str, Any] | None = None) -> None:
    """Health with a body: some clients look at the status alone, some at the word."""
    exchange.respond(200 if is_well else 400, _encode({**(more or {}), word: is_well}))


def _reject_method(request: HttpRequest, exchange: Exchange, allowed: str) -> None:
    problem = method_problem(request, allowed)
    logs.log_rejection(problem)
    headers = problem.headers() + b"allow: %s\r\n" % allowed.encode()
    exchange.respond(405, _encode({"error": error_text(problem)}), JSON, headers)


def _not_found(request: HttpRequest) -> UnknownTarget:
    if request.path.startswith(b"/v2/models/"):
        hint = "of a model there are infer, ready, config, stats, generate, generate_stream"
    else:
        hint = "GET /v2 tells about this server, POST /v2/repository/index lists the models"
    return UnknownTarget(f"nothing at {request.path[:80].decode('latin-1')!r}", hint=hint)


def _object(text: bytes) -> dict[str, Any]:
    found = encoding.from_json(text) if text.strip() else {}
    if not isinstance(found, dict) or not isinstance(found.get("parameters", {}), dict | None):
        raise BadValue("body: not a JSON object", hint='send {}, or {"parameters": {...}}')
    return found
