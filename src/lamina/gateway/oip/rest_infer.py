"""Inference over REST: from a body to an inference request, from its response to a body."""

from __future__ import annotations

from lamina.errors import LaminaError
from lamina.gateway.caller_identity import CallerIdentity
from lamina.gateway.oip import json_codec
from lamina.gateway.oip.compression import compress
from lamina.gateway.oip.inference import (
    InferenceBackend,
    InferenceRequest,
    InferenceResponse,
    reject_option_headers,
    timeout_and_priority,
)
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.problems import respond_error
from lamina.gateway.routes import http_codec
from lamina.server.exchange import Exchange
from lamina.server.request import HttpRequest


def handle_infer(
    serving: InferenceBackend, model: ServedModel, caller: CallerIdentity, request: HttpRequest, exchange: Exchange
) -> None:
    """Handle a request; errors of the request are raised."""
    reject_option_headers(request.headers)
    asked = json_codec.decode_request(request.body, request.header(json_codec.LENGTH))
    timeout_us, priority = timeout_and_priority(asked.parameters)

    def on_answer(said: InferenceResponse | http_codec.HttpProblem) -> None:
        if isinstance(said, http_codec.HttpProblem):
            respond_error(exchange, said)
            return
        try:
            content, kind, extra = json_codec.encode_response(model, asked, said.outputs)
        except LaminaError as error:
            respond_error(exchange, http_codec.error_problem(error, said.reply.call_id))
            return
        accept = request.header(b"accept-encoding")
        if accept:
            content, how = compress(content, accept)
            extra += how
        exchange.respond(200, content, kind, extra + http_codec.reply_headers(said.reply))

    trace = request.header(b"traceparent")
    question = InferenceRequest(model, asked.inputs, asked.requested_outputs, timeout_us, priority, caller, trace)
    cancel = serving.infer(question, on_answer)
    if exchange.response is None:
        exchange.on_disconnect = cancel
