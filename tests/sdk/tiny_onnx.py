"""Tiny ONNX models, encoded by hand: ONNX is protobuf, and a graph of one or two nodes needs ten fields of it."""

from __future__ import annotations

FLOAT = 1


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw


def _tensor_info(name: str) -> bytes:
    shape = _bytes(1, _bytes(2, "n"))  # one dimension of any length
    return _bytes(1, name) + _bytes(2, _bytes(1, _int(1, FLOAT) + _bytes(2, shape)))


def model(nodes: list[tuple[str, list[str], str]], inputs: list[str], outputs: list[str]) -> bytes:
    """`nodes` are (operator, inputs, output)."""
    graph = b""
    for operator, sources, target in nodes:
        graph += _bytes(1, b"".join(_bytes(1, source) for source in sources) + _bytes(2, target) + _bytes(4, operator))
    graph += _bytes(2, "tiny")
    graph += b"".join(_bytes(11, _tensor_info(name)) for name in inputs)
    graph += b"".join(_bytes(12, _tensor_info(name)) for name in outputs)
    return _int(1, 8) + _bytes(7, graph) + _bytes(8, _int(2, 13))


Shapes = dict[str, list[int | str]]


def shaped(nodes: list[tuple[str, list[str], str]], inputs: Shapes, outputs: Shapes) -> bytes:
    """The same with shapes: a length is a number, or a name for one that is not known."""

    def info(name: str, lengths: list[int | str]) -> bytes:
        shape = b"".join(_bytes(1, _int(1, one) if isinstance(one, int) else _bytes(2, one)) for one in lengths)
        return _bytes(1, name) + _bytes(2, _bytes(1, _int(1, FLOAT) + _bytes(2, shape)))

    graph = b""
    for operator, sources, target in nodes:
        graph += _bytes(1, b"".join(_bytes(1, source) for source in sources) + _bytes(2, target) + _bytes(4, operator))
    graph += _bytes(2, "shaped")
    graph += b"".join(_bytes(11, info(name, shape)) for name, shape in inputs.items())
    graph += b"".join(_bytes(12, info(name, shape)) for name, shape in outputs.items())
    return _int(1, 8) + _bytes(7, graph) + _bytes(8, _int(2, 13))
