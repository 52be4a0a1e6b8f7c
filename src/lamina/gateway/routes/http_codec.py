"""HTTP codec: bodies to named inputs, results to bodies. The client never chooses a decoder: the list is fixed."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import msgspec

from lamina import encoding
from lamina.core.actions import Reply
from lamina.errors import BadValue, FunctionFailed, LaminaError, UnknownEncoding
from lamina.sdk.binding import NOTHING, Param, bind, bind_named
from lamina.server.exchange import HttpRequest

JSON = b"application/json"
VALUE = b"application/vnd.lamina.value"
BYTES = b"application/octet-stream"
FORM = b"application/x-www-form-urlencoded"
"""What curl says of whatever it is given with -d: taken as JSON if it is some or several inputs are needed, else as bytes."""


class DecodedBody:
    """A request body that an ingress process has decoded already."""

    __slots__ = ("arrived_us", "inputs", "size")

    def __init__(self, inputs: dict[str, Any], size: int, arrived_us: int) -> None:
        self.inputs: dict[str, Any] | None = inputs  #: None once they have been claimed
        self.size = size
        self.arrived_us = arrived_us

    def claim(self) -> dict[str, Any]:
        assert self.inputs is not None
        inputs, self.inputs = self.inputs, None
        return inputs


def check_encoding(request: HttpRequest) -> None:
    """Reject compressed bodies: they would be read as what they are not."""
    if b"content-encoding" in request.headers and request.body:
        compression = request.header(b"content-encoding")
        if compression.strip().lower() not in (b"", b"identity"):
            said = compression[:40].decode("latin-1")
            raise UnknownEncoding(f"content-encoding: {said!r} is not taken here", hint="send the body as it is; /v2 takes gzip")


def decode_inputs(request: HttpRequest, params: tuple[Param, ...]) -> dict[str, bytes]:
    """The named inputs of a call, each encoded."""
    headers, body = request.headers, request.body
    try:
        if b"content-encoding" in headers:
            check_encoding(request)
        kind, _, options = headers.get(b"content-type", b"").partition(b";")
        kind = kind.strip().lower()
        from_curl = kind == FORM and (len(params) != 1 or _is_json(body))  # bytes are for one parameter alone
        if kind == JSON or not kind or from_curl:
            named = bind(params, encoding.from_json(body) if body else NOTHING)
        elif kind == VALUE:
            named = bind_named(params, _decode_values(body))
        elif kind == b"multipart/form-data":
            named = bind_named(params, parse_multipart(options, body))
        else:
            named = {_only_param(params, kind): body}
        inputs = {}
        for name, value in named.items():
            inputs[name] = encoding.encode(value)
        return inputs
    except BadValue as error:
        if request.query:
            error.hint += "; inputs are taken from the body, not from behind the ? of the address"
        raise


def _decode_values(body: bytes) -> dict[str, Any]:
    named = encoding.decode(body)
    if not isinstance(named, dict):
        raise BadValue("body: not a dict of named inputs", hint="encode {parameter: value}")
    return named


def _only_param(params: tuple[Param, ...], kind: bytes) -> str:
    if len(params) != 1:
        raise BadValue(
            f"content-type: {kind.decode('latin-1')[:80]!r} carries one input; this takes {len(params)}",
            hint="send content-type: application/json with an object, or multipart with one part per input",
        )
    return params[0].name


def _is_json(body: bytes) -> bool:
    try:
        return not body or bool(msgspec.json.decode(body, type=msgspec.Raw))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    except RecursionError:
        return True


def parse_query(request: HttpRequest, known: tuple[str, ...]) -> dict[str, str]:
    """Parse the query string; an unknown name is an error, not to be ignored."""
    try:
        pairs = parse_qsl(request.query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise BadValue("query: it cannot be read", hint="NAME=VALUE&NAME=VALUE, percent-encoded") from None
    found = dict(pairs)
    for name in found:
        if name not in known:
            raise BadValue(f"query: {name[:40]!r} means nothing here", hint=f"known: {', '.join(known)}")
    return found


def encode_result(blob: encoding.Blob, accept: bytes) -> tuple[bytes, bytes]:
    """Body and content type of a result. One without a form to send is the function's error, not the client's."""
    if VALUE in accept:
        return bytes(blob), VALUE
    try:
        value = encoding.decode(blob)
        return (value, BYTES) if isinstance(value, bytes) else (encoding.to_json(value), JSON)
    except BadValue as error:
        hint = f"return something else, or ask for {VALUE.decode()}; {error.hint}"
        raise FunctionFailed(f"its result: {error.message}", error="BadValue", hint=hint) from None


def reply_headers(reply: Reply) -> bytes:
    return (
        f"lamina-call-id: {reply.call_id}\r\nlamina-latency-ms: {reply.latency_us / 1000:.3f}\r\n"
        f"lamina-queue-ms: {reply.queue_us / 1000:.3f}\r\nlamina-batch: {reply.batch}\r\nlamina-slice: {reply.slice}\r\n"
        f"lamina-cost: {reply.cost:.9f}\r\nlamina-cold-start-ms: {reply.cold_us / 1000:.1f}\r\n"
        f"lamina-retries: {reply.retries}\r\n"
    ).encode()


# ----------------------------------------------------------------- multipart forms

MAX_PARTS = 64
MAX_BOUNDARY = 70  #: RFC 2046
MAX_NAME, MAX_VALUE = 256, 4_096  #: of a part's header


def parse_multipart(options: bytes, body: bytes) -> dict[str, Any]:
    """The parts by name. `options` is the rest of the content type."""
    from python_multipart.multipart import MultipartParser

    form = _Form()
    parser = MultipartParser(
        _boundary(options),
        {
            "on_part_begin": form.begin,
            "on_header_field": form.header_name,
            "on_header_value": form.header_value,
            "on_header_end": form.header_end,
            "on_part_data": form.data,
            "on_part_end": form.end,
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except LaminaError:
        raise
    except Exception as error:  # the parser has its own family of errors; to the client they are all one
        raise BadValue(f"body: not multipart: {type(error).__name__}") from None
    return form.parts


def _boundary(options: bytes) -> bytes:
    from python_multipart.multipart import parse_options_header

    _, found = parse_options_header(b"multipart/form-data;" + options)
    boundary: bytes = found.get(b"boundary", b"")
    if not 1 <= len(boundary) <= MAX_BOUNDARY:
        raise BadValue("content-type: no usable multipart boundary", hint=f"1 to {MAX_BOUNDARY} characters")
    return boundary


class _Form:
    """Parser callbacks: the parts so far, and the one being read."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value, self._body = bytearray(), bytearray(), bytearray()

    def begin(self) -> None:
        self._headers.clear()
        self._body.clear()
        if len(self.parts) >= MAX_PARTS:
            raise BadValue(f"body: more than {MAX_PARTS} parts")

    def header_name(self, data: bytes, start: int, stop: int) -> None:
        _add(self._name, data[start:stop], MAX_NAME)

    def header_value(self, data: bytes, start: int, stop: int) -> None:
        _add(self._value, data[start:stop], MAX_VALUE)

    def header_end(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def data(self, data: bytes, start: int, stop: int) -> None:
        self._body += data[start:stop]

    def end(self) -> None:
        from python_multipart.multipart import parse_options_header

        disposition, about = parse_options_header(self._headers.get(b"content-disposition", b""))
        key = about.get(b"name", b"").decode("utf-8", "replace")
        if disposition != b"form-data" or not key:
            raise BadValue("body: a part without a name")
        if key in self.parts:
            raise BadValue(f"{key[:80]!r}: given twice")
        is_file = b"filename" in about or b"content-type" in self._headers
        try:
            self.parts[key] = bytes(self._body) if is_file else self._body.decode()
        except UnicodeDecodeError:
            self.parts[key] = bytes(self._body)


def _add(header: bytearray, piece: bytes, limit: int) -> None:
    if len(header) + len(piece) > limit:
        raise BadValue("body: part header too large")
    header += piece
