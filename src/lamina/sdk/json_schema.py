"""JSON Schemas of annotations: what a request and a result look like to a client, for OpenAPI and for the fields of forms.

msgspec knows dataclasses, structs, typed dicts, enums and all that is built of them; what has to do with pydantic, pydantic
describes. Each schema stands alone: what it refers to is under its own `$defs`.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import msgspec

if TYPE_CHECKING:
    from lamina.sdk.tensors import Port, Tensor

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]
"""Of what comes in, or of what goes out: models of pydantic may differ in that."""

DEFS = "#/$defs/"
_STREAMS = (collections.abc.AsyncIterator, collections.abc.AsyncIterable)
_NUMBERS = {"BO": "boolean", "BY": "string", "IN": "integer", "UI": "integer"}  #: by how names of dtypes begin


def pydantic_adapter(hint: Any) -> Any:
    """What pydantic makes of an annotation that has to do with it; None where nothing has, or pydantic cannot."""
    if _is_pydantic(hint):
        with contextlib.suppress(Exception):  # beside arrays and structs, of which pydantic knows nothing
            import pydantic

            return pydantic.TypeAdapter(hint)
    return None


def _is_pydantic(hint: Any) -> bool:
    notes = getattr(hint, "__metadata__", ()) if get_origin(hint) is Annotated else ()
    if any(type(note).__module__.partition(".")[0] in ("pydantic", "annotated_types") for note in notes):
        return True
    if isinstance(hint, type) and (hint.__module__.partition(".")[0] == "pydantic" or hasattr(hint, "__pydantic_core_schema__")):
        return True
    return any(map(_is_pydantic, get_args(hint))) if get_origin(hint) is not Literal else False


def schema_of(hint: Any, mode: Mode = "validation") -> Schema:
    """The schema of an annotation; {} where it says nothing that JSON has a word for."""
    if hint is None or hint is Any:
        return {}
    if get_origin(hint) in _STREAMS:
        return {"type": "array", "items": schema_of(get_args(hint)[0], mode) if get_args(hint) else {}}
    if get_origin(hint) is Annotated:
        from lamina.sdk.tensors import Tensor

        tensor = next((note for note in get_args(hint)[1:] if isinstance(note, Tensor)), None)
        if tensor is not None:
            return _tensor_schema(tensor)
    with contextlib.suppress(Exception):  # nothing of pydantic's, or a model that cannot say its own
        return _pydantic_schema(hint, mode)

    def describe(kind: type) -> Schema:
        return _schema_hook(kind, mode)

    try:
        (schema,), components = msgspec.json.schema_components([hint], schema_hook=describe, ref_template=DEFS + "{name}")
    except Exception:  # a type that has no JSON form, or a model of a library that cannot say its own
        return _composed_schema(hint, mode)
    defs = dict(components)
    schema = _without_local_defs(schema, defs)
    for name in list(defs):
        defs[name] = _without_local_defs(defs[name], defs)
    return {**schema, "$defs": defs} if defs else schema


def _composed_schema(hint: Any, mode: Mode) -> Schema:
    """The schema of what msgspec describes in parts alone: one of several dataclasses, and lists and objects of such."""
    origin, inner = get_origin(hint), get_args(hint)
    if not inner or origin not in (typing.Union, types.UnionType, list, dict):
        return {}
    parts = [schema_of(one, mode) for one in (inner if origin not in (list, dict) else inner[-1:])]
    if not all(parts):
        return {}
    defs = {name: one for part in parts for name, one in part.pop("$defs", {}).items()}
    if origin is list:
        found: Schema = {"type": "array", "items": parts[0]}
    elif origin is dict:
        found = {"type": "object", "additionalProperties": parts[0]}
    else:
        found = {"anyOf": parts}
    return {**found, "$defs": defs} if defs else found


def _tensor_schema(tensor: Tensor) -> Schema:
    """Nested lists of numbers; JSON Schema has no word for a shape, so it is told to the reader."""
    kind = tensor.dtype
    schema: Schema = {"type": _NUMBERS.get(kind[:2], "number")}
    for size in reversed(tensor.shape):
        schema = {"type": "array", "items": schema} | ({"minItems": size, "maxItems": size} if size >= 0 else {})
    return schema | {"description": f"{kind} of shape {list(tensor.shape)}"}


def port_schema(port: Port) -> Schema:
    """The schema of an input of a model file: its tensor, and null where it may be left out."""
    if port.tensor is None:
        return {}
    schema = _tensor_schema(port.tensor)
    return schema if port.required else {"anyOf": [schema, {"type": "null"}]}


def _pydantic_schema(hint: Any, mode: Mode) -> Schema:
    adapter = pydantic_adapter(hint)
    if adapter is None:
        raise TypeError("it has nothing to do with pydantic")
    found: Schema = adapter.json_schema(mode=mode, ref_template=DEFS + "{model}")
    return found


def _schema_hook(kind: type, mode: Mode) -> Schema:
    """Schemas of classes that msgspec does not know."""
    if _is_pydantic(kind):
        return _pydantic_schema(kind, mode)
    if hasattr(kind, "model_json_schema"):
        found: Schema = kind.model_json_schema(ref_template=DEFS + "{model}")
        return found
    if kind.__module__ in ("pathlib", "ipaddress"):
        return {"type": "string"}
    if kind in (collections.deque, collections.OrderedDict):
        return {"type": "array" if kind is collections.deque else "object"}
    if kind.__module__.partition(".")[0] == "numpy":
        return {"type": "array", "items": {}} if kind.__name__ == "ndarray" else {"type": "number"}
    return {}


def _without_local_defs(schema: Any, defs: dict[str, Any]) -> Any:
    """A schema whose inner `$defs` have been moved to `defs`."""
    if isinstance(schema, dict):
        for name, inner in schema.get("$defs", {}).items():
            defs.setdefault(name, _without_local_defs(inner, defs))
        return {key: _without_local_defs(value, defs) for key, value in schema.items() if key != "$defs"}
    if isinstance(schema, list):
        return [_without_local_defs(inner, defs) for inner in schema]
    return schema


def json_types(schema: Schema) -> set[str]:
    """JSON types that a schema allows at its top; empty if it does not say."""
    found: set[str] = set()
    pending: list[Any] = [schema]
    for _ in range(64):  # of a schema that refers to itself so much is seen
        if not pending:
            break
        one = pending.pop()
        if not isinstance(one, dict):
            continue
        kinds = one.get("type")
        found.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        if isinstance(one.get("enum"), list):
            found.update("integer" if type(value) is int else "string" for value in one["enum"])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(one.get(key), list):
                pending += one[key]
        ref, defs = one.get("$ref"), schema.get("$defs")
        if isinstance(ref, str) and isinstance(defs, dict):
            pending.append(defs.get(ref.removeprefix(DEFS)))
    return found


def is_base64(schema: Schema) -> bool:
    """Whether the value is bytes, which JSON has as base64."""
    return any(one.get("contentEncoding") == "base64" for one in _choices(schema))


def item_schema(schema: Schema) -> Schema:
    """Schema of the entries of a list; {} if it does not say."""
    found: Schema = next((one["items"] for one in _choices(schema) if isinstance(one.get("items"), dict)), {})
    return {**found, "$defs": schema["$defs"]} if "$defs" in schema else found


def takes_any_text(schema: Schema) -> bool:
    """Whether a text may be the value whatever it says, also an empty one."""
    return any(one.get("type") == "string" and not {"format", "enum", "const"} & one.keys() for one in _choices(schema))


def property_schemas(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """Schemas of the fields of an object, and whether each is required; {} if it has none, or may be something else."""
    defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    choices = [one for one in _choices(schema) if one.get("type") != "null"]
    if len(choices) != 1 or not isinstance(found := choices[0].get("properties"), dict):
        return {}
    required = choices[0].get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return {name: ({**inner, **defs}, name in needed) for name, inner in found.items() if isinstance(inner, dict)}


def _choices(schema: Schema) -> list[Schema]:
    """The schemas of which a value fits one, looked up where they are references."""
    defs, options = schema.get("$defs"), schema.get("anyOf")
    found: list[Any] = [one for one in (options if isinstance(options, list) else [schema]) if isinstance(one, dict)]
    if isinstance(defs, dict):
        found = [defs.get(str(one["$ref"]).removeprefix(DEFS)) if "$ref" in one else one for one in found]
    return [one for one in found if isinstance(one, dict)]
