"""Streaming responses: one event per value a function yields, then the end, or an error with the problem.

`Accept: text/event-stream` gets server-sent events with JSON; `lamina.Client` asks for encoded values instead. A function that
returns has one event. What fails before the first event is a response like any other.
"""

from __future__ import annotations

from typing import Any

from lamina import encoding
from lamina.errors import FunctionFailed, LaminaError
from lamina.gateway.routes.codec_pool import PIECE_TEXT_BYTES, is_heavy_piece
from lamina.gateway.routes.http_codec import JSON, VALUE
from lamina.gateway.routes.problems import PROBLEM, make_problem
from lamina.sdk import stream_codec
from lamina.server.exchange import Exchange

NOT_CACHED = b"cache-control: no-cache\r\n"
MAX_DETAIL = 2_000
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
            self._send_event(b"error", body if content_type == PROBLEM else _own_problem(status, body))
        elif not real.is_streaming and body not in NO_RESULT:  # it has returned, not yielded
            self._send_event(b"", body if content_type in (JSON, VALUE) else _as_json(body, content_type), extra)
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
        if b"\n" in data:  # JSON that a function has written itself
            data = data.replace(b"\r", b"").replace(b"\n", b"\ndata: ")
        return b"%sdata: %s\n\n" % (b"event: %s\n" % event if event else b"", data)


def _as_json(body: bytes, content_type: bytes) -> bytes:
    """A response of a function's own as the JSON of an event: text as text, all else as base64."""
    return encoding.to_json(body.decode(errors="replace") if content_type.startswith(b"text/") else body)


def _own_problem(status: int, body: bytes) -> bytes:
    """The problem for a response that a function has raised after values that are sent."""
    return make_problem(status, body[:MAX_DETAIL].decode(errors="replace")).body()


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
