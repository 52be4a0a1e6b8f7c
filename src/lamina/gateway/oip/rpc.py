"""The protocol's gRPC methods, whatever carries them: bytes of a message in, bytes of one or more messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lamina.errors import BadValue, LaminaError
from lamina.gateway import wire
from lamina.gateway.api import Api
from lamina.gateway.caller import Caller, Scope
from lamina.gateway.heads import Request
from lamina.gateway.oip import about
from lamina.gateway.oip.errors import error_text
from lamina.gateway.oip.messages import given_of, parameters_of, put_outputs
from lamina.gateway.oip.models import Model
from lamina.gateway.oip.proto import extra, schema
from lamina.gateway.oip.repository import Repository
from lamina.gateway.oip.serving import Answer, Question, Serving, wishes
from lamina.gateway.oip.tensors import Output

CODES = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 409: 9, 413: 8, 422: 3, 429: 8, 500: 13, 503: 14, 504: 4}
"""gRPC's codes by HTTP's."""

_INTERNAL = 13
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class Trouble:
    code: int
    text: str


OnMessage = Callable[[Any], None]  #: gets a message, or a `Trouble`


def trouble_of(problem: wire.Problem) -> Trouble:
    return Trouble(CODES.get(problem.status, _INTERNAL), error_text(problem))


@dataclass(slots=True)
class Context:
    """Of one call: headers, and the time its caller gives it (0: no limit)."""

    headers: Mapping[bytes, bytes]
    timeout_us: int = 0


class Rpc:
    def __init__(self, api: Api, serving: Serving, repository: Repository) -> None:
        self._api = api
        self._serving = serving
        self._repository = repository
        self.schema = schema()
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
        """Returns how to cancel it, where that can be done."""
        try:
            return self._unary(name, message, context, then)
        except LaminaError as error:
            then(trouble_of(wire.error_problem(error)))
        return None

    def _unary(self, name: str, message: Any, context: Context, then: OnMessage) -> Callable[[], None] | None:
        if name == "ModelInfer":
            return self._infer(message, context, then)
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

    def _infer(self, message: Any, context: Context, then: OnMessage) -> Callable[[], None]:
        def on_answer(said: Answer | wire.Problem) -> None:
            then(self._response(question.model, message, said.outputs) if isinstance(said, Answer) else trouble_of(said))

        question = self._question(message, context)
        return self._serving.infer(question, on_answer)

    def stream(self, message: Any, context: Context, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        """One request of a stream: its pieces, or its one answer, each as a `ModelStreamInferResponse`; then `done`."""
        kind = self.schema["ModelStreamInferResponse"]
        wants_final = False

        def failed(text: str) -> None:
            then(kind(error_message=text, infer_response=self.schema["ModelInferResponse"](id=message.id)))
            done()

        def on_piece(outputs: list[Output]) -> None:
            response = self._response(question.model, message, outputs)
            if wants_final:
                response.parameters[_FINAL].bool_param = False
            then(kind(infer_response=response))

        def on_answer(said: Answer | wire.Problem) -> None:
            if not isinstance(said, Answer):
                failed(error_text(said))
                return
            if not question.model.signature.streams:
                response = self._response(question.model, message, said.outputs)
                if wants_final:
                    response.parameters[_FINAL].bool_param = True
                then(kind(infer_response=response))
            elif wants_final:
                response = self._response(question.model, message, [])
                response.parameters[_FINAL].bool_param = True
                then(kind(infer_response=response))
            done()

        try:
            wants_final = parameters_of(message.parameters).get(_WANTS_FINAL) is True
            question = self._question(message, context)
            return self._serving.infer(question, on_answer, on_piece if question.model.signature.streams else None)
        except LaminaError as error:
            failed(error_text(wire.error_problem(error)))
        return None

    # ---------------------------------------------------------------------- parts

    def _allow(self, context: Context, scope: Scope) -> Caller:
        return self._api.allow(Request("POST", b"/", b"", dict(context.headers), b"", True), scope)

    def _question(self, message: Any, context: Context) -> Question:
        caller = self._allow(context, "invoke")
        model = self._serving.catalogue.find(message.model_name, message.model_version, caller.tenant)
        timeout_us, priority = wishes(parameters_of(message.parameters))
        if any("classification" in output.parameters for output in message.outputs):
            raise BadValue("outputs: classification is not served", hint="ask for the scores, and sort them")
        wanted = [output.name for output in message.outputs]
        trace = context.headers.get(b"traceparent", b"")
        return Question(model, given_of(message), wanted, timeout_us or context.timeout_us, priority, caller, trace)

    def _response(self, model: Model, message: Any, outputs: list[Output]) -> Any:
        response = self.schema["ModelInferResponse"](model_name=model.name, model_version=model.version, id=message.id)
        put_outputs(response, outputs)
        return response
