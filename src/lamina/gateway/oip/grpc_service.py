"""gRPC methods of the protocol, over this process's own controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.access.authorization import Grant, rule_of
from lamina.access.records import Identity
from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway.auth import Authorize
from lamina.gateway.oip import model_catalog, reflection
from lamina.gateway.oip.grpc_methods import InferenceMethods, decode_parameters, rpc_error
from lamina.gateway.oip.inference import InferenceBackend, error_text
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.schema import HEALTH_CHECK, import_grpc_extra, load_health_schema
from lamina.gateway.routes.problems import error_problem
from lamina.server.exchange import HttpRequest
from lamina.server.grpc import OnDone, OnMessage, RpcContext, RpcError

SERVING, NOT_SERVING = 1, 2
NOT_FOUND = 5


class GrpcMethods(InferenceMethods):
    """All methods of the protocol."""

    def __init__(
        self,
        authorize: Authorize,
        inference: InferenceService,
        repository: ModelRepository,
        is_ready: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._authorize_request = authorize
        self._is_ready = is_ready
        self._inference = inference
        self._repository = repository
        health = load_health_schema()
        self._rules = {
            name: rule_of("grpc", name) for name in (*(name for name, *_ in self.schema.methods), HEALTH_CHECK, reflection.METHOD)
        }
        self.request_types = {name: self.schema[asks] for name, asks, *_ in self.schema.methods}
        self.request_types[HEALTH_CHECK] = health["HealthCheckRequest"]
        self.request_types[reflection.METHOD] = self.reflection.request_type
        self._health_answer = health["HealthCheckResponse"]
        self._parse = import_grpc_extra("google.protobuf.json_format").ParseDict
        self._documents: dict[str, Callable[[Any, Grant], dict[str, Any]]] = {
            "ServerMetadata": lambda message, grant: model_catalog.server_metadata(),
            "ModelMetadata": lambda message, grant: model_catalog.model_metadata(inference.catalogue, self._find(message, grant)),
            "ModelConfig": lambda message, grant: {
                "config": model_catalog.model_config(inference.catalogue, self._find(message, grant))
            },
            "ModelReady": lambda message, grant: {"ready": self._is_model_ready(message, grant)},
            "ModelStatistics": self._statistics,
            "RepositoryIndex": lambda message, grant: {
                "models": model_catalog.repository_index(inference.catalogue, message.ready, grant)
            },
        }

    def _find(self, message: Any, grant: Grant) -> ServedModel:
        return self._inference.catalogue.find(message.name, message.version, grant)

    def _is_model_ready(self, message: Any, grant: Grant) -> bool:
        """Whether a model is loaded; one that is not there is not, as Triton has it."""
        try:
            return self._inference.catalogue.is_loaded(self._find(message, grant))
        except UnknownTarget:
            return False

    # ------------------------------------------------------------------- methods

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        try:
            return self._unary(name, message, context, then)
        except LaminaError as error:
            then(rpc_error(error_problem(error)))
        return None

    def _unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer":
            return self.infer(message, context, then)
        if name == HEALTH_CHECK:
            self._check_health(message, then)
        elif name == "ServerLive":
            then(self.schema["ServerLiveResponse"](live=True))
        elif name == "ServerReady":
            then(self.schema["ServerReadyResponse"](ready=self._is_ready()))
        elif name in self._documents:
            self._inference.check_leading()
            then(self._parse(self._documents[name](message, self._authorize(context, name)), self.schema[f"{name}Response"]()))
        else:
            self._change(name, message, context, then)
        return None

    def _check_health(self, message: Any, then: OnMessage) -> None:
        """gRPC's health check of the whole server, or of its service by name."""
        if message.service not in ("", self.schema.service):
            then(RpcError(NOT_FOUND, f"no service {message.service[:80]!r}"))
        else:
            then(self._health_answer(status=SERVING if self._is_ready() else NOT_SERVING))

    def _change(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> None:
        self._inference.check_leading()
        grant = self._authorize(context, name)
        change = self._repository.load if name == "RepositoryModelLoad" else self._repository.unload

        def on_end(error: LaminaError | None) -> None:
            then(self.schema[f"{name}Response"]() if error is None else rpc_error(error_problem(error)))

        change(message.model_name, grant, decode_parameters(message.parameters), on_end)

    def _statistics(self, message: Any, grant: Grant) -> dict[str, Any]:
        if not message.name:
            return self._repository.statistics(grant)
        return {"model_stats": [self._inference.statistics.as_dict(self._find(message, grant))]}

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: OnDone) -> Callable[[], None] | None:
        if self.reflection.is_request(message):
            return self.reflection.answer(message, then, done)
        try:
            return self.infer_stream(message, context, then, done)
        except LaminaError as error:
            self.fail_stream_request(message, error_text(error_problem(error)), then, done)
        return None

    # ---------------------------------------------------------------------- parts

    def backend(self, context: RpcContext) -> InferenceBackend:
        return self._inference

    def find(self, name: str, version: str, context: RpcContext) -> tuple[ServedModel, Identity]:
        grant = self._authorize(context, "ModelInfer")  # which ModelStreamInfer has many of
        return self._inference.catalogue.find(name, version, grant), grant.caller

    def _authorize(self, context: RpcContext, name: str) -> Grant:
        rule = self._rules[name]
        return Grant(self._authorize_request(HttpRequest("POST", b"/", b"", dict(context.headers), b"", True), rule), rule)
