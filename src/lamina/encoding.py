"""Encoding of values between clients, workflow steps and workers: JSON types, bytes, tensors, and HTTP responses.

Nothing else, and no pickle anywhere: a value is msgpack, a tensor in it is dtype, shape and bytes. numpy is imported
only when a tensor is met. Responses are made by functions, never by clients: what comes from outside has none.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lamina.errors import BadValue

Blob = bytes | memoryview
"""An encoded value."""

TENSOR = 1
RESPONSE = 2
DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, widths in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}.items()
    for bits in widths
) | {"bool"}
MAX_DEPTH = 64
MAX_RANK = 32
MAX_EMPTY = 2**20
"""Rows an array without elements may have: they cost nothing here and a list each as JSON."""

_NO_NUMBERS = re.compile(rb"[\[:,]\s*-?(NaN|Infinity)\b")
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TOO_DEEP = f"body: nested deeper than {MAX_DEPTH}"
_UNFIT = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_USE = "use JSON types, bytes, numpy arrays, or lists and dicts of them"


_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]{0,4096}")
_SERVER_HEADERS = frozenset(
    ("connection", "content-length", "content-type", "date", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Headers of how a response is sent, which the server alone decides; the content type has a place of its own."""

_SHOWN = frozenset(f"text/{kind}" for kind in ("plain", "html", "css", "javascript", "xml", "markdown"))
"""Types that a browser shows, and takes for something older than UTF-8 unless it is told."""

MAX_HEADERS = 32


class Response(BaseException):
    """An HTTP response of a function's own: return it, or raise it to end the call with it.

    `body` is bytes or text as they are, or any other value as JSON. A raised one is a failure like another: nothing that the call
    changed is kept, a workflow may catch it by its name, and below 500 it counts as the client's mistake. It is no `Exception`:
    `except Exception` around it is not meant for it.
    """

    def __init__(
        self, body: Any = b"", *, status: int = 200, headers: Mapping[str, str] | None = None, content_type: str = ""
    ) -> None:
        if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:
            raise ValueError(f"status: {status!r} is no status of a response; write a whole number from 200 to 599")
        if not _HEADER_VALUE.fullmatch(content_type):
            raise ValueError(f"content_type: {content_type[:80]!r} cannot be sent; write one such as 'image/png'")
        self.headers = {str(name).lower(): str(value) for name, value in (headers or {}).items()}
        for name, value in self.headers.items():
            if name in _SERVER_HEADERS or not _TOKEN.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(
                    f"headers: {name[:80]!r}: {value[:80]!r} cannot be sent; write one line of printable characters, leave "
                    "framing to the server, and give the type with content_type="
                )
        if len(self.headers) > MAX_HEADERS:
            raise ValueError(f"headers: {len(self.headers)} of them; at most {MAX_HEADERS} can be sent")
        super().__init__(f"{status}")
        self.body = body
        self.status = status
        self.content_type = content_type

    def __str__(self) -> str:
        return f"{self.status}: {self.body[:200]}" if isinstance(self.body, str) and self.body else f"{self.status}"

    def __repr__(self) -> str:
        return f"<response {self.status} {self.content_type}>".replace(" >", ">")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Response) and self._parts() == other._parts()

    __hash__ = BaseException.__hash__

    def _parts(self) -> tuple[Any, ...]:
        return self.status, self.content_type, self.headers, self.body

    @classmethod
    def file(cls, path: str | os.PathLike[str], *, content_type: str = "", download: bool = False) -> Response:
        """The content of a file, with the content type of its name. With `download`, a browser saves it under that name."""
        import mimetypes

        name = os.path.basename(os.fspath(path))
        with open(path, "rb") as file:
            body = file.read()
        kind = content_type or mimetypes.guess_type(name)[0] or ""
        shown = re.sub(r"[^A-Za-z0-9._ -]", "_", name)
        return cls(
            body, content_type=kind, headers={"content-disposition": f'attachment; filename="{shown}"'} if download else {}
        )

    def content(self) -> tuple[bytes, str]:
        """Body and content type as they are sent."""
        if isinstance(self.body, bytes):
            return self.body, self.content_type or sniff_type(self.body)
        if isinstance(self.body, str):
            kind = self.content_type or "text/plain"
            return self.body.encode(errors="replace"), f"{kind}; charset=utf-8" if kind in _SHOWN else kind
        return to_json(self.body), self.content_type or "application/json"


