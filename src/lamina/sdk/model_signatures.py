"""Signatures of model files: names, dtypes and shapes of inputs and outputs, read without loading the model.

An ONNX file is a protobuf message; five of its message types have what is needed, and everything else, weights above all, is
stepped over. So the gateway knows a model without onnxruntime, and without its memory.

A .pt2 file (`torch.export.save`) is a zip archive with the graph as JSON, read without torch. Files with a pickle among their
weights or constants are refused: a pickle runs code when it is opened.
"""

from __future__ import annotations

import mmap
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.sdk.tensors import Port, Signature, Tensor

_ONNX_DTYPES = {
    1: "FP32",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    8: "BYTES",
    9: "BOOL",
    10: "FP16",
    11: "FP64",
    12: "UINT32",
    13: "UINT64",
}
_ONNX_OTHERS = {
    "14": "complex64",
    "15": "complex128",
    "16": "bfloat16",
    "17": "float8",
    "18": "float8",
    "21": "uint4",
    "22": "int4",
}
_ONNX_CONTAINERS = {4: "sequence", 5: "map", 9: "optional value", 8: "sparse tensor"}
"""Kinds of values that are no tensors, by the number of their field in a type."""
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_GRAPH = 7
_INITIALIZER, _INPUT, _OUTPUT = 5, 11, 12


class ModelFileSignature(Struct, frozen=True):
    """Signature of a model file. `batched`: the first axis of everything counts requests, and is left out of the shapes."""

    signature: Signature
    batched: bool
    least: int = 1  #: rows it can be run with
    most: int = 0  #: 0: any number
    unbatched: str = ""  #: why it is not


class _Value(Struct, frozen=True):
    """An input or output of a model."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None  #: a name stands for a length that is not known; "" if it has none. None: not said


def _ports(found: list[_Value], batched: bool) -> tuple[Port, ...]:
    shapes = [[size if isinstance(size, int) else -1 for size in one.shape or ()] for one in found]
    return tuple(Port(one.name, Tensor(one.dtype, shape[int(batched) :])) for one, shape in zip(found, shapes, strict=True))


def read_onnx(path: Path) -> ModelFileSignature:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
            return _model(view, path.name)
    except (OSError, ValueError, IndexError) as error:  # an empty file cannot be mapped either
        hint = "it is a pointer of Git LFS: git lfs pull" if _is_lfs_pointer(path) else "give the path of an .onnx file"
        raise BadValue(f"{path}: no ONNX model: {error}", hint=hint) from None


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a file stands for a large one that was not fetched with its repository."""
    try:
        with path.open("rb") as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _model(view: memoryview, name: str) -> ModelFileSignature:
    graph = next((value for number, value in _fields(view) if number == _GRAPH and isinstance(value, memoryview)), None)
    if graph is None:
        raise BadValue(f"{name}: no ONNX model: it has no graph")
    inputs, outputs, constants = [], [], set()
    with graph:
        for number, value in _fields(graph):
            if isinstance(value, memoryview):
                with value:
                    if number == _INPUT:
                        inputs.append(_value(value))
                    elif number == _OUTPUT:
                        outputs.append(_value(value))
                    elif number == _INITIALIZER:
                        constants.add(_text(value, 8))
    inputs = [one for one in inputs if one.name not in constants]
    unbatched = _why_unbatched(inputs, outputs)
    batched = not unbatched
    for what, found in (("input", inputs), ("output", outputs)):
        for one in found:
            _check_served(name, what, one)
    signature = Signature(_ports(inputs, batched), _ports(outputs, batched), "onnxruntime_onnx")
    return ModelFileSignature(signature, batched, unbatched=unbatched)


