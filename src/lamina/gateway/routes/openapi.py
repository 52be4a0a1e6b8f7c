"""OpenAPI document of a server, made from what is deployed: calls, durable runs, state, billing."""

from __future__ import annotations

import json
import re
from typing import Any

import lamina
from lamina.gateway.routes.targets import CallTarget
from lamina.sdk.binding import sole_param
from lamina.sdk.json_schema import DEFS, is_base64

_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_RUN = {"$ref": "#/components/schemas/Run"}
_CALL_HEADERS = (
    ("Lamina-Deadline-Ms", "number", "Answer within this time, or refuse at once"),
    ("Lamina-Priority", "integer", "From -10 to 10; higher is served first by policies that know priorities"),
    ("Lamina-Cost-Limit", "number", "Refuse if it would cost more"),
    ("Lamina-Objective", "string", "deadline, latency, cost or throughput"),
)
_RUN_HEADERS = (
    ("Prefer", "string", "respond-async: answer 202 when the run is on disk, and keep it"),
    ("Idempotency-Key", "string", "With Prefer: the same key and body start one run, another body is a conflict"),
)
_ANSWER_HEADERS = {
    "Lamina-Call-Id": "string",
    "Lamina-Latency-Ms": "number",
    "Lamina-Queue-Ms": "number",
    "Lamina-Batch": "integer",
    "Lamina-Slice": "string",
    "Lamina-Cost": "number",
    "Lamina-Cold-Start-Ms": "number",
    "Lamina-Retries": "integer",
}

_ACCEPTED = {
    "description": "The run is on disk; Location says where to look for it",
    "headers": {"Location": {"schema": {"type": "string"}}},
    "content": {"application/json": {"schema": _RUN}},
}

_RUN_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "state": {"enum": ["queued", "running", "succeeded", "failed", "cancelled", "quarantined"]},
        "kind": {"enum": ["function", "workflow"]},
        "target": {"type": "string"},
        **{f"{what}_us": {"type": "integer"} for what in ("created", "began", "ended", "deadline")},
        "retries": {"type": "integer"},
        "problem": {"$ref": "#/components/schemas/Problem"},
    },
    "required": ["id", "state", "kind", "target"],
}
_RUN_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{24}$"}}
_KEY = {"name": "key", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_WORKFLOW = {
    "name": "workflow",
    "in": "query",
    "required": False,
    "description": "The state of this workflow; left out, that of the app",
    "schema": {"type": "string"},
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "Only if this is still its version, as the ETag gave it",
    "schema": {"type": "string", "pattern": '^"?[0-9]+"?$'},
}


_TRIGGER = {
    "name": "trigger",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"},
}
_TRIGGER_SCHEMA = {
    "type": "object",
    "properties": {
        **{
            name: {"type": "string"}
            for name in ("target", "every", "cron", "zone", "on_change", "workflow", "broker", "topic", "overlap")
        },
        "input": {"type": "object"},
    },
    "required": ["target"],
    "additionalProperties": False,
}


def document(targets: list[CallTarget], more: dict[str, Any]) -> dict[str, Any]:
    """The document. `more` are paths of other protocols."""
    paths: dict[str, Any] = {
        path: {
            "get": {
                "summary": what,
                "operationId": name,
                "responses": {"200": {"description": "OK"}, **_problems(extra)},
            }
        }
        for path, what, name, extra in (
            ("/healthz", "The process is alive", "health", ()),
            ("/readyz", "It takes calls", "ready", ("503",)),
            ("/metrics", "Figures for Prometheus", "metrics", ()),
            ("/v1/functions", "What can be called", "functions", ()),
            ("/v1/workflows", "Workflows that can be called", "workflows", ()),
            ("/v1/status", "Devices, instances and queues now", "status", ()),
            ("/v1/profiles", "What was learnt of functions, devices and rates, for plans and simulations", "profiles", ()),
        )
    }
    paths["/v1/explain/{id}"] = {
        "get": {
            "summary": "History of a recent call or run: its batches, and the rule that delayed or rejected it",
            "operationId": "explain",
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 64}}],
            "responses": {"200": {"description": "OK"}, **_problems(("400", "404"))},
        }
    }
    paths |= _run_paths() | _state_paths() | _other_paths()
    shared = _SharedSchemas()
    for target in targets:
        paths[f"/v1/{target.kind}s/{target.name}"] = {"post": _call_operation(target, shared), "get": _about(target)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lamina", "version": lamina.__version__},
        "paths": paths | more,
        "security": [{}, {"token": []}],
        "components": {
            "schemas": {**shared.found, "Problem": _problem_schema(), "Run": _RUN_SCHEMA},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Needed beyond loopback"}},
        },
    }


