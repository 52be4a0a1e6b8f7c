"""gRPC methods of the protocol that infer, over any backend: messages in, messages out.

Tensors in protobuf: inputs typed or raw, outputs always raw, which is what every client reads.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from lamina.access.records import Identity
from lamina.errors import BadValue
from lamina.gateway.oip.inference import InferenceBackend, InferenceRequest, InferenceResponse, error_text, timeout_and_priority
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.reflection import Reflection
from lamina.gateway.oip.schema import HEALTH_CHECK, HEALTH_SERVICE, load_health_schema, load_schema
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, RawBytes, join_bytes
from lamina.gateway.routes.codec_pool import MAX_FIELDS, RAW_INPUT_TAG, message_fields
from lamina.gateway.routes.problems import HttpProblem
from lamina.server.grpc import LARGE_MESSAGE, GrpcMethod, OnDone, OnMessage, RpcContext, RpcError, SerializedMessage

GRPC_STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 409: 9, 413: 8, 422: 3, 429: 8, 500: 13, 503: 14, 504: 4}
"""gRPC's codes by HTTP's."""

_INTERNAL = 13
_RAW_OUTPUT_TAG = bytes((6 << 3 | 2,))  #: of `raw_output_contents`, which has a length
_INFER_REQUEST = "ModelInferRequest"
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


def rpc_error(problem: HttpProblem) -> RpcError:
    return RpcError(GRPC_STATUS.get(problem.status, _INTERNAL), error_text(problem))


class InferenceMethods:
    """The methods that infer, over any inference backend."""

    def __init__(self) -> None:
        self.schema = schema = load_schema()
        self.methods = {
            f"/{schema.service}/{name}".encode(): GrpcMethod(
                name, parse_infer if request == _INFER_REQUEST else schema[request].FromString, is_asked or is_answered
            )
            for name, request, _, is_asked, is_answered in schema.methods
        }
        asks = load_health_schema()["HealthCheckRequest"]
        self.methods[f"/{HEALTH_SERVICE}/{HEALTH_CHECK}".encode()] = GrpcMethod(HEALTH_CHECK, asks.FromString, False)
        self.reflection = Reflection()
        self.methods |= self.reflection.methods

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        """Handle a unary method; returns how to cancel it, where that can be done."""
        raise NotImplementedError

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: OnDone) -> Callable[[], None] | None:
        """Handle one request of a stream: its responses, then `done`."""
        raise NotImplementedError

    def backend(self, context: RpcContext) -> InferenceBackend:
        """The backend for this call."""
        raise NotImplementedError

    def find(self, name: str, version: str, context: RpcContext) -> tuple[ServedModel, Identity]:
        """A model, and the identity of the client."""
        raise NotImplementedError

    def infer(self, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None]:
        def on_response(response: InferenceResponse | HttpProblem) -> None:
            if not isinstance(response, InferenceResponse):
                then(rpc_error(response))
            elif sum([len(output.data) for output in response.outputs]) > LARGE_MESSAGE:
                then(self._serialize_response(request.model, message, response.outputs))
            else:
                then(self._encode_response(request.model, message, response.outputs))

        request = self._decode_request(message, context)
        return self.backend(context).infer(request, on_response)

    def infer_stream(self, message: Any, context: RpcContext, then: OnMessage, done: OnDone) -> Callable[[], None]:
        """One request of a stream: its chunks, or its one response, each as a `ModelStreamInferResponse`; then `done`."""
        kind = self.schema["ModelStreamInferResponse"]

        def on_chunk(outputs: list[OutputTensor]) -> None:
            response = self._encode_response(request.model, message, outputs)
            if wants_final:
                response.parameters[_FINAL].bool_param = False
            then(kind(infer_response=response))

        def on_response(response: InferenceResponse | HttpProblem) -> None:
            if not isinstance(response, InferenceResponse):
                self.fail_stream_request(message, error_text(response), then, done)
                return
            has_streamed = request.model.signature.streams
            if not has_streamed or wants_final:
                last = self._encode_response(request.model, message, [] if has_streamed else response.outputs)
                if wants_final:
                    last.parameters[_FINAL].bool_param = True
                then(kind(infer_response=last))
            done()

        wants_final = decode_parameters(message.parameters).get(_WANTS_FINAL) is True
        request = self._decode_request(message, context)
        return self.backend(context).infer(request, on_response, on_chunk if request.model.signature.streams else None)

    def fail_stream_request(self, message: Any, text: str, then: OnMessage, done: OnDone) -> None:
        """One request of a stream failed; the others go on."""
        response = self.schema["ModelInferResponse"](id=message.id)
        then(self.schema["ModelStreamInferResponse"](error_message=text, infer_response=response))
        done(failed=True)

    def _decode_request(self, message: Any, context: RpcContext) -> InferenceRequest:
        model, caller = self.find(message.model_name, message.model_version, context)
        timeout_us, priority = timeout_and_priority(decode_parameters(message.parameters))
        if any("classification" in output.parameters for output in message.outputs):
            raise BadValue("outputs: classification is not served", hint="ask for the scores, and sort them")
        wanted = [output.name for output in message.outputs]
        trace = context.headers.get(b"traceparent", b"")
        return InferenceRequest(model, decode_tensors(message), wanted, timeout_us or context.timeout_us, priority, caller, trace)

    def _serialize_response(self, model: ServedModel, message: Any, outputs: list[OutputTensor]) -> SerializedMessage:
        """A large response, whose tensors are not copied: in protobuf, fields may be put one behind the other."""
        response = self.schema["ModelInferResponse"](model_name=model.name, model_version=model.version, id=message.id)
        for output in outputs:
            response.outputs.add(name=output.name, datatype=output.dtype, shape=output.shape)
        parts: list[Any] = [response.SerializeToString()]
        for output in outputs:
            parts += [_RAW_OUTPUT_TAG + _varint(len(output.data)), output.data]
        return SerializedMessage(parts)

    def _encode_response(self, model: ServedModel, message: Any, outputs: list[OutputTensor]) -> Any:
        response = self.schema["ModelInferResponse"](model_name=model.name, model_version=model.version, id=message.id)
        add_outputs(response, outputs)
        return response


# ------------------------------------------------------------- tensors in protobuf

_TYPED = {
    "BOOL": ("bool_contents", "B"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
"""By dtype, the field that holds it and the width of its elements. FP16 and BF16 have none: they come raw."""


class LargeInferRequest:
    """An inference request whose raw tensors are where they came: to parse a large one would copy it twice."""

    def __init__(self, message: Any, raw_input_contents: list[memoryview]) -> None:
        self._message = message
        self.raw_input_contents = raw_input_contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def SerializeToString(self) -> bytes:
        parts = [self._message.SerializeToString()]
        for data in self.raw_input_contents:
            parts += [bytes((RAW_INPUT_TAG,)), _varint(len(data)), data]
        return b"".join(parts)


def parse_infer(data: bytes) -> Any:
    """An inference request."""
    parse = load_schema()[_INFER_REQUEST].FromString
    found = _split_raw_contents(data) if len(data) > LARGE_MESSAGE else None
    return parse(data) if found is None else LargeInferRequest(parse(found[0]), found[1])


def _split_raw_contents(data: bytes) -> tuple[bytes, list[memoryview]] | None:
    """A message without its raw tensors, and those; None if it is not made of a few fields with a length."""
    view, rest, raw = memoryview(data), [], []
    for tag, start, at, end, is_cut in islice(message_fields(view), MAX_FIELDS):
        if is_cut or tag & 0x87 != 2 or end > len(view):  # the parser says what is wrong with it
            return None
        if tag == RAW_INPUT_TAG:
            raw.append(view[at:end])
        else:
            rest.append(view[start:end])
        if end == len(view):
            return b"".join(rest), raw
    return None


def decode_tensors(message: Any) -> list[InputTensor]:
    """Input tensors of a message, each raw."""
    raw = message.raw_input_contents
    inputs = message.inputs
    if raw and len(raw) != len(inputs):
        raise BadValue(f"raw_input_contents: {len(raw)} where there are {len(inputs)} inputs", hint="all of them raw, or none")
    found = []
    for place, one in enumerate(inputs):
        if raw:
            if one.HasField("contents"):
                raise BadValue(f"{one.name[:80]}: contents beside raw_input_contents")
            data: RawBytes = raw[place]
        else:
            data = _typed(one)
        found.append(InputTensor(one.name, one.datatype, list(one.shape), data))
    return found


def to_raw_contents(data: bytes) -> bytes:
    """An inference request with all its tensors raw, as `decode_tensors` would have them: then it is read in no time."""
    try:
        message = load_schema()["ModelInferRequest"].FromString(data)
    except Exception:  # protobuf's own
        raise BadValue("not a message of this method") from None
    tensors = decode_tensors(message)
    for one in message.inputs:
        one.ClearField("contents")
    del message.raw_input_contents[:]
    message.raw_input_contents.extend(bytes(tensor.data) for tensor in tensors)
    made: bytes = message.SerializeToString()
    return made


def _typed(one: Any) -> bytes:
    field, code = _TYPED.get(one.datatype, ("", ""))
    if not field:
        raise BadValue(f"{one.name[:80]}: {one.datatype[:20]!r} has no typed contents", hint="send it in raw_input_contents")
    others = [used.name for used, _ in one.contents.ListFields() if used.name != field]
    if others:
        raise BadValue(f"{one.name[:80]}: {others[0]} where {one.datatype} goes into {field}")
    elements = getattr(one.contents, field)
    if not code:
        return join_bytes(elements)
    try:
        packed = array(code, elements)
    except OverflowError as error:
        raise BadValue(f"{one.name[:80]}: its contents are not {one.datatype}: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def add_outputs(response: Any, outputs: list[OutputTensor]) -> None:
    """Add output tensors to a message."""
    for output in outputs:
        response.outputs.add(name=output.name, datatype=output.dtype, shape=output.shape)
        response.raw_output_contents.append(bytes(output.data))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def decode_parameters(message: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a message as plain values."""
    found = {}
    for name, parameter in message.items():
        choice = parameter.WhichOneof("parameter_choice")
        found[name] = getattr(parameter, choice) if choice else None
    return found
