"""Inference over REST: `infer` with tensors, and the `generate` extension with plain values.

`generate` takes a JSON object of inputs by name and gives one of outputs by name; `generate_stream` sends one event per value
of a function that yields, and one for any other.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import msgspec

from lamina import encoding
from lamina.access.records import Identity
from lamina.core.actions import Reply
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
from lamina.gateway.oip.json_codec import (
    LENGTH,
    decode_request,
    encode_response,
    plain_document,
    plain_text_job,
    response_kind,
    text_bytes,
    text_job,
)
from lamina.gateway.oip.json_tensors import to_raw
from lamina.gateway.oip.model_catalog import ServedModel, port_dtype
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, join_bytes
from lamina.gateway.routes.codec_pool import FLAT_BYTES, INLINE_BYTES, CodecPool, is_heavy_json
from lamina.gateway.routes.http_codec import JSON, reply_headers
from lamina.gateway.routes.problems import HttpProblem, defect_problem, error_problem
from lamina.ipc.sliced_copies import own_bytes, size_of
from lamina.sdk.tensors import Port
from lamina.server.compression import compress
from lamina.server.exchange import Exchange, HttpRequest

EVENTS = b"text/event-stream"


def handle_infer(
    backend: InferenceBackend,
    model: ServedModel,
    caller: Identity,
    request: HttpRequest,
    exchange: Exchange,
    codecs: CodecPool | None = None,
) -> None:
    """Handle a request; errors of the request are raised. What is large and in JSON is made binary by a codec process, and what
    is large and binary is taken in a turn of its own: to read it was enough for one."""
    reject_option_headers(request.headers)
    length, body = request.header(LENGTH), request.body

    def again(found: dict[str, bytes]) -> None:
        headers = {**request.headers, LENGTH: found["length"]}
        whole = HttpRequest(request.method, request.path, request.query, headers, found["body"], request.keep_alive)
        _infer(backend, model, caller, whole, exchange, codecs)

    if codecs is not None and len(body) > INLINE_BYTES:
        if is_heavy_json(body[: int(length)] if length.isdigit() and len(length) < 16 else body):
            codecs.to_binary(body, length, _answered(exchange, again))
            return
        if len(body) > FLAT_BYTES:
            later = _answered(exchange, lambda whole: _infer(backend, model, caller, whole, exchange, codecs))
            asyncio.get_running_loop().call_soon(later, request)
            return
    _infer(backend, model, caller, request, exchange, codecs)


def _answered(exchange: Exchange, work: Callable[[Any], None]) -> Callable[[Any], None]:
    """A callback that ends in an answer whatever it is given or raises."""

    def call(found: Any) -> None:
        if isinstance(found, LaminaError):  # raised, it would be held by its own frames, with the body
            respond_error(exchange, error_problem(found))
            return
        try:
            work(found)
        except LaminaError as error:
            respond_error(exchange, error_problem(error))
        except Exception as error:
            respond_error(exchange, defect_problem("a large inference request failed", error))

    return call


def _infer(
    backend: InferenceBackend,
    model: ServedModel,
    caller: Identity,
    request: HttpRequest,
    exchange: Exchange,
    codecs: CodecPool | None,
) -> None:
    body = decode_request(request.body, request.header(LENGTH))
    timeout_us, priority = timeout_and_priority(body.parameters)
    accept = request.header(b"accept-encoding")

    def respond(content: bytes, kind: bytes, extra: bytes, reply: Reply) -> None:
        if accept:
            content, how = compress(content, accept)
            extra += how
        exchange.respond(200, content, kind, extra + reply_headers(reply))

    def on_response(response: InferenceResponse | HttpProblem) -> None:
        if isinstance(response, HttpProblem):
            respond_error(exchange, response)
            return
        outputs, reply = response.outputs, response.reply
        if codecs is not None and text_bytes(body, outputs) > INLINE_BYTES:
            job, data = text_job(model, body, outputs)

            def then(made: dict[str, bytes]) -> None:
                respond(made["body"], *response_kind(len(made["body"]), int(made["length"])), reply)

            codecs.submit("text", {"job": job}, data, _answered(exchange, then))
            return
        try:
            parts, kind, extra = encode_response(model, body, outputs)
        except LaminaError as error:
            respond_error(exchange, error_problem(error, reply.call_id))
            return
        if codecs is not None and size_of(parts) > FLAT_BYTES:
            whole = _answered(exchange, lambda content: respond(content, kind, extra, reply))
            codecs.copies.join(parts, whole, own_bytes(parts))
        else:
            respond(b"".join(parts), kind, extra, reply)

    trace = request.header(b"traceparent")
    wanted = InferenceRequest(model, body.inputs, body.requested_outputs, timeout_us, priority, caller, trace)
    cancel = backend.infer(wanted, on_response)
    if exchange.response is None:
        exchange.when_disconnected(cancel)


def handle_generate(
    backend: InferenceBackend,
    model: ServedModel,
    request: HttpRequest,
    exchange: Exchange,
    caller: Identity,
    codecs: CodecPool | None = None,
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
        return plain_document(model, request_id, outputs)

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
        elif codecs is not None and sum([len(output.data) for output in response.outputs]) > INLINE_BYTES:
            extra = reply_headers(response.reply)
            job, data = plain_text_job(model, request_id, response.outputs)
            then = _answered(exchange, lambda made: exchange.respond(200, made["body"], JSON, extra))
            codecs.submit("text", {"job": job}, data, then)
        else:
            exchange.respond(200, shown(response.outputs), JSON, reply_headers(response.reply))

    cancel = backend.infer(wanted, on_response, on_chunk if in_pieces and model.signature.streams else None)
    if exchange.response is None or exchange.is_streaming:
        exchange.when_disconnected(cancel)


def _input_tensor(model: ServedModel, name: str, value: Any) -> InputTensor:
    """An input tensor from a plain value; a single value stands for as many dimensions as are needed."""
    port = model.ports.get(name)
    dtype = port_dtype(port) if port is not None else "BYTES"
    if port is not None and port.tensor is None:
        shape = [1, 1] if model.is_batched else [1]
        return InputTensor(name, dtype, shape, join_bytes([_element(port, value)]))
    data = to_raw(name, dtype, msgspec.json.encode(value if isinstance(value, list) else [value]))
    return InputTensor(name, dtype, _shape(model, port, value), data)


def _element(port: Port, value: Any) -> bytes:
    """The element of a `BYTES` tensor for a value without a tensor. JSON has bytes as base64."""
    if not port.plain or port.plain == "number":
        return encoding.to_json(value)
    if not isinstance(value, str):
        raise BadValue(f"{port.name}: {type(value).__name__} where text is needed", hint="send a string")
    if port.plain == "text":
        return value.encode()
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise BadValue(f"{port.name}: {value[:40]!r} is not base64", hint="send bytes as base64") from None


def _shape(model: ServedModel, port: Port | None, value: Any) -> list[int]:
    shape: list[int] = []
    at = value
    while isinstance(at, list) and len(shape) < encoding.MAX_RANK:
        shape.append(len(at))
        at = at[0] if at else None
    wanted = len(model.shape(port)) if port is not None else len(shape)
    return [1] * max(0, wanted - len(shape)) + shape