class RaisedResponse(Exception):
    """A response that was raised, as the outcome of a call."""

    def __init__(self, response: Response) -> None:
        super().__init__(str(response))
        self.response = response


_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def sniff_type(body: bytes) -> str:
    """Content type of bytes: of pictures, sounds and PDF by how they begin. Nothing that a browser would run is among them."""
    head = body[:12]
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "application/octet-stream")
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "application/octet-stream")


def encode(value: Any) -> bytes:
    """Encode a value; an object of another type is refused by name."""
    try:
        return _encoder.encode(value)
    except _UNFIT as error:
        if "serialize ints" in str(error):
            raise BadValue("cannot send a whole number below -2**63 or from 2**64 on", hint="send it as text") from None
        raise BadValue(f"cannot send a value of this kind: {error}", hint=_USE) from None


def decode(blob: Blob) -> Any:
    try:
        return _decoder.decode(blob)
    except _UNFIT as error:
        raise BadValue(f"not a value: {error}") from None


def decode_input(blob: Blob) -> Any:
    """Decode a value of a client: it makes no responses."""
    try:
        return _input_decoder.decode(blob)
    except _UNFIT as error:
        raise BadValue(f"not a value: {error}") from None


def input_entries(blob: Blob) -> dict[str, Blob] | None:
    """Values of an encoded dict of a client by name, each encoded: large bytes are not copied. None if it is no such dict."""
    try:
        raw = _entries_decoder.decode(blob)
    except _UNFIT:
        return None
    found = {name: memoryview(value) for name, value in raw.items()}
    return {name: one if bytes_within(one) is not None else encode(decode_input(one)) for name, one in found.items()}


MAX_LOOKED_INTO = 2**17
"""Parts of values that are decoded where others wait meanwhile: twenty milliseconds at worst."""


def looked_into(blob: Blob, left: int = MAX_LOOKED_INTO) -> int:
    """What is left of so many parts when this value is decoded; raises `BadValue` for one with more of them. Texts, bytes and
    tensors are one part each, however large."""
    count = len(blob) if len(blob) <= left else count_parts(blob, left)
    if count > left:
        raise BadValue(
            f"a value of {len(blob)} bytes has too many parts to be looked into here",
            hint=f"at most {MAX_LOOKED_INTO}: let a function do it, or use arrays",
        )
    return left - count


def count_parts(blob: Blob, most: int) -> int:
    """Values in an encoded value, itself included; no further than one more than `most`."""
    view, at, left, count = memoryview(blob), 0, 1, 0
    try:
        while left and count <= most:
            first = view[at]
            count, left = count + 1, left - 1
            if size := _SIZES[first]:
                at += size
            else:
                at, inside = _open_part(view, at, first)
                left += inside
    except IndexError:  # it is none: who decodes it says so
        pass
    return count


def _open_part(view: memoryview, at: int, first: int) -> tuple[int, int]:
    """Where the next value begins, and how many there are within this one."""
    if first < 0xA0:  # a short map or list
        return at + 1, 2 * (first & 15) if first < 0x90 else first & 15
    if first not in _LENGTHS:
        return len(view), 0
    width, kind = _LENGTHS[first]
    size, at = int.from_bytes(view[at + 1 : at + 1 + width], "big"), at + 1 + width
    if kind == "ext":
        return (at + 1, 1) if view[at] == RESPONSE else (at + 1 + size, 0)
    return (at + size, 0) if kind == "bytes" else (at, size * (2 if kind == "map" else 1))


