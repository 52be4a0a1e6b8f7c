"""HTTP codec: bodies to named inputs, results to bodies. The client never chooses a decoder: the list is fixed."""

from __future__ import annotations

import contextlib
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from lamina import encoding
from lamina.core.actions import Reply
from lamina.errors import BadValue, FunctionFailed, LaminaError, UnknownEncoding
from lamina.ipc.sliced_copies import Parts
from lamina.sdk.binding import NOTHING, Param, bind, bind_named, sole_param
from lamina.sdk.json_schema import is_base64, item_schema, json_types, property_schemas, takes_any_text
from lamina.sdk.plain_values import check_json_types
from lamina.server.exchange import HttpRequest

JSON = b"application/json"
VALUE = b"application/vnd.lamina.value"
BYTES = b"application/octet-stream"
MULTIPART = b"multipart/form-data"
FORM = b"application/x-www-form-urlencoded"
"""Also what curl says of whatever it is given with -d: taken as JSON if it is some, as a form if it has the parameters' names,
and else as bytes, which are for one parameter alone that may be bytes or text."""


class DecodedBody:
    """A request body that an ingress process has decoded already."""

    __slots__ = ("arrived_us", "inputs", "on_call", "size")

    def __init__(self, inputs: dict[str, Any], size: int, arrived_us: int, on_call: Callable[[str], None] | None = None) -> None:
        self.inputs: dict[str, Any] | None = inputs  #: None once they have been claimed
        self.size = size
        self.arrived_us = arrived_us
        self.on_call = on_call  #: told the id of the call, before it is submitted

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


def decode_parts(request: HttpRequest, params: tuple[Param, ...]) -> dict[str, Parts]:
    """The named inputs of a call, each encoded in parts that need not be put together yet: large bytes are not copied."""
    headers = request.headers
    if headers.get(b"content-type") == VALUE and not request.query and b"content-encoding" not in headers:
        entries = encoding.input_entries(request.body)
        if entries is not None:
            return {name: (blob,) for name, blob in bind_named(params, entries).items()}
    return decode_inputs(request, params, encoding.encode_parts)


def decode_inputs(
    request: HttpRequest, params: tuple[Param, ...], encode: Callable[[Any], Any] = encoding.encode
) -> dict[str, Any]:
    """The named inputs of a call, each encoded."""
    headers, body = request.headers, request.body
    try:
        if b"content-encoding" in headers:
            check_encoding(request)
        if request.query:
            _check_query(request, params)
        kind, _, options = headers.get(b"content-type", b"").partition(b";")
        kind = kind.strip().lower()
        if kind == JSON or is_json_type(kind):  # most requests, without a call
            text = _without_mark(body) if body[:1] == BOM_UTF8[:1] else body
            named = bind(params, encoding.from_json(text) if body else NOTHING)
        elif kind == VALUE:
            given = encoding.decode_input(body)
            named = bind_named(params, given) if isinstance(given, dict) else bind(params, given)
        elif kind == MULTIPART:
            named = bind_named(params, form_values(params, parse_multipart(options, body)))
        elif kind == FORM:
            named = _decode_urlencoded(params, body)
        else:
            named = {_only_param(params, kind): body}
        if params and params[0].at_entry:
            check_json_types(params, named)
        inputs = {}
        for name, value in named.items():
            inputs[name] = encode(value)
        return inputs
    except BadValue as error:
        if request.query:
            error.add_hint(_FROM_BODY)
        raise


_FROM_BODY = "inputs are taken from the body, not from behind the ? of the address"


def _check_query(request: HttpRequest, params: tuple[Param, ...]) -> None:
    """Reject inputs in the query: they would be ignored without a word. Other names are for proxies and caches."""
    given = {pair.partition(b"=")[0] for pair in request.query.split(b"&")}
    name = next((param.name for param in params if param.name.encode() in given), None)
    if name is not None:
        raise BadValue(f"{name}: given in the query", hint="send a form with a field of that name")


def is_json_type(kind: bytes) -> bool:
    """Whether a content type is JSON, or one that is written in it (`application/ld+json`). None at all is JSON too."""
    return kind == JSON or not kind or kind.endswith(b"+json")


def _without_mark(body: bytes) -> bytes:
    """A body without the byte order mark that editors and shells of Windows write before it."""
    return body[len(BOM_UTF8) :] if body[:3] == BOM_UTF8 else body


