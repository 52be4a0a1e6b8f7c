"""Parser of multipart forms: fields as text, files as bytes. Boundary, number of parts and headers are bounded while reading."""

from __future__ import annotations

from typing import Any

from lamina.errors import BadValue, LaminaError

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
