"""gRPC methods of the protocol, over this process's own controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.errors import LaminaError
from lamina.gateway import wire
from lamina.gateway.api import Api
from lamina.gateway.caller import Caller, Scope
from lamina.gateway.heads import Request
from lamina.gateway.oip import about
from lamina.gateway.oip.errors import error_text
from lamina.gateway.oip.inferring import Context, Inferring, OnMessage, trouble_of
from lamina.gateway.oip.messages import parameters_of
from lamina.gateway.oip.models import Model
from lamina.gateway.oip.proto import extra
from lamina.gateway.oip.question import Infers
from lamina.gateway.oip.repository import Repository
from lamina.gateway.oip.serving import Serving


class Rpc(Inferring):
    """All methods of the protocol."""

    def __init__(self, api: Api, serving: Serving, repository: Repository) -> None:
        super().__init__()
        self._api = api
        self._serving = serving
        self._repository = repository
        self.asked_with = {name: self.schema[asks] for name, asks, *_ in self.schema.methods}
        self._parse = extra("google.protobuf.json_format").ParseDict
        self._reads: dict[str, Callable[[Any, str], dict[str, Any]]] = {
            "ServerMetadata": lambda asked, tenant: about.server(),
            "ModelMetadata": lambda asked, tenant: about.metadata(serving.catalogue, self._find(asked, tenant)),
            "ModelConfig": lambda asked, tenant: {"config": about.config(serving.catalogue, self._find(asked, tenant))},
            "ModelReady": lambda asked, tenant: {"ready": serving.catalogue.is_loaded(self._find(asked, tenant))},
            "ModelStatistics": self._statistics,
            "RepositoryIndex": lambda asked, tenant: {"models": about.index(serving.catalogue, asked.ready, tenant)},
        }

    def _find(self, asked: Any, tenant: str) -> Model:
        return self._serving.catalogue.find(asked.name, asked.version, tenant)

    # ------------------------------------------------------------------- methods

    def unary(self, name: str, message: Any, context: Context, then: OnMessage) -> Callable[[], None] | None:
        try:
            return self._unary(name, message, context, then)
        except LaminaError as error:
            then(trouble_of(wire.error_problem(error)))
        return None

    def _unary(self, name: str, message: Any, context: Context, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer":
            return self.infer(message, context, then)
        if name == "ServerLive":
            then(self.schema["ServerLiveResponse"](live=True))
        elif name == "ServerReady":
            then(self.schema["ServerReadyResponse"](ready=not self._api.closing and self._api.ready()))
        elif name in self._reads:
            tenant = self._allow(context, "read").tenant
            then(self._parse(self._reads[name](message, tenant), self.schema[f"{name}Response"]()))
        else:
            self._change(name, message, context, then)
        return None

    def _change(self, name: str, message: Any, context: Context, then: OnMessage) -> None:
        tenant = self._allow(context, "deploy").tenant
        change = self._repository.load if name == "RepositoryModelLoad" else self._repository.unload

        def on_end(error: LaminaError | None) -> None:
            then(self.schema[f"{name}Response"]() if error is None else trouble_of(wire.error_problem(error)))

        change(message.model_name, tenant, parameters_of(message.parameters), on_end)

    def _statistics(self, asked: Any, tenant: str) -> dict[str, Any]:
        if not asked.name:
            return self._repository.statistics(tenant)
        return {"model_stats": [self._serving.statistics.shown(self._find(asked, tenant))]}

    def stream(self, message: Any, context: Context, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        try:
            return self.pieces(message, context, then, done)
        except LaminaError as error:
            self.failed(message, error_text(wire.error_problem(error)), then, done)
        return None

    # ---------------------------------------------------------------------- parts

    def infers(self, context: Context) -> Infers:
        return self._serving

    def find(self, name: str, version: str, context: Context) -> tuple[Model, Caller]:
        caller = self._allow(context, "invoke")
        return self._serving.catalogue.find(name, version, caller.tenant), caller

    def _allow(self, context: Context, scope: Scope) -> Caller:
        return self._api.allow(Request("POST", b"/", b"", dict(context.headers), b"", True), scope)
