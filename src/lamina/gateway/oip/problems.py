"""Error responses of the protocol."""

from __future__ import annotations

import msgspec

from lamina.gateway.observability import logs
from lamina.gateway.routes import http_codec
from lamina.server.exchange import Exchange


def error_text(problem: http_codec.HttpProblem) -> str:
    """A problem as one line of text."""
    offer = f"; in {problem.offer_ms:g} ms it could" if problem.offer_ms else ""
    return f"{problem.detail or problem.title}{offer}{f' ({problem.hint})' if problem.hint else ''}"


def respond_error(exchange: Exchange, problem: http_codec.HttpProblem) -> None:
    """Respond with an error."""
    logs.log_rejection(problem)
    exchange.respond(problem.status, msgspec.json.encode({"error": error_text(problem)}), http_codec.JSON, problem.headers())
