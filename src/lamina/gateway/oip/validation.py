"""Validation of inference requests against their model: names, dtypes, shapes and sizes, before a worker gets any of it."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.encoding import MAX_EMPTY, MAX_RANK
from lamina.errors import BadValue, did_you_mean
from lamina.gateway.oip.model_catalog import ServedModel, port_dtype
from lamina.gateway.oip.tensors import SIZES, InputTensor, element_count

MAX_ROWS = 1_024
"""Rows of one request, each of which is a call of its own."""

_NOT_BOOL = bytes(range(2))


def validate_request(model: ServedModel, inputs: Sequence[InputTensor], wanted: Sequence[str]) -> int:
    """Validate; returns how many rows the request has, 0 for a model without a batch axis."""
    ports = model.ports
    seen: set[str] = set()
    rows = 0
    for given in inputs:
        port = ports.get(given.name)
        if port is None:
            raise BadValue(f"{given.name[:80]!r}: model {model.name!r} has no such input", hint=_near(given.name, list(ports)))
        if given.name in seen:
            raise BadValue(f"{given.name}: given twice")
        seen.add(given.name)
        dtype = port_dtype(port)
        if not model.takes(port, given.dtype):
            raise BadValue(f"{given.name}: datatype {given.dtype[:20]!r} where {dtype} is needed", hint=_TEXT.get(port.plain, ""))
        _check_shape(given, model.shape(port) if given.dtype == dtype else None)
        _check_size(given)
        if model.is_batched:
            if not given.shape:
                raise BadValue(f"{given.name}: shape [] where the first axis counts requests", hint="send shape [1], or more")
            if rows and rows != given.shape[0]:
                raise BadValue(f"{given.name}: {given.shape[0]} rows where another input has {rows}")
            rows = given.shape[0]
            if not 1 <= rows <= MAX_ROWS:
                raise BadValue(f"{given.name}: {rows} rows", hint=f"1 to {MAX_ROWS} in one request")
    if len(seen) < len(ports):
        for port in ports.values():
            if port.required and port.name not in seen:
                raise BadValue(f"{port.name}: missing", hint=f"model {model.name!r} needs it")
    _check_outputs(model, wanted)
    return rows or int(model.is_batched)


_TEXT = {"text": "one element, the text in UTF-8", "bytes": "one element, the bytes themselves"}


def _check_shape(given: InputTensor, wanted: Sequence[int] | None) -> None:
    """Check a shape; without one that is wanted, only that there can be such an array."""
    shape = given.shape
    if len(shape) > MAX_RANK:
        raise BadValue(f"{given.name}: {len(shape)} dimensions", hint=f"at most {MAX_RANK}")
    if any(size < 0 for size in shape):
        raise BadValue(f"{given.name}: shape {list(shape)} has a negative length")
    if wanted is not None and (
        len(shape) != len(wanted)
        or any(size != fixed for size, fixed in zip(shape, wanted, strict=True) if fixed >= 0 and size != fixed)
    ):
        raise BadValue(f"{given.name}: shape {list(shape)} where {list(wanted)} is needed")
    if 0 in shape and element_count([size for size in shape if size]) > MAX_EMPTY:
        raise BadValue(f"{given.name}: shape {list(shape)}, which holds nothing")


def _check_size(given: InputTensor) -> None:
    size = SIZES.get(given.dtype)
    if size is None:  # BYTES; its elements are counted when they are taken apart
        if 4 * element_count(given.shape) > len(given.data):
            raise BadValue(f"{given.name}: {len(given.data)} bytes cannot be {element_count(given.shape)} elements of BYTES")
        return
    needed = size * element_count(given.shape)
    if len(given.data) != needed:
        raise BadValue(f"{given.name}: {len(given.data)} bytes where shape {list(given.shape)} of {given.dtype} has {needed}")
    if given.dtype == "BOOL" and bytes(given.data).translate(None, _NOT_BOOL):
        raise BadValue(f"{given.name}: a BOOL is a byte of 0 or 1")


def _check_outputs(model: ServedModel, wanted: Sequence[str]) -> None:
    if wanted:
        known = [port.name for port in model.signature.outputs]
        for name in wanted:
            if name not in known:
                raise BadValue(f"{name[:80]!r}: model {model.name!r} has no such output", hint=_near(name, known))
        if len(set(wanted)) != len(wanted):
            raise BadValue("outputs: one is asked for twice")


def _near(name: str, known: list[str]) -> str:
    return did_you_mean(name[:80], known, f"there is {', '.join(known) or 'none'}")