def _check_served(name: str, what: str, value: _Value) -> None:
    if value.dtype in _ONNX_CONTAINERS.values():
        hint = "convert it without: of scikit-learn, to_onnx(model, X, options={'zipmap': False})"
        raise BadValue(f"{name}: {what} {value.name!r} is a {value.dtype}, and no tensor", hint=hint)
    if value.dtype not in _ONNX_DTYPES.values():
        kind = _ONNX_OTHERS.get(value.dtype, f"of ONNX type {value.dtype}")
        raise BadValue(f"{name}: {what} {value.name!r} is {kind}, which cannot be served", hint="export it with another type")
    if what == "input" and value.shape is None:
        hint = "give it one in the file: the number of axes, each with a length or a name"
        raise BadValue(f"{name}: input {value.name!r} has no shape", hint=hint)


_BATCH_NAME = re.compile(r"batch|^(n|b|bs|none|\?)$", re.IGNORECASE)
_SEQUENCE_NAME = re.compile(
    r"^(?!.*batch).*((^|_)(seq|sequence|time|timesteps?|length|tokens?|frames?|steps?)(_|$)|seq_?len)", re.IGNORECASE
)
"""One sequence's own axis: requests joined there would be one long sequence."""
_MADE_NAME = re.compile(r"^$|^unk_|^dim_?\d|dynamicdim|__d\d+$|_dim_?0$", re.IGNORECASE)
"""What exporters call an axis that has no name: `unk__214`, `DynamicDimension.0`, `ConvTranspose_459_o0__d0`."""


def _why_unbatched(inputs: list[_Value], outputs: list[_Value]) -> str:
    """Why the first axis of a model is no batch; "": it is one. Exporters name one and the same axis differently at its two ends,
    so an unknown first length counts by its meaning: one name everywhere, a name for a batch, or one an exporter has made up."""
    if not inputs:
        return "it has no inputs"
    for what, found in (("input", inputs), ("output", outputs)):
        for one in found:
            if not one.shape or not isinstance(one.shape[0], str):
                return f"{what} {one.name!r} has {f'the fixed length {one.shape[0]}' if one.shape else 'no'} first axis"
            if _SEQUENCE_NAME.search(one.shape[0]):
                return f"the first axis of {what} {one.name!r} is {one.shape[0]!r}, and no batch"
    names = {str(one.shape[0]) for one in (*inputs, *outputs) if one.shape} - {""}
    if len(names) <= 1:
        return ""
    for what, found in (("input", inputs), ("output", outputs)):
        for one in found:
            first = str(one.shape[0]) if one.shape else ""
            if not _BATCH_NAME.search(first) and not _MADE_NAME.search(first):
                return f"the first axis of {what} {one.name!r} is {first!r}, and others have another name"
    return ""


def _value(info: memoryview) -> _Value:
    """ValueInfoProto: name = 1, type = 2; the type is a tensor's (1) with elem_type = 1 and shape = 2, of dimensions (1)."""
    name, dtype = "", "none"
    shape: list[int | str] | None = []
    for number, value in _fields(info):
        if number == 1 and isinstance(value, memoryview):
            name = bytes(value).decode()
        elif number == 2 and isinstance(value, memoryview):
            for kind, tensor in _fields(value):
                if kind == 1 and isinstance(tensor, memoryview):
                    dtype, shape = _tensor(tensor)
                else:
                    dtype = _ONNX_CONTAINERS.get(kind, dtype)
    return _Value(name, dtype, tuple(shape) if shape is not None else None)


def _tensor(tensor: memoryview) -> tuple[str, list[int | str] | None]:
    dtype = "none"
    shape: list[int | str] | None = None
    for number, value in _fields(tensor):
        if number == 1 and isinstance(value, int):
            dtype = _ONNX_DTYPES.get(value, str(value))
        elif number == 2 and isinstance(value, memoryview):
            shape = [_length(one) for kind, one in _fields(value) if kind == 1 and isinstance(one, memoryview)]
    return dtype, shape


def _length(dimension: memoryview) -> int | str:
    for number, value in _fields(dimension):
        if number == 1 and isinstance(value, int):
            return value if value < 2**63 else ""
        if number == 2 and isinstance(value, memoryview):
            return bytes(value).decode()
    return ""