_SIZES = [1] * 128 + [0] * 32 + [1 + size for size in range(32)] + [1, 0, 1, 1] + [0] * 6
_SIZES += [5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18] + [0] * 7 + [1] * 32  #: by first byte, of what says it there
_LENGTHS = {
    0xC4: (1, "bytes"),
    0xC5: (2, "bytes"),
    0xC6: (4, "bytes"),
    0xD9: (1, "bytes"),
    0xDA: (2, "bytes"),
    0xDB: (4, "bytes"),
}
_LENGTHS |= {0xC7: (1, "ext"), 0xC8: (2, "ext"), 0xC9: (4, "ext"), 0xDC: (2, "list"), 0xDD: (4, "list")}
_LENGTHS |= {0xDE: (2, "map"), 0xDF: (4, "map")}  #: width of the length that follows, and of what it is


def as_encoded(blob: Blob) -> msgspec.Raw:
    """An encoded value as part of another, which is not decoded for it. Raises `BadValue` if it is none."""
    try:
        return msgspec.msgpack.decode(blob, type=msgspec.Raw)
    except _UNFIT as error:
        raise BadValue(f"not a value: {error}") from None


def list_length(blob: Blob) -> int:
    """Length of an encoded list, as it says; 0 if it is none."""
    first = blob[0] if len(blob) else 0
    if 0x90 <= first < 0xA0:
        return first & 15
    width, kind = _LENGTHS.get(first, (0, ""))
    return int.from_bytes(bytes(blob[1 : 1 + width]), "big") if kind == "list" else 0


def list_items(blob: Blob) -> list[bytes]:
    """Elements of an encoded list, each still encoded: a fan-out need not decode what it hands out."""
    return list(map(bytes, list_parts(blob)[1]))


def list_parts(blob: Blob) -> tuple[int, list[msgspec.Raw]]:
    """Elements of an encoded list where they are, one behind the other; and where the first begins."""
    try:
        found = _list_decoder.decode(blob)
    except _UNFIT:
        raise BadValue("each needs a list to go over", hint="return a list from the step before it") from None
    return 1 + _LENGTHS.get(blob[0], (0, ""))[0], found


def join_list(blobs: list[Blob]) -> bytes:
    """An encoded list from encoded elements."""
    return _encoder.encode([msgspec.Raw(blob) for blob in blobs])


