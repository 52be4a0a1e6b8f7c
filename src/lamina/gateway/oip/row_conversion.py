"""Conversion between tensors and rows: a request's tensors to the inputs of calls, one per row, and their results to tensors.

Numbers pass through. Text does not: each element of a BYTES tensor and each part of a result becomes an object, so that of many
the loop of the server would know no end. Those are converted by a codec process (`split_apart`, `join_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.errors import BadValue, LaminaError
from lamina.gateway.oip.model_catalog import port_dtype
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
from lamina.gateway.routes.codec_pool import INLINE_BYTES, CodecPool, is_heavy_row
from lamina.ipc.sliced_copies import Parts
from lamina.sdk.tensors import NUMPY, Port, Signature


class InvalidOutput(Exception):
    """A function's result does not fit its signature: its fault, not the client's."""


class RowModel(Protocol):
    """What conversion needs to know of a model."""

    @property
    def signature(self) -> Signature: ...

    @property
    def is_batched(self) -> bool: ...


def split_rows(model: RowModel, inputs: Sequence[InputTensor], rows: int) -> list[dict[str, bytes]]:
    """The named inputs of each call. `rows` is 0 for a model without a batch axis."""
    return [{name: b"".join(parts) for name, parts in call.items()} for call in split_in_parts(model, inputs, rows)]


def split_in_parts(model: RowModel, inputs: Sequence[InputTensor], rows: int) -> list[dict[str, Parts]]:
    """The same in parts that need not be put together yet: raw tensors are not copied."""
    calls: list[dict[str, Parts]] = [{} for _ in range(rows or 1)]
    untyped = {port.name: port for port in model.signature.inputs if port.tensor is None}
    for given in inputs:
        port = untyped.get(given.name)
        if port is not None and given.dtype == "BYTES":
            texts = split_bytes(given.data, len(calls), given.name)
            if len(texts) != len(calls):
                raise BadValue(f"{given.name}: {len(texts)} elements where {len(calls)} fit its shape")
            encoded: list[Parts] = [(encoding.encode(_plain_value(port, text)),) for text in texts]
        else:
            encoded = row_values(given, rows if model.is_batched else 0)
            if port is not None and port.plain == "number":
                encoded = [(encoding.encode(_number(port.name, b"".join(value))),) for value in encoded]
        for call, value in zip(calls, encoded, strict=True):
            call[given.name] = value
    return calls


def _plain_value(port: Port, element: bytes) -> Any:
    """The value of an input without a tensor: its one element of BYTES."""
    if port.plain == "bytes":
        return element
    if port.plain != "text":
        return encoding.from_json(element, f"{port.name}: an element")
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise BadValue(f"{port.name}: an element that is not UTF-8 where text is needed") from None


def _number(name: str, blob: bytes) -> Any:
    """The one element of an array, as Python's own number."""
    array = encoding.decode(blob)
    if array.size != 1:
        raise BadValue(f"{name}: {array.size} numbers where one is needed", hint="send a tensor of shape [1]")
    return array.item()


def join_rows(
    model: RowModel, blobs: Sequence[encoding.Blob], wanted: Sequence[str] = (), *, in_place: bool = False
) -> list[OutputTensor]:
    """The results of the calls, in order of rows, as tensors. `in_place`: the bytes of a large one may be those of its result."""
    ports = model.signature.outputs
    if len(ports) == 1:
        passed = _pass_through(model, ports[0], blobs, in_place)
        if passed is not None:
            return [passed]
    results = [_by_name(encoding.decode(blob), ports) for blob in blobs]
    chosen = [port for port in ports if not wanted or port.name in wanted]
    return [_joined(model, port, [result[port.name] for result in results]) for port in chosen]


def _pass_through(model: RowModel, port: Port, blobs: Sequence[encoding.Blob], in_place: bool) -> OutputTensor | None:
    """Tensors of exactly the promised dtype go out without conversion."""
    dtype = port_dtype(port)
    if dtype in ("BYTES", "BF16"):
        return None
    found = []
    for blob in blobs:
        tensor = encoding.tensor_parts(blob, in_place=in_place and len(blobs) == 1)
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


