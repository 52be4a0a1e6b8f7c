"""Error responses of the protocol."""

from __future__ import annotations

import msgspec

from lamina.gateway import logs, wire
from lamina.gateway.exchange import Exchange


def error_text(problem: wire.Problem) -> str:
    """A problem as one line of text."""
    offer = f"; in {problem.offer_ms:g} ms it could" if problem.offer_ms else ""
    return f"{problem.detail or problem.title}{offer}{f' ({problem.hint})' if problem.hint else ''}"


def refuse(exchange: Exchange, problem: wire.Problem) -> None:
    """Respond with an error."""
    logs.refused(problem)
    exchange.respond(problem.status, msgspec.json.encode({"error": error_text(problem)}), wire.JSON, problem.headers())
