"""JSON Schemas of annotations: what a request and a result look like to a client, for OpenAPI and for the fields of forms.

msgspec knows dataclasses, structs, typed dicts, enums and all that is built of them; models that validate themselves (pydantic's)
say what they look like. Each schema stands alone: what it refers to is under its own `$defs`.
"""

from __future__ import annotations

import collections.abc
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgspec

if TYPE_CHECKING:
    from lamina.sdk.tensors import Tensor

Schema = dict[str, Any]

DEFS = "#/$defs/"
_STREAMS = (collections.abc.AsyncIterator, collections.abc.AsyncIterable)
_NUMBERS = {"BO": "boolean", "BY": "string", "IN": "integer", "UI": "integer"}  #: by how names of dtypes begin


def schema_of(hint: Any) -> Schema:
    """The schema of an annotation; {} where it says nothing that JSON has a word for."""
    if hint is None or hint is Any:
        return {}
    if get_origin(hint) in _STREAMS:
        return {"type": "array", "items": schema_of(get_args(hint)[0]) if get_args(hint) else {}}
    if get_origin(hint) is Annotated:
        from lamina.sdk.tensors import Tensor

        tensor = next((note for note in get_args(hint)[1:] if isinstance(note, Tensor)), None)
        if tensor is not None:
            return _tensor_schema(tensor)
    try:
        (schema,), components = msgspec.json.schema_components([hint], schema_hook=_schema_hook, ref_template=DEFS + "{name}")
    except Exception:  # a type that has no JSON form, or a model of a library that cannot say its own
        return {}
    defs = dict(components)
    schema = _without_local_defs(schema, defs)
    for name in list(defs):
        defs[name] = _without_local_defs(defs[name], defs)
    return {**schema, "$defs": defs} if defs else schema


def _tensor_schema(tensor: Tensor) -> Schema:
    """Nested lists of numbers; JSON Schema has no word for a shape, so it is told to the reader."""
    kind = tensor.dtype
    schema: Schema = {"type": _NUMBERS.get(kind[:2], "number")}
    for size in reversed(tensor.shape):
        schema = {"type": "array", "items": schema} | ({"minItems": size, "maxItems": size} if size >= 0 else {})
    return schema | {"description": f"{kind} of shape {list(tensor.shape)}"}


def _schema_hook(kind: type) -> Schema:
    """Schemas of classes that msgspec does not know."""
    if hasattr(kind, "model_json_schema"):
        found: Schema = kind.model_json_schema(ref_template=DEFS + "{model}")
        return found
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


def _choices(schema: Schema) -> list[Schema]:
    options = schema.get("anyOf")
    return [one for one in (options if isinstance(options, list) else [schema]) if isinstance(one, dict)]
