"""Request handlers of an ingress process. What can be decoded becomes values here; everything else, and everything that is wrong,
is forwarded as it is, so that every response and every error is the controller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lamina.drivers.timer import clock_us
from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway.caller_identity import LOCAL_CALLER, CallerIdentity
from lamina.gateway.ingress.controller_link import ControllerLink
from lamina.gateway.ingress.messages import CallRequest, ForwardedRequest, ModelInfo, RouteTable
from lamina.gateway.ingress.pending import PendingHttp, PendingRpc, RemoteBackend, forward_rpc
from lamina.gateway.oip.grpc_methods import InferenceMethods, OnMessage, RpcContext
from lamina.gateway.oip.model_catalog import ServedModel, latest_version
from lamina.gateway.oip.rest_infer import handle_infer
from lamina.gateway.routes import http_codec
from lamina.sdk.binding import Param
from lamina.server.exchange import Exchange
from lamina.server.loop_lag import LoopLag
from lamina.server.request import HttpRequest


class KnownRoutes:
    """The routes and models the controller has announced."""

    def __init__(self) -> None:
        self.params: dict[bytes, tuple[Param, ...]] = {}
        self.requires_token = False
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._paths: dict[bytes, ServedModel] = {}

    def update(self, routes: RouteTable) -> None:
        self.params = {path: tuple(params) for path, params in routes.params.items()}
        self.requires_token = routes.requires_token
        self._models = {}
        for told in routes.models:
            self._models.setdefault(told.name, {})[told.version] = _model(told)
        self._paths = {}
        for name, versions in self._models.items():
            at = f"/v2/models/{name}"
            self._paths[f"{at}/infer".encode()] = latest_version(versions)
            self._paths |= {f"{at}/versions/{version}/infer".encode(): model for version, model in versions.items()}

    def model_at_path(self, path: bytes) -> ServedModel | None:
        return self._paths.get(path)

    def find(self, name: str, version: str) -> ServedModel:
        versions = self._models.get(name)
        model = None if versions is None else versions.get(version) if version else latest_version(versions)
        if model is None:
            raise UnknownTarget(f"no model {name[:80]!r}")
        return model


def _model(told: ModelInfo) -> ServedModel:
    ports = {port.name: port for port in told.signature.inputs}
    return ServedModel(
        told.name, told.version, cast(Any, _NamedTarget(told.target)), told.signature, None, told.is_batched, ports
    )


class _NamedTarget:
    """All that an ingress knows of a model's target."""

    def __init__(self, name: str) -> None:
        self.name = name


class IngressHttpHandler:
    """Handler of HTTP requests."""

    def __init__(self, line: ControllerLink, known: KnownRoutes, lag: LoopLag) -> None:
        self._link = line
        self._routes = known
        self._lag = lag

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        known = self._routes
        if request.method == "POST" and not (known.requires_token and b"authorization" not in request.headers):
            try:
                params = known.params.get(request.path)
                if params is not None:
                    if b"prefer" not in request.headers:
                        self._call(request, exchange, params)
                        return
                elif request.headers.get(b"content-encoding", b"identity") == b"identity":
                    model = known.model_at_path(request.path)
                    if model is not None:
                        head = self._link.call_head(request.path, request.headers, shared=True)
                        handle_infer(
                            RemoteBackend(self._link, head, clock_us() - self._lag.lag_us), model, LOCAL_CALLER, request, exchange
                        )
                        return
            except LaminaError:
                pass
        self._forward(request, exchange)

    def _call(self, request: HttpRequest, exchange: Exchange, params: tuple[Param, ...]) -> None:
        line = self._link
        at_us = clock_us() - self._lag.lag_us
        inputs = {name: line.store_payload(blob) for name, blob in http_codec.decode_inputs(request, params).items()}
        head = line.call_head(request.path, request.headers, shared=True)
        wait = PendingHttp(line, exchange, request.header(b"accept"))
        line.send(CallRequest(wait.number, head, at_us, len(request.body), inputs))

    def _forward(self, request: HttpRequest, exchange: Exchange) -> None:
        line = self._link
        head = line.full_head(request)
        wait = PendingHttp(line, exchange, request.header(b"accept"))
        line.send(ForwardedRequest(wait.number, head, line.store_payload(request.body)))


class IngressGrpcMethods(InferenceMethods):
    """Handler of gRPC calls."""

    def __init__(self, line: ControllerLink, known: KnownRoutes, lag: LoopLag) -> None:
        super().__init__()
        self._link = line
        self._routes = known
        self._lag = lag

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer" and self._has_token(context):
            try:
                return self.infer(message, context, then)
            except LaminaError:
                pass
        return self._forward(name, message, context, then, None)

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        if self._has_token(context):
            try:
                return self.infer_stream(message, context, then, done)
            except LaminaError:
                pass
        return self._forward("ModelStreamInfer", message, context, then, done)

    def backend(self, context: RpcContext) -> RemoteBackend:
        return RemoteBackend(self._link, self._link.call_head(b"", dict(context.headers)), clock_us() - self._lag.lag_us)

    def find(self, name: str, version: str, context: RpcContext) -> tuple[ServedModel, CallerIdentity]:
        return self._routes.find(name, version), LOCAL_CALLER

    def _has_token(self, context: RpcContext) -> bool:
        return not self._routes.requires_token or b"authorization" in context.headers

    def _forward(
        self, name: str, message: Any, context: RpcContext, then: OnMessage, done: Callable[[], None] | None
    ) -> Callable[[], None]:
        head = self._link.full_head(HttpRequest("POST", b"/", b"", dict(context.headers), b"", True))
        return forward_rpc(self._link, head, name, message, context.timeout_us, PendingRpc(then, done))
