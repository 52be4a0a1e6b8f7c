"""Weights from a safetensors file, and from nothing else: a pickle runs code when it is opened, numbers do not.

The format is a length (8 bytes), a JSON header with the place of every tensor, and raw little-endian numbers. Each tensor
is read straight to where it belongs: nothing is held twice.
"""

from __future__ import annotations

import math
import os
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from lamina.errors import BadValue

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

_Natural = Annotated[int, Meta(ge=0)]


class _TensorEntry(Struct, frozen=True):
    dtype: str
    shape: list[_Natural]
    data_offsets: tuple[_Natural, _Natural]


def load_weights(module: Any, path: str | os.PathLike[str]) -> None:
    """Every parameter and buffer of the module from the file; a name missing on either side, or another shape, is an error."""
    import torch

    file = Path(path)
    if file.suffix.lower() in _PICKLES:
        raise BadValue(
            f"weights: {file.name!r} is a pickle, which can run code when it is opened",
            hint="convert it once, where you trust it: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')",
        )
    if not file.is_file():
        raise BadValue(f"weights: no file {str(path)!r}", hint="give the path of a .safetensors file")
    wanted = module.state_dict(keep_vars=True)
    with file.open("rb") as source:
        places, start = _header(source, file)
        _check(places, wanted, file)
        with torch.no_grad():
            for name, place in places.items():
                source.seek(start + place.data_offsets[0])
                read = torch.empty(place.shape, dtype=getattr(torch, _DTYPES[place.dtype]))
                if read.numel():
                    room: Any = read.reshape(-1).view(torch.uint8).numpy()
                    if source.readinto(room) != read.nbytes:
                        raise BadValue(f"weights: {file.name} ends inside {name!r}")
                wanted[name].data.copy_(read)


def _header(source: BufferedReader, file: Path) -> tuple[dict[str, _TensorEntry], int]:
    size = int.from_bytes(source.read(8), "little")
    total = file.stat().st_size
    if not 2 <= size <= min(_MAX_HEADER_BYTES, total - 8):
        raise BadValue(f"weights: {file.name} is no safetensors file", hint="pickles are refused, whatever they are called")
    try:
        raw = msgspec.json.decode(source.read(size), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        places = {name: msgspec.json.decode(text, type=_TensorEntry) for name, text in raw.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadValue(f"weights: {file.name} is no safetensors file: {error}") from None
    for name, place in places.items():
        if place.dtype not in _DTYPES:
            raise BadValue(f"weights: {name!r} in {file.name} has type {place.dtype}", hint=f"one of {', '.join(_DTYPES)}")
        begin, end = place.data_offsets
        width = 1 if place.dtype in ("BOOL", "I8", "U8") else int("".join(filter(str.isdigit, place.dtype))) // 8
        if end - begin != math.prod(place.shape) * width or 8 + size + end > total:
            raise BadValue(f"weights: {name!r} in {file.name} is not where its header says")
    return places, 8 + size


def _check(places: dict[str, _TensorEntry], wanted: dict[str, Any], file: Path) -> None:
    missing, extra = wanted.keys() - places.keys(), places.keys() - wanted.keys()
    if missing or extra:
        said = [f"{len(names)} {word} ({min(names)} ...)" for word, names in (("missing", missing), ("unknown", extra)) if names]
        raise BadValue(
            f"weights: {file.name} does not fit the module: {', '.join(said)}", hint="build the module it was saved from"
        )
    for name, place in places.items():
        if list(wanted[name].shape) != place.shape:
            raise BadValue(f"weights: {name!r} in {file.name} has shape {place.shape}, the module {list(wanted[name].shape)}")