def _joined(model: RowModel, port: Port, parts: list[Any]) -> OutputTensor:
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
        if port.plain == "text" and isinstance(value, str):
            value = value.encode()
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


# ------------------------------------------------------------------------ by a codec process

OnRows = Callable[[list[dict[str, bytes]] | LaminaError], None]
OnOutputs = Callable[[list[OutputTensor] | LaminaError], None]


class _RowModel(Struct, frozen=True):
    signature: Signature
    is_batched: bool


class _TensorHead(Struct):
    name: str
    dtype: str
    shape: list[int]
    size: int


class _SplitJob(Struct):
    model: _RowModel
    rows: int
    tensors: list[_TensorHead]


class _JoinJob(Struct):
    model: _RowModel
    wanted: list[str]
    sizes: list[int]


def is_heavy_split(inputs: Sequence[InputTensor]) -> bool:
    return any(one.dtype == "BYTES" and len(one.data) > INLINE_BYTES for one in inputs)


def is_heavy_join(blobs: Sequence[encoding.Blob]) -> bool:
    return any(is_heavy_row(blob) for blob in blobs)


def split_apart(codecs: CodecPool, model: RowModel, inputs: Sequence[InputTensor], rows: int, then: OnRows) -> None:
    """`split_rows` by a codec process."""
    heads = [_TensorHead(one.name, one.dtype, list(one.shape), len(one.data)) for one in inputs]
    job = _SplitJob(_RowModel(model.signature, model.is_batched), rows, heads)

    def on_parts(found: dict[str, bytes] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            then(found)
            return
        calls: list[dict[str, bytes]] = [{} for _ in range(rows or 1)]
        for key, value in found.items():
            row, _, name = key.partition(" ")
            calls[int(row)][name] = value
        then(calls)

    codecs.submit("split", {"job": msgspec.msgpack.encode(job)}, [one.data for one in inputs], on_parts)


def perform_split(head: bytes, data: bytes) -> dict[str, bytes]:
    job = msgspec.msgpack.decode(head, type=_SplitJob)
    calls = split_rows(job.model, _tensors(InputTensor, job.tensors, data), job.rows)
    return {f"{row} {name}": value for row, call in enumerate(calls) for name, value in call.items()}


def join_apart(
    codecs: CodecPool, model: RowModel, blobs: Sequence[encoding.Blob], wanted: Sequence[str], then: OnOutputs
) -> None:
    """`join_rows` by a codec process. The results must be there until `then` is called."""
    job = _JoinJob(_RowModel(model.signature, model.is_batched), list(wanted), [len(blob) for blob in blobs])

    def on_parts(found: dict[str, bytes] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            then(found)
        else:
            heads = msgspec.msgpack.decode(found["heads"], type=list[_TensorHead])
            then(_tensors(OutputTensor, heads, found["data"]))

    codecs.submit("join", {"job": msgspec.msgpack.encode(job)}, blobs, on_parts)


def perform_join(head: bytes, data: bytes) -> dict[str, bytes]:
    job = msgspec.msgpack.decode(head, type=_JoinJob)
    blobs, at = [], 0
    for size in job.sizes:
        blobs.append(memoryview(data)[at : at + size])
        at += size
    try:
        outputs = join_rows(job.model, blobs, job.wanted)
    except InvalidOutput as error:
        raise BadValue(str(error)) from None
    heads = [_TensorHead(one.name, one.dtype, list(one.shape), len(one.data)) for one in outputs]
    return {"heads": msgspec.msgpack.encode(heads), "data": b"".join([one.data for one in outputs])}


def _tensors(kind: Callable[[str, str, list[int], memoryview], Any], heads: Sequence[_TensorHead], data: bytes) -> list[Any]:
    """Tensors whose bytes are one behind the other."""
    made, at = [], 0
    for head in heads:
        made.append(kind(head.name, head.dtype, head.shape, memoryview(data)[at : at + head.size]))
        at += head.size
    return made
