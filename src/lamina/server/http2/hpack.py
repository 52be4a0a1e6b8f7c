"""HPACK header compression (RFC 7541). All of it is read, under bounds; we write literals only, and index nothing.

Of the Huffman code (appendix B) there is only the decoder: what we send is plain. The code is canonical: its lengths are all
there is to know of it. `_CODE_LENGTHS` has them as characters, one per byte value and one for the end, counted from "<".
"""

from __future__ import annotations

from collections import deque
from functools import cache

Headers = list[tuple[bytes, bytes]]

TABLE_BYTES = 4_096
_OVERHEAD = 32
_CACHED = 64

_STATIC: Headers = [
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", status) for status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *(
        (name, b"")
        for name in (
            b"accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
            b"content-disposition content-encoding content-language content-length content-location content-range content-type "
            b"cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since "
            b"last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh retry-after "
            b"server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate"
        ).split()
    ),
]


class HpackError(Exception):
    """A header block that cannot be decoded: after it nothing on the connection can be understood."""


class HpackDecoder:
    """Decoder of one connection. A block that changes no table decodes the same when it comes again, so it is cached."""

    def __init__(self, max_bytes: int, max_headers: int, own_prefix: bytes = b"") -> None:
        """`own_prefix` is that of the service's own headers, if it has any."""
        self._max_bytes = max_bytes
        self._max_headers = max_headers
        self._own_prefix = own_prefix
        self._table: deque[tuple[bytes, bytes]] = deque()
        self._size = 0
        self._limit = TABLE_BYTES
        self._cached: dict[bytes, Headers] = {}
        self.has_own_headers = False  #: a name that begins as ours do has come at some time

    def remembers(self, block: bytes) -> bool:
        """Whether a block needs no decoding."""
        return block in self._cached

    def decode(self, block: bytes) -> Headers | None:
        """The headers; None: more than a request may have (the table is updated all the same)."""
        known = self._cached.get(block)
        if known is not None:
            return known
        try:
            headers, has_taught = self._decode(block)
        except (IndexError, ValueError) as error:
            raise HpackError(str(error)) from None
        if has_taught:
            self._cached.clear()
        elif headers is not None and len(self._cached) < _CACHED:
            self._cached[block] = headers
        return headers

    def _decode(self, block: bytes) -> tuple[Headers | None, bool]:
        headers: Headers = []
        total = at = resizes = 0
        has_taught = False
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                pair = self._at(index)
            elif first & 0xE0 == 0x20:
                size, at = _integer(block, at, 5)
                resizes += 1
                if size > TABLE_BYTES or headers or resizes > 2:
                    raise ValueError("table size")
                self._limit = size
                self._shrink()
                has_taught = True
                continue
            else:
                teaches = first & 0xC0 == 0x40
                index, at = _integer(block, at, 6 if teaches else 4)
                name, at = self._name(block, at) if not index else (self._at(index)[0], at)
                value, at = _text(block, at)
                pair = (name, value)
                if teaches:
                    has_taught = True
                    self._add(pair)
            total += len(pair[0]) + len(pair[1]) + _OVERHEAD
            headers.append(pair)
            if len(headers) > 4 * self._max_headers:
                raise ValueError("too many headers")
        return (headers if total <= self._max_bytes and len(headers) <= self._max_headers else None), has_taught

    def _name(self, block: bytes, at: int) -> tuple[bytes, int]:
        """A literal name, which each name is at least once."""
        name, at = _text(block, at)
        if self._own_prefix and name.startswith(self._own_prefix):
            self.has_own_headers = True
        return name, at

    def _at(self, index: int) -> tuple[bytes, bytes]:
        if not index:
            raise ValueError("index 0")
        return _STATIC[index - 1] if index <= len(_STATIC) else self._table[index - len(_STATIC) - 1]

    def _add(self, pair: tuple[bytes, bytes]) -> None:
        self._table.appendleft(pair)
        self._size += len(pair[0]) + len(pair[1]) + _OVERHEAD
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _OVERHEAD


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    number = block[at] & most
    at += 1
    if number < most:
        return number, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 21:
            raise ValueError("a number too large")


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffed = block[at] & 0x80
    size, at = _integer(block, at, 7)
    if at + size > len(block):
        raise ValueError("it ends too soon")
    raw = block[at : at + size]
    return (huffman_decode(raw) if is_huffed else raw), at + size


def encode(headers: Headers) -> bytes:
    """Encode as literals without indexing; status 200 has a byte of its own."""
    out = bytearray()
    for name, value in headers:
        if (name, value) == (b":status", b"200"):
            out.append(0x88)
        else:
            out += b"\x00" + _length(name) + name + _length(value) + value
    return bytes(out)


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes([size])
    out = bytearray([0x7F])
    size -= 0x7F
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


# ----------------------------------------------------------------- Huffman code

_CODE_LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBB"
    "BABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVV"
    "XWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_END_SYMBOL = 256


Transition = tuple[int, bytes]
"""Next state and decoded symbols; a state is the bits that are left over, behind a 1."""

_INVALID: Transition = (0, b"")


@cache
def _codes() -> dict[int, int]:
    """Symbols by their codes, each behind a 1, so that leading zeros count."""
    lengths = [ord(letter) - ord("<") for letter in _CODE_LENGTHS]
    found: dict[int, int] = {}
    code = last = 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - last
        last = lengths[symbol]
        found[1 << last | code] = symbol
        code += 1
    return found


class _Transitions(dict[int, Transition]):
    """Transitions of the decoder by state and byte, made when they are first needed: 256 states of 256 bytes at most."""

    def __missing__(self, key: int) -> Transition:
        state, byte, codes, out = key >> 8, key & 0xFF, _codes(), bytearray()
        for bit in range(7, -1, -1):
            state = state << 1 | byte >> bit & 1
            symbol = codes.get(state)
            if symbol is not None:
                if symbol == _END_SYMBOL:
                    made = self[key] = _INVALID
                    return made
                out.append(symbol)
                state = 1
        made = self[key] = (state, bytes(out))
        return made


_transitions = _Transitions()


def huffman_decode(data: bytes) -> bytes:
    """Decode; raises ValueError for an invalid code, an end symbol inside, or wrong padding."""
    transitions, out, state = _transitions, [], 1
    for byte in data:
        state, symbols = transitions[state << 8 | byte]
        if not state:
            raise ValueError("the end inside a Huffman code")
        out.append(symbols)
    if state & (state + 1) or state > 0xFF:  # what is left must be up to seven ones
        raise ValueError("not a Huffman code")
    return b"".join(out)