def _decode_urlencoded(params: tuple[Param, ...], body: bytes) -> dict[str, Any]:
    body = _without_mark(body)
    if _is_json(body):
        return bind(params, encoding.from_json(body) if body else NOTHING)
    fields: dict[str, list[FormField]] = {}
    names = {param.name for param in params}
    with contextlib.suppress(ValueError):  # too many fields, or no UTF-8
        for name, text in parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PARTS, errors="strict"):
            fields.setdefault(name, []).append(text)
    is_form = b"=" in body and body.lstrip()[:1] not in (b"{", b"[", b'"')
    if is_form and fields and (len(params) != 1 or names.issuperset(fields) or property_schemas(params[0].schema)):
        return bind_named(params, form_values(params, fields))
    if len(params) != 1 or not _takes_raw(params[0], body):
        return bind(params, encoding.from_json(body))
    return {params[0].name: body}


def _takes_raw(param: Param, body: bytes) -> bool:
    """Whether a body that is no JSON is the value: of text and bytes, or of anything if it is not JSON with a mistake."""
    kinds = json_types(param.schema)
    return "string" in kinds if kinds else body.lstrip()[:1] not in (b"{", b"[", b'"')


def _only_param(params: tuple[Param, ...], kind: bytes) -> str:
    sole = sole_param(params)
    if sole is None:
        raise BadValue(
            f"content-type: {kind.decode('latin-1')[:80]!r} carries one input; this takes {len(params)}",
            hint="send content-type: application/json with an object, or multipart with one part per input",
        )
    return sole.name


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


