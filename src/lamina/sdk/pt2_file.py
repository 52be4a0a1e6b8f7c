"""Signature of a .pt2 file (`torch.export.save`), read without torch: it is a zip archive with the graph as JSON.

Files with a pickle among their weights or constants are refused: a pickle runs code when it is opened.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import msgspec

from lamina.errors import BadValue
from lamina.sdk.onnx_file import ModelFileSignature
from lamina.sdk.tensors import Port, Signature, Tensor

_DTYPES = {
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
    inputs = [_tensor(spec["user_input"], graph, name) for spec in signature["input_specs"] if "user_input" in spec]
    outputs = [_tensor(spec["user_output"], graph, name) for spec in signature["output_specs"] if "user_output" in spec]
    firsts = {shape[0] if shape else 0 for _, _, shape in (*inputs, *outputs)}
    batched = bool(inputs) and len(firsts) == 1 and isinstance(next(iter(firsts)), str)
    limits = next((model["range_constraints"].get(symbol) for symbol in map(str, firsts)), None) if batched else None
    return ModelFileSignature(
        Signature(_ports(inputs, batched), _ports(outputs, batched), "pytorch_pt2"),
        batched,
        least=(limits or {}).get("min_val") or 1,
        most=(limits or {}).get("max_val") or 0,
    )


def _tensor(spec: Any, graph: Any, name: str) -> tuple[str, str, list[int | str]]:
    if "as_tensor" not in spec["arg"]:
        raise BadValue(f"{name}: an input or output that is no tensor", hint="export a module that takes and gives tensors alone")
    own = spec["arg"]["as_tensor"]["name"]
    about = graph["tensor_values"][own]
    if about["dtype"] not in _DTYPES:
        raise BadValue(f"{name}: {own!r} has a dtype that cannot be served")
    return own, _DTYPES[about["dtype"]], [size["as_int"] if "as_int" in size else _symbol(size) for size in about["sizes"]]


def _symbol(size: Any) -> str:
    """Name of a symbolic size: `Symbol('s40', positive=True)`; an expression stays as it is, and equals no other."""
    text = str(size["as_expr"]["expr_str"])
    return text.split("'")[1] if text.startswith("Symbol('") and text.count("(") == 1 else text


def _ports(found: list[tuple[str, str, list[int | str]]], batched: bool) -> tuple[Port, ...]:
    return tuple(
        Port(name, Tensor(dtype, [size if isinstance(size, int) else -1 for size in shape][int(batched) :]))
        for name, dtype, shape in found
    )
