"""OpenAPI paths of the protocol, with a schema of its own for every model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lamina.gateway.oip.model_catalog import ServedModel, port_dtype
from lamina.sdk.tensors import Port

_ERROR = {
    "description": "Error",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}},
}
_PROBLEMS = ("400", "401", "403", "404", "405", "408", "413", "429", "431")
_CALL_PROBLEMS = (*_PROBLEMS, "500", "503", "504")
_PARAMETERS = {
    "type": "object",
    "properties": {
        "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds to answer in, or refuse at once"},
        "priority": {"type": "integer", "minimum": 0, "description": "1 is the most urgent, 0 the default"},
        "binary_data_output": {"type": "boolean"},
    },
}
_ELEMENTS = {"BOOL": {"type": "boolean"}, "BYTES": {"type": "string"}}


def paths(models: Iterable[ServedModel]) -> dict[str, Any]:
    """Paths of these models, and those of none."""
    found = {
        "/v2": {"get": _read("v2_server", "About this server")},
        "/v2/health/live": {"get": _read("v2_live", "The process is alive")},
        "/v2/health/ready": {"get": _read("v2_ready", "It takes calls")},
        "/v2/models/stats": {"get": _read("v2_stats", "Statistics of all models")},
        "/v2/repository/index": {"post": _index()},
    }
    first: dict[str, ServedModel] = {}
    for model in models:
        first.setdefault(model.name, model)
    for name, model in first.items():
        base = f"/v2/models/{name}"
        found |= {
            base: {"get": _read(f"v2_metadata_{name}", f"Inputs and outputs of {name}")},
            f"{base}/ready": {"get": _read(f"v2_ready_{name}", f"Is {name} loaded?")},
            f"{base}/config": {"get": _read(f"v2_config_{name}", f"Configuration of {name}")},
            f"{base}/stats": {"get": _read(f"v2_stats_{name}", f"Statistics of {name}")},
            f"{base}/infer": {"post": _infer(model)},
            f"{base}/generate": {"post": _generate(model, "generate", "application/json")},
            f"{base}/generate_stream": {"post": _generate(model, "generate_stream", "text/event-stream")},
            f"/v2/repository/models/{name}/load": {"post": _change(name, "load")},
            f"/v2/repository/models/{name}/unload": {"post": _change(name, "unload")},
        }
    return found


def _answers(kind: str, *problems: str) -> dict[str, Any]:
    return {"200": {"description": "OK", "content": {kind: {}}}, **dict.fromkeys(problems, _ERROR)}


def _read(name: str, summary: str, *more: str) -> dict[str, Any]:
    return {"summary": summary, "operationId": name, "responses": _answers("application/json", *_PROBLEMS, *more)}


def _body(schema: dict[str, Any], required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _index() -> dict[str, Any]:
    wish = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    read = _read("v2_index", "Models, and whether they are loaded")
    return {**read, "requestBody": _body(wish, required=False)}


def _change(name: str, verb: str) -> dict[str, Any]:
    responses = _answers("application/json", *_PROBLEMS, "503")
    return {"summary": f"{verb.title()} {name}", "operationId": f"v2_{verb}_{name}", "responses": responses}


def _infer(model: ServedModel) -> dict[str, Any]:
    inputs = [_input(model, port) for port in model.signature.inputs]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "inputs": {"type": "array", "items": {"anyOf": inputs} if inputs else {}, "maxItems": len(inputs)},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"enum": [port.name for port in model.signature.outputs]}},
                    "required": ["name"],
                },
            },
        },
        "required": ["inputs"],
    }
    body = _body(schema)
    body["content"]["application/octet-stream"] = {}  # JSON with raw tensors behind it, as a header tells
    answers = _answers("application/json", *_CALL_PROBLEMS)
    answers["200"]["content"]["application/octet-stream"] = {}
    return {"summary": f"Call {model.name}", "operationId": f"v2_infer_{model.name}", "requestBody": body, "responses": answers}


def _input(model: ServedModel, port: Port) -> dict[str, Any]:
    dtype = port_dtype(port)
    lengths = [{"const": size} if size >= 0 else {"type": "integer", "minimum": 0} for size in model.shape(port)]
    return {
        "type": "object",
        "properties": {
            "name": {"const": port.name},
            "datatype": {"const": dtype},
            "shape": {"type": "array", "prefixItems": lengths, "minItems": len(lengths), "maxItems": len(lengths)},
            "data": {"type": "array", "items": _element(dtype)},
        },
        "required": ["name", "datatype", "shape", "data"],
    }


def _element(dtype: str) -> dict[str, Any]:
    return _ELEMENTS.get(dtype) or {"type": "integer" if "INT" in dtype else "number"}


def _generate(model: ServedModel, verb: str, kind: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            port.name: {}
            if port.tensor is None
            else {"anyOf": [one := _element(port_dtype(port)), {"type": "array", "items": one}]}
            for port in model.signature.inputs
        },
        "required": [port.name for port in model.signature.inputs if port.required],
    }
    return {
        "summary": f"Call {model.name} with plain values",
        "operationId": f"v2_{verb}_{model.name}",
        "requestBody": _body(schema),
        "responses": _answers(kind, *_CALL_PROBLEMS),
    }