def _run_paths() -> dict[str, Any]:
    listed = {"type": "object", "properties": {"runs": {"type": "array", "items": _RUN}, "next": {"type": ["string", "null"]}}}
    told = {"allOf": [_RUN, {"type": "object", "properties": {"events": {"type": "array", "items": {"type": "object"}}}}]}
    filters = (("target", "string"), ("state", "string"), ("before", "string"), ("limit", "integer"))
    waited, valued = [_query("wait_ms", "integer")], [_query("values", "integer")]
    return {
        "/v1/runs": {"get": _run_operation("runs", "Runs, the newest first", listed, [_query(*one) for one in filters])},
        "/v1/runs/{id}": {"get": _run_operation("run", "One run", _RUN, [_RUN_ID], "404")},
        "/v1/runs/{id}/result": {
            "get": _run_operation(
                "run_result", "Its result, or its problem; 202 while there is none", {}, [_RUN_ID, *waited], "404"
            )
        },
        "/v1/runs/{id}/history": {
            "get": _run_operation("run_history", "What happened, and when", told, [_RUN_ID, *valued], "404")
        },
        "/v1/runs/{id}/cancel": {"post": _run_operation("run_cancel", "Cancel it", _RUN, [_RUN_ID], "404", "409")},
        "/v1/runs/{id}/retry": {
            "post": _run_operation("run_retry", "Go on from where it failed", _RUN, [_RUN_ID], "404", "409", good="202")
        },
    }


def _run_operation(name: str, what: str, schema: Any, parameters: list[Any], *bad: str, good: str = "200") -> dict[str, Any]:
    """An operation with a body of `schema`; all of them need the store."""
    return _operation(name, what, parameters, *bad, "400", "503", good=good, content={"application/json": {"schema": schema}})


def _state_paths() -> dict[str, Any]:
    changed = ("400", "404", "409", "413", "415", "503", "507")
    return {
        "/v1/state": {
            "get": _operation("state", "Keys in their order", [_WORKFLOW, _query("prefix"), _query("after")], "400", "503")
        },
        "/v1/state/{key}": {
            "get": _operation("state_get", "A value and its version", [_KEY, _WORKFLOW], "400", "404", "503"),
            "put": _operation("state_put", "Put a value", [_KEY, _WORKFLOW, _IF_MATCH], *changed)
            | {"requestBody": {"required": True, "content": {"application/json": {"schema": {}}}}},
            "delete": _operation("state_delete", "Remove a key", [_KEY, _WORKFLOW, _IF_MATCH], *changed, good="204"),
        },
    }


