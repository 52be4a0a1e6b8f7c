"""gRPC methods of the protocol that infer, over any backend: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lamina.errors import BadValue
from lamina.gateway.caller_identity import CallerIdentity
from lamina.gateway.oip.inference import InferenceBackend, InferenceRequest, InferenceResponse, timeout_and_priority
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.problems import error_text
from lamina.gateway.oip.protobuf_tensors import add_outputs, decode_parameters, decode_tensors
from lamina.gateway.oip.schema import load_schema
from lamina.gateway.oip.tensors import OutputTensor
from lamina.gateway.routes import http_codec

GRPC_STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 409: 9, 413: 8, 422: 3, 429: 8, 500: 13, 503: 14, 504: 4}
"""gRPC's codes by HTTP's."""

_INTERNAL = 13
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class RpcError:
    """A gRPC status code and message."""

    code: int
    text: str


OnMessage = Callable[[Any], None]  #: gets a message, or a `Trouble`


def rpc_error(problem: http_codec.HttpProblem) -> RpcError:
    return RpcError(GRPC_STATUS.get(problem.status, _INTERNAL), error_text(problem))


@dataclass(slots=True)
class RpcContext:
    """Context of one call: headers, and the client's time limit (0: none)."""

    headers: Mapping[bytes, bytes]
    timeout_us: int = 0


class InferenceMethods:
    """The methods that infer, over any inference backend."""

    def __init__(self) -> None:
        self.schema = load_schema()

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        """Handle a unary method; returns how to cancel it, where that can be done."""
        raise NotImplementedError

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: Callable[[], None]) -> Callable[[], None] | None:
        """Handle one request of a stream: its responses, then `done`."""
        raise NotImplementedError

    def backend(self, context: RpcContext) -> InferenceBackend:
        """The backend for this call."""
        raise NotImplementedError

    def find(self, name: str, version: str, context: RpcContext) -> tuple[ServedModel, CallerIdentity]:
        """A model, and the identity of the client."""
        raise NotImplementedError

    def infer(self, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None]:
        def on_answer(said: InferenceResponse | http_codec.HttpProblem) -> None:
            then(
                self._encode_response(question.model, message, said.outputs)
                if isinstance(said, InferenceResponse)
                else rpc_error(said)
            )

        question = self._decode_request(message, context)
        return self.backend(context).infer(question, on_answer)

    def infer_stream(self, message: Any, context: RpcContext, then: OnMessage, done: Callable[[], None]) -> Callable[[], None]:
        """One request of a stream: its chunks, or its one response, each as a `ModelStreamInferResponse`; then `done`."""
        kind = self.schema["ModelStreamInferResponse"]

        def on_piece(outputs: list[OutputTensor]) -> None:
            response = self._encode_response(question.model, message, outputs)
            if wants_final:
                response.parameters[_FINAL].bool_param = False
            then(kind(infer_response=response))

        def on_answer(said: InferenceResponse | http_codec.HttpProblem) -> None:
            if not isinstance(said, InferenceResponse):
                self.fail_stream_request(message, error_text(said), then, done)
                return
            if not question.model.signature.streams:
                response = self._encode_response(question.model, message, said.outputs)
                if wants_final:
                    response.parameters[_FINAL].bool_param = True
                then(kind(infer_response=response))
            elif wants_final:
                response = self._encode_response(question.model, message, [])
                response.parameters[_FINAL].bool_param = True
                then(kind(infer_response=response))
            done()

        wants_final = decode_parameters(message.parameters).get(_WANTS_FINAL) is True
        question = self._decode_request(message, context)
        return self.backend(context).infer(question, on_answer, on_piece if question.model.signature.streams else None)

    def fail_stream_request(self, message: Any, text: str, then: OnMessage, done: Callable[[], None]) -> None:
        """One request of a stream failed; the others go on."""
        response = self.schema["ModelInferResponse"](id=message.id)
        then(self.schema["ModelStreamInferResponse"](error_message=text, infer_response=response))
        done()

    def _decode_request(self, message: Any, context: RpcContext) -> InferenceRequest:
        model, caller = self.find(message.model_name, message.model_version, context)
        timeout_us, priority = timeout_and_priority(decode_parameters(message.parameters))
        if any("classification" in output.parameters for output in message.outputs):
            raise BadValue("outputs: classification is not served", hint="ask for the scores, and sort them")
        wanted = [output.name for output in message.outputs]
        trace = context.headers.get(b"traceparent", b"")
        return InferenceRequest(model, decode_tensors(message), wanted, timeout_us or context.timeout_us, priority, caller, trace)

    def _encode_response(self, model: ServedModel, message: Any, outputs: list[OutputTensor]) -> Any:
        response = self.schema["ModelInferResponse"](model_name=model.name, model_version=model.version, id=message.id)
        add_outputs(response, outputs)
        return response
