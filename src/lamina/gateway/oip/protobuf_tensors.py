"""Tensors in protobuf: inputs typed or raw, outputs always raw, which is what every client reads."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

from lamina.errors import BadValue
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, RawBytes, join_bytes

_TYPED = {
    "BOOL": ("bool_contents", "B"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
"""By dtype, the field that holds it and the width of its elements. FP16 and BF16 have none: they come raw."""


def decode_tensors(message: Any) -> list[InputTensor]:
    """Input tensors of a message, each raw."""
    raw = message.raw_input_contents
    inputs = message.inputs
    if raw and len(raw) != len(inputs):
        raise BadValue(f"raw_input_contents: {len(raw)} where there are {len(inputs)} inputs", hint="all of them raw, or none")
    found = []
    for place, one in enumerate(inputs):
        if raw:
            if one.HasField("contents"):
                raise BadValue(f"{one.name[:80]}: contents beside raw_input_contents")
            data: RawBytes = raw[place]
        else:
            data = _typed(one)
        found.append(InputTensor(one.name, one.datatype, list(one.shape), data))
    return found


def _typed(one: Any) -> bytes:
    field, code = _TYPED.get(one.datatype, ("", ""))
    if not field:
        raise BadValue(f"{one.name[:80]}: {one.datatype[:20]!r} has no typed contents", hint="send it in raw_input_contents")
    others = [used.name for used, _ in one.contents.ListFields() if used.name != field]
    if others:
        raise BadValue(f"{one.name[:80]}: {others[0]} where {one.datatype} goes into {field}")
    elements = getattr(one.contents, field)
    if not code:
        return join_bytes(elements)
    try:
        packed = array(code, elements)
    except OverflowError as error:
        raise BadValue(f"{one.name[:80]}: its contents are not {one.datatype}: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def add_outputs(response: Any, outputs: list[OutputTensor]) -> None:
    """Add output tensors to a message."""
    for output in outputs:
        response.outputs.add(name=output.name, datatype=output.dtype, shape=output.shape)
        response.raw_output_contents.append(bytes(output.data))


def decode_parameters(message: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a message as plain values."""
    found = {}
    for name, parameter in message.items():
        choice = parameter.WhichOneof("parameter_choice")
        found[name] = getattr(parameter, choice) if choice else None
    return found