def _enc_hook(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "numpy":
        if (hasattr(value, "shape") and value.shape != ()) or type(value).__name__ == "ndarray":
            dtype = value.dtype.name  # the same for both byte orders; ours is little
            if dtype not in DTYPES or hasattr(value, "mask"):
                raise TypeError(f"{type(value).__name__} of dtype {dtype} (.tolist() makes a list of it)")
            head = msgspec.msgpack.encode((dtype, list(value.shape)))
            data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
            return msgspec.msgpack.Ext(TENSOR, len(head).to_bytes(2, "little") + head + data)
        return _python_scalar(value)
    return _response_ext(value) if isinstance(value, Response) else _in_plain_types(value)


def _response_ext(response: Response) -> msgspec.msgpack.Ext:
    parts = [response.status, response.content_type, response.headers, msgspec.Raw(encode(response.body))]
    return msgspec.msgpack.Ext(RESPONSE, _encoder.encode(parts))


def _in_plain_types(value: Any) -> Any:
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    if hasattr(value, "model_dump"):  # pydantic's models; dataclasses need no help
        return _dumped(value)
    if type(value).__module__.partition(".")[0] in (
        "pydantic",
        "ipaddress",
        "pathlib",
    ):  # addresses; secrets, which hide themselves
        return str(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    way = next((way for known, way in _WAYS.items() if name.startswith(known)), "")
    raise TypeError(f"{name} ({way})" if way else name)


_WAYS = {
    "torch.Tensor": ".numpy(force=True) makes an array of it",
    "PIL.": 'save it into an io.BytesIO, and return that as lamina.Response(file.getvalue(), content_type="image/png")',
    "pandas.core.frame.DataFrame": '.to_dict("records") makes a list of it',
    "pandas.core.series.Series": ".to_list() makes a list of it",
    "builtins.generator": "a function that streams yields by itself: yield from it",
    "builtins.complex": "[value.real, value.imag] is a list of its parts",
    **dict.fromkeys(
        (
            *(f"builtins.{name}" for name in ("range", "map", "filter", "zip", "enumerate", "reversed", "dict_")),
            "collections.deque",
        ),
        "list(...) makes a list of it",
    ),
}
"""What to return instead of what newcomers return first, by how the names of the classes begin."""


def _dumped(model: Any) -> Any:
    """A model as pydantic sends it: by its aliases, and what JSON has no word for as its own rules say. Where those have no
    answer (arrays, bytes that are no text) it goes out as its Python values."""
    if not hasattr(model, "__pydantic_serializer__"):
        return model.model_dump()
    try:
        return model.model_dump(mode="json", by_alias=True)
    except ValueError:  # the family of pydantic's errors, and that of UnicodeDecodeError
        return model.model_dump(by_alias=True)


def _python_scalar(scalar: Any) -> Any:
    """A numpy scalar as Python's own; some are wider than anything Python has."""
    value = scalar.item()
    if type(value) is type(scalar):
        raise TypeError(f"numpy.{type(scalar).__name__}")
    return value


def _ext_hook(code: int, data: memoryview) -> Any:
    if code == RESPONSE:
        status, kind, headers, body = _response_decoder.decode(data)
        return Response(decode(memoryview(body)), status=status, headers=headers, content_type=kind)
    return _tensor_hook(code, data)


def _tensor_hook(code: int, data: memoryview) -> Any:
    if code != TENSOR:
        raise ValueError(f"unknown extension {code}")
    import numpy

    size = int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[str, list[int]])
    if dtype not in DTYPES or len(shape) > MAX_RANK or any(n < 0 for n in shape):
        raise ValueError(f"tensor of {dtype} with shape {shape}")
    kind = numpy.dtype(dtype).newbyteorder("<")
    body = data[2 + size :]
    if math.prod(shape) * kind.itemsize != len(body):
        raise ValueError(f"tensor of {dtype} with shape {shape} in {len(body)} bytes")
    if 0 in shape and math.prod(shape[: shape.index(0)]) > MAX_EMPTY:
        raise ValueError(f"tensor of {dtype} with shape {shape}, which holds nothing")
    return numpy.frombuffer(body, dtype=kind).reshape(shape)


def encode_tensor(dtype: str, shape: Sequence[int], data: Blob) -> bytes:
    """Encode a tensor from its bytes as they are, little-endian: what passes through need not become an array."""
    return b"".join(tensor_in_parts(dtype, shape, data))


def tensor_in_parts(dtype: str, shape: Sequence[int], data: Blob) -> tuple[Blob, ...]:
    """The same in parts: a large tensor is not copied."""
    head = msgspec.msgpack.encode((dtype, shape))
    parts = (len(head).to_bytes(2, "little"), head, data)
    size = 2 + len(head) + len(data)
    if size >= 2**16:  # an extension with a size of four bytes
        return b"\xc9" + size.to_bytes(4, "big") + bytes((TENSOR,)), *parts
    return (_encoder.encode(msgspec.msgpack.Ext(TENSOR, b"".join(parts))),)


def encode_parts(value: Any) -> tuple[Blob, ...]:
    """Encode a value in parts that need not be put together yet: large bytes are not copied."""
    if type(value) is bytes and len(value) >= 2**16:
        return b"\xc6" + len(value).to_bytes(4, "big"), value
    return (encode(value),)


def bytes_within(blob: Blob) -> memoryview | None:
    """The bytes that large encoded bytes are of, where they are; None if it is another value."""
    view = memoryview(blob)
    if len(view) < 5 or view[0] != 0xC6 or int.from_bytes(view[1:5], "big") != len(view) - 5:
        return None
    return view[5:]


def is_flat_response(blob: Blob) -> bool:
    """Whether an encoded value is a response whose body is bytes or text: to send it takes no work."""
    if not len(blob) or blob[0] not in _EXTENSIONS:
        return False
    found = _ext_decoder.decode(blob)
    if found.code != RESPONSE:
        return False
    try:
        first = memoryview(_response_decoder.decode(found.data)[3])[0]
    except msgspec.MsgspecError:
        return False
    return first in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB) or 0xA0 <= first < 0xC0


