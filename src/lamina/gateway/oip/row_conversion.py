"""Conversion between tensors and rows: a request's tensors to the inputs of calls, one per row, and their results to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina import encoding
from lamina.errors import BadValue
from lamina.gateway.oip.model_catalog import ServedModel, port_dtype
from lamina.gateway.oip.tensors import (
    InputTensor,
    OutputTensor,
    RawBytes,
    flatten,
    fp32_to_bf16,
    join_bytes,
    row_values,
    split_bytes,
)
from lamina.sdk.tensors import NUMPY, Port


class InvalidOutput(Exception):
    """A function's result does not fit its signature: its fault, not the client's."""


def split_rows(model: ServedModel, inputs: Sequence[InputTensor], rows: int) -> list[dict[str, bytes]]:
    """The named inputs of each call. `rows` is 0 for a model without a batch axis."""
    calls: list[dict[str, bytes]] = [{} for _ in range(rows or 1)]
    for given in inputs:
        if model.ports[given.name].tensor is None:
            texts = split_bytes(given.data, len(calls), given.name)
            if len(texts) != len(calls):
                raise BadValue(f"{given.name}: {len(texts)} elements where {len(calls)} fit its shape")
            encoded = [encoding.encode(encoding.from_json(text)) for text in texts]
        else:
            encoded = row_values(given, rows if model.is_batched else 0)
        for call, value in zip(calls, encoded, strict=True):
            call[given.name] = value
    return calls


def join_rows(model: ServedModel, blobs: Sequence[encoding.Blob], wanted: Sequence[str] = ()) -> list[OutputTensor]:
    """The results of the calls, in order of rows, as tensors."""
    ports = model.signature.outputs
    if len(ports) == 1:
        passed = _pass_through(model, ports[0], blobs)
        if passed is not None:
            return [passed]
    results = [_by_name(encoding.decode(blob), ports) for blob in blobs]
    chosen = [port for port in ports if not wanted or port.name in wanted]
    return [_joined(model, port, [result[port.name] for result in results]) for port in chosen]


def _pass_through(model: ServedModel, port: Port, blobs: Sequence[encoding.Blob]) -> OutputTensor | None:
    """Tensors of exactly the promised dtype go out without conversion."""
    dtype = port_dtype(port)
    if dtype in ("BYTES", "BF16"):
        return None
    found = []
    for blob in blobs:
        tensor = encoding.tensor_parts(blob)
        if tensor is None or tensor[0] != NUMPY[dtype]:
            return None
        found.append(tensor)
    shape = found[0][1]
    if any(other[1] != shape for other in found):
        raise InvalidOutput(f"{port.name}: rows of different shapes")
    data: RawBytes = found[0][2] if len(found) == 1 else b"".join([tensor[2] for tensor in found])
    return OutputTensor(port.name, dtype, [len(blobs), *shape] if model.is_batched else shape, data)


def _by_name(value: Any, ports: Sequence[Port]) -> dict[str, Any]:
    names = [port.name for port in ports]
    if isinstance(value, dict) and (len(ports) > 1 or (ports[0].tensor is not None and names[0] in value)):
        missing = [name for name in names if name not in value]
        if missing:
            raise InvalidOutput(f"{missing[0]}: promised, and not in the result")
        return value
    if len(ports) == 1:
        return {names[0]: value}
    if isinstance(value, list) and len(value) == len(ports):
        return dict(zip(names, value, strict=True))
    raise InvalidOutput(f"{len(ports)} outputs are promised, and {type(value).__name__} came")


def _joined(model: ServedModel, port: Port, parts: list[Any]) -> OutputTensor:
    made = [_output(port, part) for part in parts]
    if any(other[0] != made[0][0] for other in made):
        raise InvalidOutput(f"{port.name}: rows of different shapes")
    data = made[0][1] if len(made) == 1 else b"".join([part[1] for part in made])
    shape = made[0][0]
    return OutputTensor(port.name, port_dtype(port), [len(parts), *shape] if model.is_batched else shape, data)


def _output(port: Port, value: Any) -> tuple[list[int], bytes]:
    """Shape and raw bytes of one row."""
    import numpy

    if port.tensor is None:
        return [1], join_bytes([value if isinstance(value, bytes) else encoding.to_json(value)])
    try:
        if port.tensor.dtype == "BYTES":
            shape, elements = flatten(value, port.name)
            return shape, join_bytes(elements)
        wanted = numpy.dtype(NUMPY[port.tensor.dtype]).newbyteorder("<")
        array = numpy.asarray(value)
        if array.dtype != wanted:
            array = array.astype(wanted, casting="same_kind")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOutput(f"{port.name}: {error}") from None
    data = array.tobytes()
    return list(array.shape), fp32_to_bf16(data) if port.tensor.dtype == "BF16" else data
