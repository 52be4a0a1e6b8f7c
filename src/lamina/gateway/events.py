"""Streaming responses: one event per value a function yields, then the end, or an error with the problem.

`Accept: text/event-stream` gets server-sent events with JSON; `lamina.Client` asks for encoded values instead. A function that
returns has one event. What fails before the first event is a response like any other.
"""

from __future__ import annotations

from lamina import values
from lamina.errors import LaminaError
from lamina.gateway.exchange import Exchange
from lamina.gateway.wire import BYTES
from lamina.sdk import pieces

NOTHING = (b"null", values.encode(None))


class Events(Exchange):
    """Server-sent events. Stands in for the exchange it writes to; `send_value` takes encoded values."""

    __slots__ = ("_real",)

    kind = b"text/event-stream"

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
        elif not real.streaming and body not in NOTHING:  # it has returned, not yielded
            self._say(b"", values.to_json(body) if content_type == BYTES else body, extra)
        self._say(b"end", b"{}", extra)
        real.end()

    def _say(self, event: bytes, data: bytes, extra: bytes = b"") -> None:
        real = self._real
        if not real.streaming:
            real.begin(200, self.kind, b"cache-control: no-cache\r\n" + extra)
        real.push(self._written(event, data))

    def _written(self, event: bytes, data: bytes) -> bytes:
        return b"%sdata: %s\n\n" % (b"event: %s\n" % event if event else b"", data)


class Values(Events):
    """A stream of encoded values. Clients that ask for it also accept values, so a result is one."""

    __slots__ = ()

    kind = pieces.CONTENT_TYPE.encode()

    def piece(self, blob: values.Blob) -> None:
        self._say(b"", bytes(blob))

    def _written(self, event: bytes, data: bytes) -> bytes:
        return pieces.frame({b"": pieces.VALUE, b"error": pieces.ERROR}.get(event, pieces.END), data)


def wanted(accept: bytes) -> type[Events] | None:
    """The stream type that an Accept header asks for; None: a response as a whole."""
    return Events if Events.kind in accept else Values if Values.kind in accept else None
