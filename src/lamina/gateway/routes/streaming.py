"""Streaming responses: one event per value a function yields, then the end, or an error with the problem.

`Accept: text/event-stream` gets server-sent events with JSON; `lamina.Client` asks for encoded values instead. A function that
returns has one event. What fails before the first event is a response like any other.
"""

from __future__ import annotations

from typing import Any

from lamina import encoding
from lamina.errors import FunctionFailed, LaminaError
from lamina.gateway.routes.codec_pool import PIECE_TEXT_BYTES, is_heavy_piece
from lamina.gateway.routes.http_codec import BYTES
from lamina.sdk import stream_codec
from lamina.server.exchange import Exchange

NOT_CACHED = b"cache-control: no-cache\r\n"
NO_RESULT = (b"null", encoding.encode(None))


def piece_value(blob: encoding.Blob) -> Any:
    """A value that a function has yielded, to make text of; one that would take too long is an error of the function's."""
    if is_heavy_piece(blob):
        hint = "yield less at a time, or read the stream with lamina.Client, which takes values as they are"
        raise FunctionFailed(f"it has yielded {len(blob)} bytes at once; {PIECE_TEXT_BYTES} are sent as text", hint=hint)
    return encoding.decode(blob)


def piece_text(blob: encoding.Blob) -> bytes:
    return encoding.to_json(piece_value(blob))


class ServerSentEvents(Exchange):
    """Server-sent events. Stands in for the exchange it writes to; `send_value` takes encoded values."""

    __slots__ = ("_exchange",)

    content_type = b"text/event-stream"

    def __init__(self, real: Exchange) -> None:
        self._exchange = real

    def send_value(self, blob: encoding.Blob) -> None:
        try:
            text = piece_text(blob)
        except LaminaError as error:
            self._send_event(b"error", encoding.to_json({"detail": error.message}))
        else:
            self._send_event(b"", text)

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        real = self._exchange
        if status != 200:
            if not real.is_streaming:
                real.respond(status, body, content_type, extra)
                return
            self._send_event(b"error", body)
        elif not real.is_streaming and body not in NO_RESULT:  # it has returned, not yielded
            self._send_event(b"", encoding.to_json(body) if content_type == BYTES else body, extra)
        if not real.is_streaming:
            real.start_stream(200, self.content_type, NOT_CACHED + extra)
        real.end_stream(self._encode_event(b"end", b"{}"))

    def _send_event(self, event: bytes, data: bytes, extra: bytes = b"") -> None:
        real = self._exchange
        if real.is_streaming:
            real.send_chunk(self._encode_event(event, data))
        else:
            real.start_stream(200, self.content_type, NOT_CACHED + extra, self._encode_event(event, data))

    def _encode_event(self, event: bytes, data: bytes) -> bytes:
        return b"%sdata: %s\n\n" % (b"event: %s\n" % event if event else b"", data)


class ValueStream(ServerSentEvents):
    """A stream of encoded values. Clients that ask for it also accept values, so a result is one."""

    __slots__ = ()

    content_type = stream_codec.CONTENT_TYPE.encode()

    def send_value(self, blob: encoding.Blob) -> None:
        self._send_event(b"", bytes(blob))

    def _encode_event(self, event: bytes, data: bytes) -> bytes:
        return stream_codec.encode_frame(
            {b"": stream_codec.VALUE, b"error": stream_codec.ERROR}.get(event, stream_codec.END), data
        )


def stream_type(accept: bytes) -> type[ServerSentEvents] | None:
    """The stream type that an Accept header asks for; None: a response as a whole."""
    return (
        ServerSentEvents
        if ServerSentEvents.content_type in accept
        else ValueStream
        if ValueStream.content_type in accept
        else None
    )
