"""OpenAPI paths of durable runs."""

from __future__ import annotations

from typing import Any

_RUN = {"$ref": "#/components/schemas/Run"}
_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{24}$"}}

HEADERS = (
    ("Prefer", "string", "respond-async: answer 202 when the run is on disk, and keep it"),
    ("Idempotency-Key", "string", "With Prefer: the same key and body start one run, another body is a conflict"),
)

ACCEPTED = {
    "description": "The run is on disk; Location says where to look for it",
    "headers": {"Location": {"schema": {"type": "string"}}},
    "content": {"application/json": {"schema": _RUN}},
}

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "state": {"enum": ["queued", "running", "succeeded", "failed", "cancelled"]},
        "kind": {"enum": ["function", "workflow"]},
        "target": {"type": "string"},
        **{f"{what}_us": {"type": "integer"} for what in ("created", "began", "ended", "deadline")},
        "retries": {"type": "integer"},
        "problem": {"$ref": "#/components/schemas/Problem"},
    },
    "required": ["id", "state", "kind", "target"],
}


def paths() -> dict[str, Any]:
    listed = {"type": "object", "properties": {"runs": {"type": "array", "items": _RUN}, "next": {"type": ["string", "null"]}}}
    told = {"allOf": [_RUN, {"type": "object", "properties": {"events": {"type": "array", "items": {"type": "object"}}}}]}
    filters = (("target", "string"), ("state", "string"), ("before", "string"), ("limit", "integer"))
    waited = [_query("wait_ms", "integer")]
    return {
        "/v1/runs": {"get": _operation("runs", "Runs, the newest first", listed, [_query(*one) for one in filters])},
        "/v1/runs/{id}": {"get": _operation("run", "One run", _RUN, [_ID], "404")},
        "/v1/runs/{id}/result": {
            "get": _operation("run_result", "Its result, or its problem; 202 while there is none", {}, [_ID, *waited], "404")
        },
        "/v1/runs/{id}/history": {"get": _operation("run_history", "What happened, and when", told, [_ID], "404")},
        "/v1/runs/{id}/cancel": {"post": _operation("run_cancel", "Cancel it", _RUN, [_ID], "404", "409")},
        "/v1/runs/{id}/retry": {
            "post": _operation("run_retry", "Go on from where it failed", _RUN, [_ID], "404", "409", good="202")
        },
    }


def _query(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": kind}}


def _operation(name: str, what: str, schema: Any, parameters: list[Any], *bad: str, good: str = "200") -> dict[str, Any]:
    return {
        "summary": what,
        "operationId": name,
        "parameters": parameters,
        "responses": {
            good: {"description": "OK", "content": {"application/json": {"schema": schema}}},
            **{status: {"description": "Problem", "content": _PROBLEM} for status in (*bad, "400", "503")},
        },
    }
