"""An answer as server-sent events: one per piece that a function yields, then `end`, or `error` with the problem.

For who asks with `Accept: text/event-stream`. A function that returns has one piece. What fails before the first piece is an
answer like any other.
"""

from __future__ import annotations

from lamina import values
from lamina.errors import LaminaError
from lamina.gateway.exchange import Exchange
from lamina.gateway.wire import BYTES

KIND = b"text/event-stream"


class Events(Exchange):
    """Stands in for the exchange it writes to; `piece` takes encoded values."""

    __slots__ = ("_real",)

    def __init__(self, real: Exchange) -> None:
        self._real = real

    def piece(self, blob: values.Blob) -> None:
        try:
            text = values.to_json(values.decode(blob))
        except LaminaError as error:
            self._say(b"error", values.to_json({"detail": error.message}))
        else:
            self._say(b"", text)

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        real = self._real
        if status != 200:
            if not real.streaming:
                real.respond(status, body, content_type, extra)
                return
            self._say(b"error", body)
        elif not real.streaming and body != b"null":  # it has returned, not yielded
            self._say(b"", values.to_json(body) if content_type == BYTES else body, extra)
        self._say(b"end", b"{}", extra)
        real.end()

    def _say(self, event: bytes, data: bytes, extra: bytes = b"") -> None:
        real = self._real
        if not real.streaming:
            real.begin(200, KIND, b"cache-control: no-cache\r\n" + extra)
        real.push(b"%sdata: %s\n\n" % (b"event: %s\n" % event if event else b"", data))
