"""Inference over REST: from a body to an inference request, from its response to a body."""

from __future__ import annotations

from lamina.errors import LaminaError
from lamina.gateway import wire
from lamina.gateway.caller import Caller
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.oip import body
from lamina.gateway.oip.errors import refuse
from lamina.gateway.oip.models import Model
from lamina.gateway.oip.packed import packed
from lamina.gateway.oip.question import Answer, Infers, Question, refuse_wishes, wishes


def infer(serving: Infers, model: Model, caller: Caller, request: Request, exchange: Exchange) -> None:
    """Handle a request; errors of the request are raised."""
    refuse_wishes(request.headers)
    asked = body.read(request.body, request.header(body.LENGTH))
    timeout_us, priority = wishes(asked.parameters)

    def on_answer(said: Answer | wire.Problem) -> None:
        if isinstance(said, wire.Problem):
            refuse(exchange, said)
            return
        try:
            content, kind, extra = body.write(model, asked, said.outputs)
        except LaminaError as error:
            refuse(exchange, wire.error_problem(error, said.reply.call_id))
            return
        accept = request.header(b"accept-encoding")
        if accept:
            content, how = packed(content, accept)
            extra += how
        exchange.respond(200, content, kind, extra + wire.reply_headers(said.reply))

    trace = request.header(b"traceparent")
    question = Question(model, asked.inputs, asked.wanted, timeout_us, priority, caller, trace)
    cancel = serving.infer(question, on_answer)
    if exchange.answer is None:
        exchange.on_gone = cancel
