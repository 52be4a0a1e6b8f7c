"""Model repositories in Triton's layout: a folder per model, a folder per version in it, and an optional config.pbtxt.

    models/
      resnet/
        config.pbtxt        optional: what the file says of itself is enough
        1/model.onnx
        2/model.onnx

Taken from the configuration: max_batch_size, input and output (which must agree with the file), the sum of instance_group,
version_policy, default_model_filename, and the parameters `slo`, `cores`, `memory_mib` and `gpu` (a share; of a torch file). How
long a batch may wait to be filled is not: that is decided for every batch anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from lamina.errors import BadValue
from lamina.sdk import pbtxt
from lamina.sdk.app import NAME_PATTERN

DEFAULT_BATCH = 32
FILES = ("model.onnx", "model.pt2", "model.safetensors")


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One version of one model, to be served."""

    name: str
    path: str
    version: str = "1"
    max_batch: int | None = None  #: None: as the file allows; 0: no batch axis
    instances: int = 1
    slo: str = ""
    cores: int = 1
    memory_mib: int = 0
    gpu: str = ""  #: share of one; empty: the CPU
    inputs: dict[str, tuple[str, list[int]]] = {}  #: dtype and dims, as configured
    outputs: dict[str, tuple[str, list[int]]] = {}


def read_repository(folder: Path) -> list[ModelEntry]:
    if not folder.is_dir():
        raise BadValue(f"--model-repository: no folder {str(folder)!r}", hint="give one that holds NAME/VERSION/model.onnx")
    found = [
        entry for inner in sorted(folder.iterdir()) if inner.is_dir() and inner.name[0] != "." for entry in read_model(inner)
    ]
    if not found:
        raise BadValue(f"--model-repository: no model in {str(folder)!r}", hint="put one at NAME/1/model.onnx")
    return found


def read_model(folder: Path) -> list[ModelEntry]:
    """All versions of a model that are to be served, the oldest first."""
    if not NAME_PATTERN.fullmatch(folder.name):
        raise BadValue(f"{folder}: {folder.name!r} cannot be a model's name", hint="up to 63 of a-z 0-9 . _ -, lower case")
    file = folder / "config.pbtxt"
    config = pbtxt.parse_pbtxt(file.read_text(), str(file)) if file.is_file() else {}
    if pbtxt.last_value(config, "name", folder.name) != folder.name:
        raise BadValue(f"{file}: name {config['name'][-1]!r} in a folder named {folder.name!r}", hint="leave the name out")
    versions = sorted(
        int(inner.name) for inner in folder.iterdir() if inner.is_dir() and inner.name.isdigit() and int(inner.name)
    )
    if not versions:
        raise BadValue(f"{folder}: no version", hint="put the file into a folder with a number, such as 1/model.onnx")
    try:
        common = _common_fields(config, folder.name)
        return [
            ModelEntry(path=str(_file(folder / str(version), config)), version=str(version), **common)
            for version in _selected_versions(config, versions)
        ]
    except BadValue as error:
        raise BadValue(f"{file}: {error.message}" if config else error.message, hint=error.hint) from None


def _common_fields(config: pbtxt.Message, name: str) -> dict[str, Any]:
    groups = config.get("instance_group", [])
    parameters = {
        pbtxt.last_value(pair, "key", ""): pbtxt.last_value(pbtxt.last_value(pair, "value", {}), "string_value", "")
        for pair in config.get("parameters", [])
    }
    return {
        "name": name,
        "max_batch": pbtxt.last_value(config, "max_batch_size", 0) if "max_batch_size" in config else None,
        "instances": sum(pbtxt.last_value(group, "count", 1) for group in groups) or 1,
        "slo": parameters.get("slo", ""),
        "cores": _number(parameters, "cores", 1),
        "memory_mib": _number(parameters, "memory_mib", 0),
        "gpu": parameters.get("gpu", ""),
        "inputs": _tensors(config.get("input", [])),
        "outputs": _tensors(config.get("output", [])),
    }


def _number(parameters: dict[str, str], name: str, default: int) -> int:
    text = parameters.get(name, str(default))
    if not text.isdecimal():
        raise BadValue(f"parameters.{name}: {text!r} is no whole number")
    return int(text)


def _tensors(found: list[Any]) -> dict[str, tuple[str, list[int]]]:
    tensors = {}
    for tensor in found:
        dtype = pbtxt.last_value(tensor, "data_type", "").removeprefix("TYPE_")
        dims = [pbtxt.last_value({"dims": [size]}, "dims", 0) for size in tensor.get("dims", [])]
        tensors[pbtxt.last_value(tensor, "name", "")] = ("BYTES" if dtype == "STRING" else dtype, dims)
    return tensors


def _selected_versions(config: pbtxt.Message, versions: list[int]) -> list[int]:
    policy = pbtxt.last_value(config, "version_policy", {})
    if "all" in policy:
        return versions
    if "specific" in policy:
        wanted = policy["specific"][-1].get("versions", [])
        missing = [version for version in wanted if version not in versions]
        if missing or not wanted:
            raise BadValue(f"version_policy: no version {missing[0] if missing else ''}", hint=f"there is {versions}")
        return sorted(wanted)
    return versions[-max(1, pbtxt.last_value(pbtxt.last_value(policy, "latest", {}), "num_versions", 1)) :]


def _file(folder: Path, config: pbtxt.Message) -> Path:
    named = pbtxt.last_value(config, "default_model_filename", "")
    if named and (Path(named).name != named or named.startswith(".")):
        raise BadValue(f"default_model_filename: {named!r} is no file's name")
    for name in (named,) if named else FILES:
        if (folder / name).is_file():
            return folder / name
    raise BadValue(f"{folder}: no {named or ' or '.join(FILES)}")
