"""Request handlers of an ingress process. What can be decoded becomes values here; everything else, and everything that is wrong,
is forwarded as it is, so that every response and every error is the controller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lamina.errors import LaminaError, UnknownTarget
from lamina.gateway import wire
from lamina.gateway.caller import LOCAL, Caller
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.ingress.frames import Ask, ModelIs, Raw, Routes
from lamina.gateway.ingress.line import Line
from lamina.gateway.ingress.waits import Asker, HttpWait, RpcWait, pass_on
from lamina.gateway.lag import Lag
from lamina.gateway.oip.infer import infer
from lamina.gateway.oip.inferring import Context, Inferring, OnMessage
from lamina.gateway.oip.models import Model, newest
from lamina.live.timer import clock_us
from lamina.sdk.binding import Param


class Known:
    """The routes and models the controller has announced."""

    def __init__(self) -> None:
        self.params: dict[bytes, tuple[Param, ...]] = {}
        self.guarded = False
        self._models: dict[str, dict[str, Model]] = {}
        self._paths: dict[bytes, Model] = {}

    def learn(self, routes: Routes) -> None:
        self.params = {path: tuple(params) for path, params in routes.params.items()}
        self.guarded = routes.guarded
        self._models = {}
        for told in routes.models:
            self._models.setdefault(told.name, {})[told.version] = _model(told)
        self._paths = {}
        for name, versions in self._models.items():
            at = f"/v2/models/{name}"
            self._paths[f"{at}/infer".encode()] = newest(versions)
            self._paths |= {f"{at}/versions/{version}/infer".encode(): model for version, model in versions.items()}

    def at(self, path: bytes) -> Model | None:
        return self._paths.get(path)

    def find(self, name: str, version: str) -> Model:
        versions = self._models.get(name)
        model = None if versions is None else versions.get(version) if version else newest(versions)
        if model is None:
            raise UnknownTarget(f"no model {name[:80]!r}")
        return model


def _model(told: ModelIs) -> Model:
    ports = {port.name: port for port in told.signature.inputs}
    return Model(told.name, told.version, cast(Any, _Named(told.target)), told.signature, None, told.batched, ports)


class _Named:
    """All that an ingress knows of a model's target."""

    def __init__(self, name: str) -> None:
        self.name = name


class HttpFront:
    """Handler of HTTP requests."""

    def __init__(self, line: Line, known: Known, lag: Lag) -> None:
        self._line = line
        self._known = known
        self._lag = lag

    def handle(self, request: Request, exchange: Exchange) -> None:
        known = self._known
        if request.method == "POST" and not (known.guarded and b"authorization" not in request.headers):
            try:
                params = known.params.get(request.path)
                if params is not None:
                    if b"prefer" not in request.headers:
                        self._call(request, exchange, params)
                        return
                elif request.headers.get(b"content-encoding", b"identity") == b"identity":
                    model = known.at(request.path)
                    if model is not None:
                        head = self._line.call_head(request.path, request.headers, shared=True)
                        infer(Asker(self._line, head, clock_us() - self._lag.lag_us), model, LOCAL, request, exchange)
                        return
            except LaminaError:
                pass
        self._pass_on(request, exchange)

    def _call(self, request: Request, exchange: Exchange, params: tuple[Param, ...]) -> None:
        line = self._line
        at_us = clock_us() - self._lag.lag_us
        inputs = {name: line.stow(blob) for name, blob in wire.inputs_of(request, params).items()}
        head = line.call_head(request.path, request.headers, shared=True)
        wait = HttpWait(line, exchange, request.header(b"accept"))
        line.say(Ask(wait.number, head, at_us, len(request.body), inputs))

    def _pass_on(self, request: Request, exchange: Exchange) -> None:
        line = self._line
        head = line.whole_head(request)
        wait = HttpWait(line, exchange, request.header(b"accept"))
        line.say(Raw(wait.number, head, line.stow(request.body)))


class RpcFront(Inferring):
    """Handler of gRPC calls."""

    def __init__(self, line: Line, known: Known, lag: Lag) -> None:
        super().__init__()
        self._line = line
        self._known = known
        self._lag = lag

    def unary(self, name: str, message: Any, context: Context, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer" and self._may(context):
            try:
                return self.infer(message, context, then)
            except LaminaError:
                pass
        return self._pass_on(name, message, context, then, None)

    def stream(self, message: Any, context: Context, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        if self._may(context):
            try:
                return self.pieces(message, context, then, done)
            except LaminaError:
                pass
        return self._pass_on("ModelStreamInfer", message, context, then, done)

    def infers(self, context: Context) -> Asker:
        return Asker(self._line, self._line.call_head(b"", dict(context.headers)), clock_us() - self._lag.lag_us)

    def find(self, name: str, version: str, context: Context) -> tuple[Model, Caller]:
        return self._known.find(name, version), LOCAL

    def _may(self, context: Context) -> bool:
        return not self._known.guarded or b"authorization" in context.headers

    def _pass_on(
        self, name: str, message: Any, context: Context, then: OnMessage, done: Callable[[], None] | None
    ) -> Callable[[], None]:
        head = self._line.whole_head(Request("POST", b"/", b"", dict(context.headers), b"", True))
        return pass_on(self._line, head, name, message, context.timeout_us, RpcWait(then, done))
