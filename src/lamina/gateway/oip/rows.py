"""Conversion between tensors and rows: a request's tensors to the inputs of calls, one per row, and their results to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina import values
from lamina.errors import BadValue
from lamina.gateway.oip.models import Model, dtype_of
from lamina.gateway.oip.tensors import Given, Output, Raw, flattened, join_bytes, narrow, row_values, split_bytes
from lamina.sdk.tensors import NUMPY, Port


class Misshapen(Exception):
    """A function's result does not fit its signature: its fault, not the client's."""


def inputs_of(model: Model, inputs: Sequence[Given], rows: int) -> list[dict[str, bytes]]:
    """The named inputs of each call. `rows` is 0 for a model without a batch axis."""
    calls: list[dict[str, bytes]] = [{} for _ in range(rows or 1)]
    for given in inputs:
        if model.ports[given.name].tensor is None:
            texts = split_bytes(given.data, len(calls), given.name)
            if len(texts) != len(calls):
                raise BadValue(f"{given.name}: {len(texts)} elements where {len(calls)} fit its shape")
            encoded = [values.encode(values.from_json(text)) for text in texts]
        else:
            encoded = row_values(given, rows if model.batched else 0)
        for call, value in zip(calls, encoded, strict=True):
            call[given.name] = value
    return calls


def outputs_of(model: Model, blobs: Sequence[values.Blob], wanted: Sequence[str] = ()) -> list[Output]:
    """The results of the calls, in order of rows, as tensors."""
    ports = model.signature.outputs
    if len(ports) == 1:
        passed = _passed_on(model, ports[0], blobs)
        if passed is not None:
            return [passed]
    results = [_by_name(values.decode(blob), ports) for blob in blobs]
    chosen = [port for port in ports if not wanted or port.name in wanted]
    return [_joined(model, port, [result[port.name] for result in results]) for port in chosen]


def _passed_on(model: Model, port: Port, blobs: Sequence[values.Blob]) -> Output | None:
    """Tensors of exactly the promised dtype go out without conversion."""
    dtype = dtype_of(port)
    if dtype in ("BYTES", "BF16"):
        return None
    found = []
    for blob in blobs:
        tensor = values.as_tensor(blob)
        if tensor is None or tensor[0] != NUMPY[dtype]:
            return None
        found.append(tensor)
    shape = found[0][1]
    if any(other[1] != shape for other in found):
        raise Misshapen(f"{port.name}: rows of different shapes")
    data: Raw = found[0][2] if len(found) == 1 else b"".join([tensor[2] for tensor in found])
    return Output(port.name, dtype, [len(blobs), *shape] if model.batched else shape, data)


def _by_name(value: Any, ports: Sequence[Port]) -> dict[str, Any]:
    names = [port.name for port in ports]
    if isinstance(value, dict) and (len(ports) > 1 or (ports[0].tensor is not None and names[0] in value)):
        missing = [name for name in names if name not in value]
        if missing:
            raise Misshapen(f"{missing[0]}: promised, and not in the result")
        return value
    if len(ports) == 1:
        return {names[0]: value}
    if isinstance(value, list) and len(value) == len(ports):
        return dict(zip(names, value, strict=True))
    raise Misshapen(f"{len(ports)} outputs are promised, and {type(value).__name__} came")


def _joined(model: Model, port: Port, parts: list[Any]) -> Output:
    made = [_output(port, part) for part in parts]
    if any(other[0] != made[0][0] for other in made):
        raise Misshapen(f"{port.name}: rows of different shapes")
    data = made[0][1] if len(made) == 1 else b"".join([part[1] for part in made])
    shape = made[0][0]
    return Output(port.name, dtype_of(port), [len(parts), *shape] if model.batched else shape, data)


def _output(port: Port, value: Any) -> tuple[list[int], bytes]:
    """Shape and raw bytes of one row."""
    import numpy

    if port.tensor is None:
        return [1], join_bytes([value if isinstance(value, bytes) else values.to_json(value)])
    try:
        if port.tensor.dtype == "BYTES":
            shape, elements = flattened(value, port.name)
            return shape, join_bytes(elements)
        wanted = numpy.dtype(NUMPY[port.tensor.dtype]).newbyteorder("<")
        array = numpy.asarray(value)
        if array.dtype != wanted:
            array = array.astype(wanted, casting="same_kind")
    except (TypeError, ValueError, OverflowError) as error:
        raise Misshapen(f"{port.name}: {error}") from None
    data = array.tobytes()
    return list(array.shape), narrow(data) if port.tensor.dtype == "BF16" else data
