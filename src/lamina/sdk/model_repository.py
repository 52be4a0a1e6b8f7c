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

import re
from pathlib import Path
from typing import Any

from msgspec import Struct

from lamina.errors import BadValue
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
    config = parse_pbtxt(file.read_text(), str(file)) if file.is_file() else {}
    if last_value(config, "name", folder.name) != folder.name:
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


def _common_fields(config: Message, name: str) -> dict[str, Any]:
    groups = config.get("instance_group", [])
    parameters = {
        last_value(pair, "key", ""): last_value(last_value(pair, "value", {}), "string_value", "")
        for pair in config.get("parameters", [])
    }
    return {
        "name": name,
        "max_batch": last_value(config, "max_batch_size", 0) if "max_batch_size" in config else None,
        "instances": sum(last_value(group, "count", 1) for group in groups) or 1,
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
        dtype = last_value(tensor, "data_type", "").removeprefix("TYPE_")
        dims = [last_value({"dims": [size]}, "dims", 0) for size in tensor.get("dims", [])]
        tensors[last_value(tensor, "name", "")] = ("BYTES" if dtype == "STRING" else dtype, dims)
    return tensors


def _selected_versions(config: Message, versions: list[int]) -> list[int]:
    policy = last_value(config, "version_policy", {})
    if "all" in policy:
        return versions
    if "specific" in policy:
        wanted = policy["specific"][-1].get("versions", [])
        missing = [version for version in wanted if version not in versions]
        if missing or not wanted:
            raise BadValue(f"version_policy: no version {missing[0] if missing else ''}", hint=f"there is {versions}")
        return sorted(wanted)
    return versions[-max(1, last_value(last_value(policy, "latest", {}), "num_versions", 1)) :]


def _file(folder: Path, config: Message) -> Path:
    named = last_value(config, "default_model_filename", "")
    if named and (Path(named).name != named or named.startswith(".")):
        raise BadValue(f"default_model_filename: {named!r} is no file's name")
    for name in (named,) if named else FILES:
        if (folder / name).is_file():
            return folder / name
    raise BadValue(f"{folder}: no {named or ' or '.join(FILES)}")


# ------------------------------------------------------------------------------------------ Protobuf text format

_TOKEN = re.compile(r"""\s*(?:\#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[-+\w.]+|[{}\[\]<>:,;]|\S)""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
MAX_DEPTH = 20

Message = dict[str, list[Any]]
"""Every field is a list: what may be repeated cannot be told from the text."""


def parse_pbtxt(text: str, name: str) -> Message:
    tokens = _TOKEN.findall(text)
    message, at = _message(tokens, 0, name, "", 0)
    if at != len(tokens):
        raise BadValue(f"{name}: {tokens[at]!r} where a field should begin")
    return message


def last_value(message: Message, key: str, default: Any) -> Any:
    """The last value of a field; it must be of the kind of the default."""
    value = message.get(key, [default])[-1]
    if isinstance(default, float) and isinstance(value, int):
        value = float(value)
    if type(value) is not type(default):
        raise BadValue(f"{key}: {value!r} is no {type(default).__name__}")
    return value


def _message(tokens: list[str], at: int, name: str, end: str, depth: int) -> tuple[Message, int]:
    if depth > MAX_DEPTH:
        raise BadValue(f"{name}: nested deeper than {MAX_DEPTH}")
    found: Message = {}
    while at < len(tokens) and tokens[at] != end:
        key = tokens[at]
        if not re.fullmatch(r"\w+", key):
            raise BadValue(f"{name}: {key!r} where a field should begin")
        at += 1
        if at < len(tokens) and tokens[at] == ":":
            at += 1
        values, at = _value(tokens, at, name, depth)
        found.setdefault(key, []).extend(values)
        if at < len(tokens) and tokens[at] in ",;":
            at += 1
    if end and at >= len(tokens):
        raise BadValue(f"{name}: {end!r} is missing at its end")
    return found, at


def _value(tokens: list[str], at: int, name: str, depth: int) -> tuple[list[Any], int]:
    if at >= len(tokens):
        raise BadValue(f"{name}: it ends where a value should be")
    token = tokens[at]
    if token in "{<":
        end = "}" if token == "{" else ">"
        inner, at = _message(tokens, at + 1, name, end, depth + 1)
        return [inner], at + 1
    if token == "[":
        return _list(tokens, at + 1, name, depth)
    if token[0] in "\"'":
        text = ""
        while at < len(tokens) and tokens[at][0] in "\"'":  # neighbours are one
            text += re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), tokens[at][1:-1])
            at += 1
        return [text], at
    return [_scalar(token, name)], at + 1


def _list(tokens: list[str], at: int, name: str, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while at < len(tokens) and tokens[at] != "]":
        values, at = _value(tokens, at, name, depth)
        found += values
        if at < len(tokens) and tokens[at] == ",":
            at += 1
    if at >= len(tokens):
        raise BadValue(f"{name}: ']' is missing at its end")
    return found, at + 1


def _scalar(token: str, name: str) -> Any:
    if token in ("true", "false"):
        return token == "true"
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            continue
    if not re.fullmatch(r"\w+", token):
        raise BadValue(f"{name}: {token!r} is no value")
    return token
