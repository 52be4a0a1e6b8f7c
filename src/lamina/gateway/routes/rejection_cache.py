"""Cached rejection of a target.

Under overload most calls are rejected, one after another, for one and the same reason. The rejection says how much too late the
call would have been, so for that long no other of its kind can be in time either, unless something ends or changes
(`generation`). Until then it gets the same response without asking the controller: only its id is new.
"""

from __future__ import annotations

from lamina.core.actions import Reject
from lamina.gateway.routes import http_codec
from lamina.server.exchange import STATUS_LINES, Exchange

_ID = "-id-"


class CachedRejection:
    """A rejection as response bytes, with the call id left open."""

    __slots__ = ("_body", "_headers", "_raw_template", "_size", "_status", "generation", "reason", "until_us")

    def __init__(self, turn: int, until_us: int, refusal: Reject) -> None:
        self.generation = turn
        self.until_us = until_us
        self.reason = refusal.reason
        problem = http_codec.rejection_problem(refusal)
        problem.id = _ID
        self._status = problem.status
        self._body = problem.body().split(_ID.encode(), 1)
        self._headers = problem.headers().split(_ID.encode(), 1)
        self._size = sum(map(len, self._body))
        self._raw_template = b""

    def raw_response(self, name: bytes, date_line: bytes) -> bytes:
        """The response as sent. It is valid for milliseconds, so the date it was first given at will do."""
        if not self._raw_template:
            lines = (STATUS_LINES[self._status], date_line, b"content-type: ", http_codec.PROBLEM, b"\r\ncontent-length: ")
            parts = [part.replace(b"%", b"%%") for part in (b"".join(lines), *self._headers, *self._body)]
            self._raw_template = b"%b%%d\r\n%b%%b%b\r\n%b%%b%b" % tuple(parts)
        return self._raw_template % (self._size + len(name), name, name)

    def respond(self, exchange: Exchange, call_id: str) -> None:
        name = call_id.encode()
        exchange.respond(self._status, name.join(self._body), http_codec.PROBLEM, name.join(self._headers))