def _other_paths() -> dict[str, Any]:
    graph = {"name": "graph", "in": "path", "required": True, "description": "Content hash", "schema": {"type": "string"}}
    return {
        "/v1/buffers": {
            "get": _operation("buffers", "Buffers of this tenant, by key", [_query("prefix"), _query("after")], "400")
        },
        "/v1/buffers/{key}": {
            "get": _operation("buffer_get", "An array, as bytes in C order", [_KEY], "400", "404"),
            "put": _operation("buffer_put", "Put an array", [_KEY, _query("dtype"), _query("shape")], "400", "413", "415", "507")
            | {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
            "delete": _operation("buffer_delete", "Remove a buffer", [_KEY], "400", "404", good="204"),
        },
        "/v1/triggers": {
            "get": _operation("triggers", "Triggers of apps, and those that were added", [_query("target")], "400", "503")
        },
        "/v1/triggers/{trigger}": {
            "get": _operation("trigger", "A trigger, and the messages it has set aside", [_TRIGGER], "404", "503"),
            "put": _operation("trigger_put", "Add a trigger", [_TRIGGER], "400", "404", "409", "503", good="201")
            | {"requestBody": {"required": True, "content": {"application/json": {"schema": _TRIGGER_SCHEMA}}}},
            "delete": _operation("trigger_delete", "Remove a trigger", [_TRIGGER], "404", "409", "503", good="204"),
        },
        "/v1/kernels": {"get": _operation("kernels", "Kernel graphs by content hash", [])},
        "/v1/kernels/{graph}": {
            "get": _operation("kernel", "Buffers of a kernel graph", [graph], "404"),
            "post": _operation("call_kernel", "Call a kernel graph", [graph], "400", "404", "408", "429", "500", "503", "504")
            | {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
        },
        "/v1/bill": {
            "get": _operation("bill", "What calls have cost", [_query("from"), _query("to"), _query("by")], "400", "403", "503")
            | {"description": "Days are 2026-05-01, in UTC; `by` is some of day, tenant, target, or day and function"},
        },
        "/openapi.json": {"get": _operation("openapi", "This document", [])},
        "/": {"get": _operation("index", "Where things are", [])},
    }


def _query(name: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": kind}}


def _operation(
    name: str, what: str, parameters: list[Any], *bad: str, good: str = "200", content: dict[str, Any] | None = None
) -> dict[str, Any]:
    succeeded: dict[str, Any] = {"description": "OK", "content": content or {"application/json": {}}}
    if good == "204":
        succeeded = {"description": "Done"}
    return {
        "summary": what,
        "operationId": name,
        "parameters": parameters,
        "responses": {good: succeeded, **_problems(bad)},
    }


MAX_TRACED = 64
"""Definitions of one annotation among which it is looked up what refers to what; of more, each stands for all."""


class _SharedSchemas:
    """Schemas that others refer to, under names of the whole document. Each annotation brings its own, and two apps may mean
    different things by one name: then the second has the name of its target before it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._names: dict[tuple[str, str], str] = {}  #: by the name they came with, and all that they say

    def share(self, target: CallTarget, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema with its `$defs` moved here. One that cannot be made sense of is {}: any."""
        try:
            defs = schema.get("$defs")
            if not isinstance(defs, dict):
                return schema
            names = {name: self._name(target, name, defs) for name in defs if _NAME.fullmatch(name)}
            for name, final in names.items():
                self.found.setdefault(final, _renamed(defs[name], names))
            made: dict[str, Any] = _renamed({key: inner for key, inner in schema.items() if key != "$defs"}, names)
            return made
        except RecursionError:
            return {}

    def _name(self, target: CallTarget, name: str, defs: dict[str, Any]) -> str:
        key = name, _all_said(name, defs)
        if key not in self._names:
            is_taken = name in ("Problem", "Run") or name in self.found or name in self._names.values()
            final = f"{target.name}.{name}" if is_taken else name
            while final in self.found or final in self._names.values():
                final += "_"
            self._names[key] = final
        return self._names[key]


def _all_said(name: str, defs: dict[str, Any]) -> str:
    """A definition together with all that it refers to, in one text. Of an enum the order and the type of its members do not
    matter: there msgspec and pydantic differ, for the same class."""
    said: dict[str, Any] = {}
    pending = [name] if len(defs) <= MAX_TRACED else list(defs)
    while pending:
        one = pending.pop()
        if one not in said and one in defs:
            said[one] = _canonical(defs[one], pending)
    return json.dumps(said, sort_keys=True, default=repr)


def _canonical(schema: Any, refers_to: list[str]) -> Any:
    if isinstance(schema, list):
        return [_canonical(inner, refers_to) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(ref := schema.get("$ref"), str):
        refers_to.append(ref.removeprefix(DEFS))
    if isinstance(schema.get("enum"), list):
        return {"enum": sorted(map(repr, schema["enum"])), "title": schema.get("title")}
    return {key: _canonical(inner, refers_to) for key, inner in schema.items()}


_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    """A schema that refers to the components of the document."""
    if isinstance(schema, list):
        return [_renamed(inner, names) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _renamed(inner, names) for key, inner in schema.items()}
    ref, told = made.get("$ref"), made.get("discriminator")
    if isinstance(ref, str):
        made["$ref"] = _component(ref, names)
    if isinstance(told, dict) and isinstance(told.get("mapping"), dict):
        mapping = {key: _component(ref, names) if isinstance(ref, str) else ref for key, ref in told["mapping"].items()}
        made["discriminator"] = {**told, "mapping": mapping}
    return made


def _component(ref: str, names: dict[str, str]) -> str:
    name = ref.removeprefix(DEFS)
    return f"#/components/schemas/{names.get(name, name)}" if ref.startswith(DEFS) else ref


def _call_operation(target: CallTarget, shared: _SharedSchemas) -> dict[str, Any]:
    """A call. Generated clients make one type of all that may come back, so it is told what a call without further ado sends and
    gets: no binary encodings, and durable runs for workflows alone (functions take the same headers)."""
    is_workflow = target.kind == "workflow"
    return {
        "summary": target.doc.strip().split("\n")[0] or f"Call {target.name}",
        "operationId": f"call_{target.kind}_{target.name}",
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": what, "schema": {"type": kind}}
            for name, kind, what in (*_CALL_HEADERS, *(_RUN_HEADERS if is_workflow else ()))
        ],
        "requestBody": {"content": _bodies(target, shared), "required": any(param.required for param in target.params)},
        "responses": {
            "200": {
                "description": "The result",
                "headers": {name: {"schema": {"type": kind}} for name, kind in _ANSWER_HEADERS.items()},
                "content": _results(target, shared),
            },
            **({"202": _ACCEPTED} if is_workflow else {}),
            **_problems(("400", "401", "403", "408", "409", "413", "415", "422", "429", "500", "503", "504")),
        },
    }


def _about(target: CallTarget) -> dict[str, Any]:
    return {
        "summary": f"About {target.name}",
        "operationId": f"about_{target.kind}_{target.name}",
        "responses": {"200": {"description": "OK", "content": {"application/json": {}}}},
    }


def _results(target: CallTarget, shared: _SharedSchemas) -> dict[str, Any]:
    schema = shared.share(target, target.returns)
    contents: dict[str, Any] = {"application/json": {"schema": schema} if schema else {}}
    if is_base64(target.returns):
        contents = {"application/octet-stream": {}}
    elif not schema:
        contents["application/octet-stream"] = {}
    if target.signature is not None and target.signature.streams:
        contents["text/event-stream"] = {"schema": {"type": "string"}}
    return contents


def _bodies(target: CallTarget, shared: _SharedSchemas) -> dict[str, Any]:
    """An object with the names of the parameters. (A bare value is taken too, where one is enough; a client that is generated has
    no use for two ways.) In a form, bytes are files."""
    schemas = {param.name: shared.share(target, param.schema) for param in target.params}
    bodies: dict[str, Any] = {}
    for kind in ("application/json", "multipart/form-data", "application/x-www-form-urlencoded"):
        is_form = kind != "application/json"
        bodies[kind] = {
            "schema": {
                "type": "object",
                "properties": {name: _in_form(schema) if is_form else schema for name, schema in schemas.items()},
                "required": [param.name for param in target.params if param.required],
                "additionalProperties": False,
            }
        }
    sole = sole_param(target.params)
    if sole is not None and (not sole.schema or is_base64(sole.schema)):
        bodies["application/octet-stream"] = {}
    return bodies


def _in_form(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field of a form, where bytes, and lists of them, are files."""
    if is_base64(schema):
        return {"type": "string", "format": "binary"}
    items = schema.get("items")
    return {**schema, "items": _in_form(items)} if isinstance(items, dict) and is_base64(items) else schema


def _problems(statuses: tuple[str, ...]) -> dict[str, Any]:
    return {
        status: {"description": "Problem", "content": {"application/problem+json": {"schema": _PROBLEM}}} for status in statuses
    }


def _problem_schema() -> dict[str, Any]:
    texts = {
        name: {"type": "string"}
        for name in ("type", "title", "detail", "code", "id", "hint", "reason", "step", "error", "trace", "leader")
    }
    return {
        "type": "object",
        "properties": {
            **texts,
            "status": {"type": "integer"},
            "offer_ms": {"type": "number"},
            "price": {"type": "number"},
            "retry_after_s": {"type": "number"},
            "errors": {
                "type": "array",
                "items": {"type": "object", "properties": {"field": {"type": "string"}, "message": {"type": "string"}}},
            },
        },
        "required": ["title", "status", "code", "id"],
    }
