"""The `generate` extension: a JSON object of inputs by name in, a JSON object of outputs by name out.

`generate_stream` sends one event per value of a function that yields, and one for any other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lamina import values
from lamina.errors import BadValue
from lamina.gateway import wire
from lamina.gateway.caller import Caller
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.oip.errors import error_text, refuse
from lamina.gateway.oip.models import Model, dtype_of
from lamina.gateway.oip.numbers import to_list, to_raw
from lamina.gateway.oip.question import Answer, Question, refuse_wishes, wishes
from lamina.gateway.oip.serving import Serving
from lamina.gateway.oip.tensors import Given, Output, count, join_bytes
from lamina.sdk.tensors import Port

EVENTS = b"text/event-stream"


def answer(serving: Serving, model: Model, request: Request, exchange: Exchange, caller: Caller, *, in_pieces: bool) -> None:
    """Handle a request of the extension."""
    refuse_wishes(request.headers)
    fields = values.from_json(request.body)
    if not isinstance(fields, dict):
        raise BadValue("body: not a JSON object", hint="send inputs by name")
    parameters = fields.pop("parameters", {})
    request_id = fields.pop("id", "")
    if not isinstance(parameters, dict):
        raise BadValue("parameters: not an object")
    timeout_us, priority = wishes(parameters)
    inputs = [_given(model, name, value) for name, value in fields.items()]
    question = Question(model, inputs, (), timeout_us, priority, caller, request.header(b"traceparent"))

    def shown(outputs: list[Output]) -> bytes:
        told: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if request_id:
            told["id"] = request_id
        return msgspec.json.encode(told | {output.name: _plain(model, output) for output in outputs})

    def on_piece(outputs: list[Output]) -> None:
        if not exchange.streaming:
            exchange.begin(200, EVENTS, b"cache-control: no-cache\r\n")
        exchange.push(b"data: %s\n\n" % shown(outputs))

    def on_answer(said: Answer | wire.Problem) -> None:
        if isinstance(said, wire.Problem):
            if exchange.streaming:
                exchange.push(b"data: %s\n\n" % msgspec.json.encode({"error": error_text(said)}))
                exchange.end()
            else:
                refuse(exchange, said)
        elif in_pieces:
            if not model.signature.streams:
                on_piece(said.outputs)
            elif not exchange.streaming:  # it has yielded nothing
                exchange.begin(200, EVENTS)
            exchange.end()
        else:
            exchange.respond(200, shown(said.outputs), wire.JSON, wire.reply_headers(said.reply))

    cancel = serving.infer(question, on_answer, on_piece if in_pieces and model.signature.streams else None)
    if exchange.answer is None or exchange.streaming:
        exchange.on_gone = cancel


def _given(model: Model, name: str, value: Any) -> Given:
    """An input tensor from a plain value; a single value stands for as many dimensions as are needed."""
    port = model.ports.get(name)
    dtype = dtype_of(port) if port is not None else "BYTES"
    if port is not None and port.tensor is None:
        shape = [1, 1] if model.batched else [1]
        return Given(name, dtype, shape, join_bytes([values.to_json(value)]))
    data = to_raw(name, dtype, msgspec.json.encode(value if isinstance(value, list) else [value]))
    return Given(name, dtype, _shape(model, port, value), data)


def _shape(model: Model, port: Port | None, value: Any) -> list[int]:
    shape: list[int] = []
    at = value
    while isinstance(at, list) and len(shape) < values.MAX_RANK:
        shape.append(len(at))
        at = at[0] if at else None
    wanted = len(model.shape(port)) if port is not None else len(shape)
    return [1] * max(0, wanted - len(shape)) + shape


def _plain(model: Model, output: Output) -> Any:
    """A plain value: one element as it is, several as a list; JSON text is decoded."""
    found = to_list(output.name, output.dtype, output.data, count(output.shape))
    port = next((one for one in model.signature.outputs if one.name == output.name), None)
    if port is not None and port.tensor is None:
        found = [values.from_json(text.encode()) for text in found]
    return found[0] if len(found) == 1 else found