def response_status(blob: Blob) -> int:
    """Status of an encoded response; 0 if the value is none."""
    if not len(blob) or blob[0] not in _EXTENSIONS:
        return 0
    found = _ext_decoder.decode(blob)
    if found.code != RESPONSE:
        return 0
    try:
        return _response_decoder.decode(found.data)[0]
    except msgspec.MsgspecError:  # of a function that does not keep to the rules
        return 500


def tensor_parts(blob: Blob, *, in_place: bool = False) -> tuple[str, list[int], memoryview] | None:
    """Dtype, shape and bytes of an encoded tensor; None if it is another value. `in_place`: the bytes of a large one are not
    copied, and change or go with `blob`."""
    if not len(blob) or blob[0] not in _EXTENSIONS:
        return None
    data = _ext_data(blob) if in_place else None
    if data is None:
        found = _ext_decoder.decode(blob)
        if found.code != TENSOR:
            return None
        data = memoryview(found.data)
    size = int.from_bytes(data[:2], "little")
    dtype, shape = _head_decoder.decode(data[2 : 2 + size])
    return dtype, shape, data[2 + size :]


def _ext_data(blob: Blob) -> memoryview | None:
    """The data of a large tensor, where it is; None if it is none, or has to be looked at more closely."""
    if blob[0] != 0xC9 or len(blob) < 6 or blob[5] != TENSOR or int.from_bytes(blob[1:5], "big") != len(blob) - 6:
        return None
    return memoryview(blob)[6:]


_EXTENSIONS = frozenset((0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))  #: how they begin
_head_decoder = msgspec.msgpack.Decoder(tuple[str, list[int]])
_ext_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoder = msgspec.msgpack.Decoder(ext_hook=_ext_hook)
_input_decoder = msgspec.msgpack.Decoder(ext_hook=_tensor_hook)
_response_decoder = msgspec.msgpack.Decoder(tuple[int, str, Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)], msgspec.Raw])
_entries_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


# --------------------------------------------------------------- JSON at the edge


def to_json(value: Any) -> bytes:
    """JSON form of a value: tensors become nested lists, bytes inside a structure base64; NaN and infinities become null."""
    try:
        return _json_encoder.encode(value)
    except _UNFIT as error:
        raise BadValue(f"no JSON form: {error}", hint=_USE) from None


def from_json(text: bytes, field: str = "body") -> Any:
    """Decode any JSON value, which is that of a `field`; depth is bounded, and numbers JSON does not have are refused."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise BadValue(_TOO_DEEP, hint="flatten the value") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadValue(f"{field}: not JSON: {error}", hint=_json_hint(text)) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deeper_than(text, MAX_DEPTH):
        raise BadValue(_TOO_DEEP, hint="flatten the value")
    return value


def _json_hint(text: bytes) -> str:
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "this is UTF-16: send one JSON value, in UTF-8"
    return "send one JSON value, in UTF-8" + ("; JSON has no NaN and no Infinity: null" if _NO_NUMBERS.search(text) else "")


def _is_deeper_than(text: bytes, limit: int) -> bool:
    """Nesting depth check of valid JSON: keep the brackets alone, then remove innermost pairs level by level: all in C."""
    brackets = _STRINGS.sub(b"", text).translate(None, delete=_NOT_BRACKETS)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    return True


def _json_hook(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "numpy":
        return value.tolist() if value.shape else _python_scalar(value)
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode()
    return _in_plain_types(value)


_json_encoder = msgspec.json.Encoder(enc_hook=_json_hook)


# ------------------------------------------------------------------ text for terminals

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def escape_controls(text: str) -> str:
    """Text of users for a terminal or a log: control characters but tabs and ends of lines are shown, not obeyed."""
    return text if text.isprintable() else text.translate(_CONTROLS)
