"""OpenAPI document of a server, made from what is deployed."""

from __future__ import annotations

from typing import Any

import lamina
from lamina.gateway.routes import openapi_runs, openapi_state
from lamina.gateway.routes.targets import CallTarget
from lamina.sdk.binding import Param

_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_CALL_HEADERS = (
    ("Lamina-Deadline-Ms", "number", "Answer within this time, or refuse at once"),
    ("Lamina-Priority", "integer", "From -10 to 10; higher is served first by policies that know priorities"),
    ("Lamina-Cost-Limit", "number", "Refuse if it would cost more"),
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
        )
    }
    paths |= openapi_runs.paths() | openapi_state.paths()
    for target in targets:
        paths[f"/v1/{target.kind}s/{target.name}"] = {"post": _operation(target), "get": _about(target)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lamina", "version": lamina.__version__},
        "paths": paths | more,
        "security": [{}, {"token": []}],
        "components": {
            "schemas": {"Problem": _problem_schema(), "Run": openapi_runs.SCHEMA},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Needed beyond loopback"}},
        },
    }


def _operation(target: CallTarget) -> dict[str, Any]:
    return {
        "summary": target.doc.strip().split("\n")[0] or f"Call {target.name}",
        "operationId": f"call_{target.kind}_{target.name}",
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": what, "schema": {"type": kind}}
            for name, kind, what in (*_CALL_HEADERS, *openapi_runs.HEADERS)
        ],
        "requestBody": {"content": _bodies(target), "required": any(param.required for param in target.params)},
        "responses": {
            "200": {
                "description": "The result",
                "headers": {name: {"schema": {"type": kind}} for name, kind in _ANSWER_HEADERS.items()},
                "content": {"application/json": {}, "application/octet-stream": {}, "application/vnd.lamina.value": {}},
            },
            "202": openapi_runs.ACCEPTED,
            **_problems(("400", "401", "403", "408", "409", "413", "415", "422", "429", "500", "503", "504")),
        },
    }


def _about(target: CallTarget) -> dict[str, Any]:
    return {
        "summary": f"About {target.name}",
        "operationId": f"about_{target.kind}_{target.name}",
        "responses": {"200": {"description": "OK", "content": {"application/json": {}}}},
    }


def _bodies(target: CallTarget) -> dict[str, Any]:
    """One parameter: the body is it. Several: an object with their names."""
    named = {
        "type": "object",
        "properties": {param.name: _schema(param) for param in target.params},
        "required": [param.name for param in target.params if param.required],
        "additionalProperties": False,
    }
    bodies: dict[str, Any] = {
        "application/json": {"schema": _schema(target.params[0]) if len(target.params) == 1 else named},
        "multipart/form-data": {"schema": named},
        "application/vnd.lamina.value": {},
    }
    if len(target.params) == 1:
        bodies["application/octet-stream"] = {}
    return bodies


def _schema(param: Param) -> dict[str, Any]:
    return {"type": param.type} if param.type else {}


def _problems(statuses: tuple[str, ...]) -> dict[str, Any]:
    return {
        status: {"description": "Problem", "content": {"application/problem+json": {"schema": _PROBLEM}}} for status in statuses
    }


def _problem_schema() -> dict[str, Any]:
    texts = {
        name: {"type": "string"} for name in ("type", "title", "detail", "code", "id", "hint", "reason", "step", "error", "trace")
    }
    return {
        "type": "object",
        "properties": {
            **texts,
            "status": {"type": "integer"},
            "offer_ms": {"type": "number"},
            "retry_after_s": {"type": "number"},
        },
        "required": ["title", "status", "code", "id"],
    }
