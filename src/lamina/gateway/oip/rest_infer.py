"""Inference over REST: `infer` with tensors, and the `generate` extension with plain values.

`generate` takes a JSON object of inputs by name and gives one of outputs by name; `generate_stream` sends one event per value
of a function that yields, and one for any other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lamina import encoding
from lamina.access.records import Identity
from lamina.errors import BadValue, LaminaError
from lamina.gateway.oip.inference import (
    InferenceBackend,
    InferenceRequest,
    InferenceResponse,
    error_text,
    reject_option_headers,
    respond_error,
    timeout_and_priority,
)
from lamina.gateway.oip.json_codec import LENGTH, decode_request, encode_response
from lamina.gateway.oip.json_tensors import to_list, to_raw
from lamina.gateway.oip.model_catalog import ServedModel, port_dtype
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, element_count, join_bytes
from lamina.gateway.routes.http_codec import JSON, reply_headers
from lamina.gateway.routes.problems import HttpProblem, error_problem
from lamina.sdk.tensors import Port
from lamina.server.compression import compress
from lamina.server.exchange import Exchange, HttpRequest

EVENTS = b"text/event-stream"


def handle_infer(
    backend: InferenceBackend, model: ServedModel, caller: Identity, request: HttpRequest, exchange: Exchange
) -> None:
    """Handle a request; errors of the request are raised."""
    reject_option_headers(request.headers)
    body = decode_request(request.body, request.header(LENGTH))
    timeout_us, priority = timeout_and_priority(body.parameters)

    def on_response(response: InferenceResponse | HttpProblem) -> None:
        if isinstance(response, HttpProblem):
            respond_error(exchange, response)
            return
        try:
            content, kind, extra = encode_response(model, body, response.outputs)
        except LaminaError as error:
            respond_error(exchange, error_problem(error, response.reply.call_id))
            return
        accept = request.header(b"accept-encoding")
        if accept:
            content, how = compress(content, accept)
            extra += how
        exchange.respond(200, content, kind, extra + reply_headers(response.reply))

    trace = request.header(b"traceparent")
    wanted = InferenceRequest(model, body.inputs, body.requested_outputs, timeout_us, priority, caller, trace)
    cancel = backend.infer(wanted, on_response)
    if exchange.response is None:
        exchange.on_disconnect = cancel


def handle_generate(
    backend: InferenceBackend,
    model: ServedModel,
    request: HttpRequest,
    exchange: Exchange,
    caller: Identity,
    *,
    in_pieces: bool,
) -> None:
    """Handle a request of the extension."""
    reject_option_headers(request.headers)
    fields = encoding.from_json(request.body)
    if not isinstance(fields, dict):
        raise BadValue("body: not a JSON object", hint="send inputs by name")
    parameters = fields.pop("parameters", {})
    request_id = fields.pop("id", "")
    if not isinstance(parameters, dict):
        raise BadValue("parameters: not an object")
    timeout_us, priority = timeout_and_priority(parameters)
    inputs = [_input_tensor(model, name, value) for name, value in fields.items()]
    wanted = InferenceRequest(model, inputs, (), timeout_us, priority, caller, request.header(b"traceparent"))

    def shown(outputs: list[OutputTensor]) -> bytes:
        document: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if request_id:
            document["id"] = request_id
        return msgspec.json.encode(document | {output.name: _plain_value(model, output) for output in outputs})

    def on_chunk(outputs: list[OutputTensor]) -> None:
        if not exchange.is_streaming:
            exchange.start_stream(200, EVENTS, b"cache-control: no-cache\r\n")
        exchange.send_chunk(b"data: %s\n\n" % shown(outputs))

    def on_response(response: InferenceResponse | HttpProblem) -> None:
        if isinstance(response, HttpProblem):
            if exchange.is_streaming:
                exchange.send_chunk(b"data: %s\n\n" % msgspec.json.encode({"error": error_text(response)}))
                exchange.end_stream()
            else:
                respond_error(exchange, response)
        elif in_pieces:
            if not model.signature.streams:
                on_chunk(response.outputs)
            elif not exchange.is_streaming:  # it has yielded nothing
                exchange.start_stream(200, EVENTS)
            exchange.end_stream()
        else:
            exchange.respond(200, shown(response.outputs), JSON, reply_headers(response.reply))

    cancel = backend.infer(wanted, on_response, on_chunk if in_pieces and model.signature.streams else None)
    if exchange.response is None or exchange.is_streaming:
        exchange.on_disconnect = cancel


def _input_tensor(model: ServedModel, name: str, value: Any) -> InputTensor:
    """An input tensor from a plain value; a single value stands for as many dimensions as are needed."""
    port = model.ports.get(name)
    dtype = port_dtype(port) if port is not None else "BYTES"
    if port is not None and port.tensor is None:
        shape = [1, 1] if model.is_batched else [1]
        return InputTensor(name, dtype, shape, join_bytes([encoding.to_json(value)]))
    data = to_raw(name, dtype, msgspec.json.encode(value if isinstance(value, list) else [value]))
    return InputTensor(name, dtype, _shape(model, port, value), data)


def _shape(model: ServedModel, port: Port | None, value: Any) -> list[int]:
    shape: list[int] = []
    at = value
    while isinstance(at, list) and len(shape) < encoding.MAX_RANK:
        shape.append(len(at))
        at = at[0] if at else None
    wanted = len(model.shape(port)) if port is not None else len(shape)
    return [1] * max(0, wanted - len(shape)) + shape


def _plain_value(model: ServedModel, output: OutputTensor) -> Any:
    """A plain value: one element as it is, several as a list; JSON text is decoded."""
    found = to_list(output.name, output.dtype, output.data, element_count(output.shape))
    port = next((one for one in model.signature.outputs if one.name == output.name), None)
    if port is not None and port.tensor is None:
        found = [encoding.from_json(text.encode()) for text in found]
    return found[0] if len(found) == 1 else found
