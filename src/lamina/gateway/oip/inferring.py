"""gRPC methods of the protocol that infer, over any backend: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lamina.errors import BadValue
from lamina.gateway import wire
from lamina.gateway.caller import Caller
from lamina.gateway.oip.errors import error_text
from lamina.gateway.oip.messages import given_of, parameters_of, put_outputs
from lamina.gateway.oip.models import Model
from lamina.gateway.oip.proto import schema
from lamina.gateway.oip.question import Answer, Infers, Question, wishes
from lamina.gateway.oip.tensors import Output

CODES = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 409: 9, 413: 8, 422: 3, 429: 8, 500: 13, 503: 14, 504: 4}
"""gRPC's codes by HTTP's."""

_INTERNAL = 13
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class Trouble:
    """A gRPC status code and message."""

    code: int
    text: str


OnMessage = Callable[[Any], None]  #: gets a message, or a `Trouble`


def trouble_of(problem: wire.Problem) -> Trouble:
    return Trouble(CODES.get(problem.status, _INTERNAL), error_text(problem))


@dataclass(slots=True)
class Context:
    """Context of one call: headers, and the client's time limit (0: none)."""

    headers: Mapping[bytes, bytes]
    timeout_us: int = 0


class Inferring:
    """The methods that infer, over any inference backend."""

    def __init__(self) -> None:
        self.schema = schema()

    def unary(self, name: str, message: Any, context: Context, then: OnMessage) -> Callable[[], None] | None:
        """Handle a unary method; returns how to cancel it, where that can be done."""
        raise NotImplementedError

    def stream(self, message: Any, context: Context, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        """Handle one request of a stream: its responses, then `done`."""
        raise NotImplementedError

    def infers(self, context: Context) -> Infers:
        """The backend for this call."""
        raise NotImplementedError

    def find(self, name: str, version: str, context: Context) -> tuple[Model, Caller]:
        """A model, and the identity of the client."""
        raise NotImplementedError

    def infer(self, message: Any, context: Context, then: OnMessage) -> Callable[[], None]:
        def on_answer(said: Answer | wire.Problem) -> None:
            then(self._response(question.model, message, said.outputs) if isinstance(said, Answer) else trouble_of(said))

        question = self._question(message, context)
        return self.infers(context).infer(question, on_answer)

    def pieces(self, message: Any, context: Context, then: OnMessage, done: Callable[[], None]) -> Callable[[], None]:
        """One request of a stream: its chunks, or its one response, each as a `ModelStreamInferResponse`; then `done`."""
        kind = self.schema["ModelStreamInferResponse"]

        def on_piece(outputs: list[Output]) -> None:
            response = self._response(question.model, message, outputs)
            if wants_final:
                response.parameters[_FINAL].bool_param = False
            then(kind(infer_response=response))

        def on_answer(said: Answer | wire.Problem) -> None:
            if not isinstance(said, Answer):
                self.failed(message, error_text(said), then, done)
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

        wants_final = parameters_of(message.parameters).get(_WANTS_FINAL) is True
        question = self._question(message, context)
        return self.infers(context).infer(question, on_answer, on_piece if question.model.signature.streams else None)

    def failed(self, message: Any, text: str, then: OnMessage, done: Callable[[], None]) -> None:
        """One request of a stream failed; the others go on."""
        response = self.schema["ModelInferResponse"](id=message.id)
        then(self.schema["ModelStreamInferResponse"](error_message=text, infer_response=response))
        done()

    def _question(self, message: Any, context: Context) -> Question:
        model, caller = self.find(message.model_name, message.model_version, context)
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
