"""HPACK's Huffman code (RFC 7541, appendix B), for decoding only: what we send is plain.

The code is canonical: its lengths are all there is to know of it. `_LENGTHS` has them as characters, one per byte value and one
for the end, counted from "<".
"""

from __future__ import annotations

from functools import cache

_LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBB"
    "BABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVV"
    "XWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_END = 256


@cache
def _codes() -> dict[tuple[int, int], int]:
    """Symbols by length and code."""
    lengths = [ord(letter) - ord("<") for letter in _LENGTHS]
    found: dict[tuple[int, int], int] = {}
    code = last = 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - last
        last = lengths[symbol]
        found[last, code] = symbol
        code += 1
    return found


@cache
def _short() -> list[tuple[int, int]]:
    """Symbol and length for every eight bits that begin with a code of at most eight; length 0 for a longer one."""
    table = [(0, 0)] * 256
    for (length, code), symbol in _codes().items():
        if length <= 8:
            first = code << (8 - length)
            table[first : first + (1 << (8 - length))] = [(symbol, length)] * (1 << (8 - length))
    return table


def decode(data: bytes) -> bytes:
    """Decode; raises ValueError for an invalid code, an end symbol inside, or wrong padding."""
    short, codes = _short(), _codes()
    out = bytearray()
    held = count = 0  #: bits that are not decoded yet, and how many
    for byte in data:
        held = held << 8 | byte
        count += 8
        while count >= 8:
            symbol, length = short[held >> (count - 8)]
            if not length:
                length = next((size for size in range(10, min(count, 30) + 1) if (size, held >> (count - size)) in codes), 0)
                if not length:
                    break  # more of it must follow
                symbol = codes[length, held >> (count - length)]
            if symbol == _END:
                raise ValueError("the end inside a Huffman code")
            out.append(symbol)
            count -= length
            held &= (1 << count) - 1
        if count > 40:
            raise ValueError("not a Huffman code")
    while 0 < count < 8:
        symbol, length = short[held << (8 - count) | 0xFF >> count]
        if not length or length > count:
            break
        out.append(symbol)
        count -= length
        held &= (1 << count) - 1
    if count > 7 or held != (1 << count) - 1:
        raise ValueError("not a Huffman code")
    return bytes(out)