def _text(message: memoryview, wanted: int) -> str:
    for number, value in _fields(message):
        if number == wanted and isinstance(value, memoryview):
            return bytes(value).decode()
    return ""


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: an int, or the bytes of what has a length."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            number, at = _varint(message, at)
            yield tag >> 3, number
        elif kind == _BYTES:
            size, at = _varint(message, at)
            if at + size > end:
                raise ValueError("it ends too soon")
            yield tag >> 3, message[at : at + size]
            at += size
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        else:
            raise ValueError("not protobuf")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("not protobuf")


_PT2_DTYPES = {
    1: "UINT8",
    2: "INT8",
    3: "INT16",
    4: "INT32",
    5: "INT64",
    6: "FP16",
    7: "FP32",
    8: "FP64",
    12: "BOOL",
    13: "BF16",
}
_MAX_JSON_BYTES = 256 * 2**20


def read_pt2(path: Path) -> ModelFileSignature:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("_config.json") and _has_pickle(_json(archive, name)):
                    raise BadValue(f"{path}: {name} names a pickle", hint="export the model again, without custom objects")
            names = [name for name in archive.namelist() if name.endswith("/models/model.json")]
            if len(names) != 1:
                raise BadValue(f"{path}: {len(names)} models in it", hint="save one with torch.export.save")
            return _signature(_json(archive, names[0]), path.name)
    except (zipfile.BadZipFile, OSError, msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        raise BadValue(
            f"{path}: no exported model: {type(error).__name__}: {error}", hint="make it with torch.export.save"
        ) from None


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > _MAX_JSON_BYTES:
        raise BadValue(f"{name}: larger than a graph can be")
    return msgspec.json.decode(archive.read(name))


def _has_pickle(config: Any) -> bool:
    entries = config.get("config", {}) if isinstance(config, dict) else {}
    return any(entry.get("use_pickle") or "custom_obj" in str(entry.get("path_name")) for entry in entries.values())


def _signature(model: Any, name: str) -> ModelFileSignature:
    graph, signature = model["graph_module"]["graph"], model["graph_module"]["signature"]
    inputs = [_pt2_value(spec["user_input"], graph, name) for spec in signature["input_specs"] if "user_input" in spec]
    outputs = [_pt2_value(spec["user_output"], graph, name) for spec in signature["output_specs"] if "user_output" in spec]
    firsts = {one.shape[0] if one.shape else 0 for one in (*inputs, *outputs)}
    batched = bool(inputs) and len(firsts) == 1 and isinstance(next(iter(firsts)), str)
    limits = next((model["range_constraints"].get(symbol) for symbol in map(str, firsts)), None) if batched else None
    return ModelFileSignature(
        Signature(_ports(inputs, batched), _ports(outputs, batched), "pytorch_pt2"),
        batched,
        least=(limits or {}).get("min_val") or 1,
        most=(limits or {}).get("max_val") or 0,
    )


def _pt2_value(spec: Any, graph: Any, name: str) -> _Value:
    if "as_tensor" not in spec["arg"]:
        raise BadValue(f"{name}: an input or output that is no tensor", hint="export a module that takes and gives tensors alone")
    own = spec["arg"]["as_tensor"]["name"]
    about = graph["tensor_values"][own]
    if about["dtype"] not in _PT2_DTYPES:
        raise BadValue(f"{name}: {own!r} has a dtype that cannot be served")
    shape = tuple(size["as_int"] if "as_int" in size else _symbol(size) for size in about["sizes"])
    return _Value(own, _PT2_DTYPES[about["dtype"]], shape)


def _symbol(size: Any) -> str:
    """Name of a symbolic size: `Symbol('s40', positive=True)`; an expression stays as it is, and equals no other."""
    text = str(size["as_expr"]["expr_str"])
    return text.split("'")[1] if text.startswith("Symbol('") and text.count("(") == 1 else text