def query_int(query: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of a query. Its digits are counted first: Python reads no number of thousands of them."""
    text = query.get(name, str(default))
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        raise BadValue(f"{name}: {text[:40]!r} is not a whole number from {least} to {most}", hint=f"leave it out for {default}")
    return int(text)


def encode_result(blob: encoding.Blob, accept: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Status, body, content type and header lines of a result. One without a form to send is the function's error, not the
    client's."""
    if VALUE in accept:
        return 200, bytes(blob), VALUE, b""
    try:
        value = encoding.decode(blob)
        if isinstance(value, bytes):
            return 200, value, encoding.sniff_type(value).encode(), b""
        if isinstance(value, encoding.Response):
            return response_parts(value)
        return 200, encoding.to_json(value), JSON, b""
    except BadValue as error:
        hint = f"return something else, or ask for {VALUE.decode()}; {error.hint}"
        raise FunctionFailed(f"its result: {error.message}", error="BadValue", hint=hint) from None


def large_body(blob: encoding.Blob, accept: bytes) -> tuple[memoryview, bytes] | None:
    """Body and content type of a result that is sent as it is, where it lies; None if it has to be encoded."""
    if VALUE in accept:
        return memoryview(blob), VALUE
    body = encoding.bytes_within(blob)
    return None if body is None else (body, encoding.sniff_type(bytes(body[:12])).encode())


OWN_ORIGIN = b"content-security-policy: sandbox allow-scripts; frame-ancestors 'none'\r\nreferrer-policy: no-referrer\r\n"
"""Headers of a response that a function has made: where a browser shows it as a page, it is one of an origin of its own. What it
runs cannot use the server as the user of the browser, and a policy of the function's own can only forbid more."""


def response_parts(response: encoding.Response) -> tuple[int, bytes, bytes, bytes]:
    """Status, body, content type and header lines of a function's own response."""
    body, kind = response.content()
    lines = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    empty = response.status in (204, 304)
    return response.status, b"" if empty else body, kind.encode("latin-1"), OWN_ORIGIN + lines.encode("latin-1")


def reply_headers(reply: Reply) -> bytes:
    return (
        f"lamina-call-id: {reply.call_id}\r\nlamina-latency-ms: {reply.latency_us / 1000:.3f}\r\n"
        f"lamina-queue-ms: {reply.queue_us / 1000:.3f}\r\nlamina-batch: {reply.batch}\r\nlamina-slice: {reply.slice}\r\n"
        f"lamina-cost: {reply.cost:.9f}\r\nlamina-cold-start-ms: {reply.cold_us / 1000:.1f}\r\n"
        f"lamina-retries: {reply.retries}\r\n" + (f"lamina-cache: {reply.cache}\r\n" if reply.cache else "")
    ).encode()


# ----------------------------------------------------------------- multipart forms

MAX_PARTS = 64
MAX_BOUNDARY = 70  #: RFC 2046
MAX_NAME, MAX_VALUE = 256, 4_096  #: of a part's header


FormField = str | bytes | msgspec.Raw
"""A field of a form: text, the content of a file, or JSON where its part says so."""

_LAX = {"integer": int, "number": float, "boolean": bool, "null": type(None)}
_WORDS = {"number": "a number", "integer": "a whole number", "boolean": "true or false"}
_SWITCHES = {"on": "true", "yes": "true", "off": "false", "no": "false"}
"""What check boxes of pages send."""
_LIST_MARK = "[]"
"""What axios, jQuery and PHP put behind the name of a field that is a list."""


def form_values(params: Sequence[Param], fields: Mapping[str, list[FormField]]) -> dict[str, Any]:
    """The values of a form. It has texts alone, so each is read as the annotation of its parameter wants it; several fields of
    one name are a list. Where fields of an object are given, and no parameter, they are those of the one that takes objects."""
    sole, names = sole_param(params), {name.removesuffix(_LIST_MARK) for name in fields}
    if fields and sole is not None and names.isdisjoint(param.name for param in params):
        inner = property_schemas(sole.schema)
        if inner:
            properties = [Param(name, required, schema=schema) for name, (schema, required) in inner.items()]
            return {sole.name: _values_by_name(properties, fields)}
    return _values_by_name(params, fields)


def _values_by_name(params: Sequence[Param], fields: Mapping[str, list[FormField]]) -> dict[str, Any]:
    known = {param.name: param for param in params}
    found: dict[str, Any] = {}
    for field, given in fields.items():
        short = field.removesuffix(_LIST_MARK)
        is_list = field not in known and short in known
        name = short if is_list else field
        if name not in known:
            found[name] = given[0]
        elif not _is_untouched(known[name], given):
            found[name] = _form_value(known[name], given, is_list)
    return found


def _is_untouched(param: Param, given: list[FormField]) -> bool:
    """Whether a page has sent an empty input for a parameter that may be left out and cannot be an empty text."""
    return given == [""] and not param.required and bool(json_types(param.schema)) and not takes_any_text(param.schema)


def _form_value(param: Param, given: list[FormField], is_list: bool) -> Any:
    kinds = json_types(param.schema)
    if is_list or len(given) > 1 or ("array" in kinds and not (isinstance(given[0], str) and given[0].lstrip()[:1] == "[")):
        if kinds and "array" not in kinds:
            raise BadValue(f"{param.name!r}: given twice", hint="send one field of that name")
        inner = item_schema(param.schema)
        return [_field_value(param.name, inner, field) for field in given]
    return _field_value(param.name, param.schema, given[0])


def _field_value(name: str, schema: dict[str, Any], field: FormField) -> Any:
    if isinstance(field, msgspec.Raw):
        return encoding.from_json(bytes(field))
    if isinstance(field, bytes):
        return field
    if is_base64(schema):
        return field.encode()
    kinds = json_types(schema)
    if kinds & {"object", "array"}:
        return encoding.from_json(field.encode()) if "string" not in kinds else field
    wanted: list[type] = [_LAX[kind] for kind in _LAX if kind in kinds]
    if not wanted or (wanted == [type(None)] and field):
        return field
    if "string" in kinds:
        wanted.append(str)
    try:
        read = _SWITCHES.get(field.lower(), field) if "boolean" in kinds and "string" not in kinds else field
        return msgspec.convert(read, reduce(or_, wanted), strict=False)
    except msgspec.ValidationError:
        words = " or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds)
        raise BadValue(f"{name}: must be {words}, not {field[:80]!r}", hint=f"send {words} in this field") from None


def parse_multipart(options: bytes, body: bytes) -> dict[str, list[FormField]]:
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
        self.parts: dict[str, list[FormField]] = {}
        self._count = 0
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value, self._body = bytearray(), bytearray(), bytearray()

    def begin(self) -> None:
        self._headers.clear()
        self._body.clear()
        self._count += 1
        if self._count > MAX_PARTS:
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
        kind = self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        content: FormField = bytes(self._body)
        if kind == JSON and b"filename" not in about:
            content = msgspec.Raw(content)
        elif b"filename" not in about and kind in (b"", b"text/plain"):
            with contextlib.suppress(UnicodeDecodeError):
                content = self._body.decode()
        self.parts.setdefault(key, []).append(content)


def _add(header: bytearray, piece: bytes, limit: int) -> None:
    if len(header) + len(piece) > limit:
        raise BadValue("body: part header too large")
    header += piece
