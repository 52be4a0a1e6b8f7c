"""OpenAPI paths of state and billing."""

from __future__ import annotations

from typing import Any

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
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


def paths() -> dict[str, Any]:
    changed = ("400", "404", "409", "413", "415", "503")
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
        "/v1/bill": {
            "get": _operation("bill", "What calls have cost", [_query("from"), _query("to"), _query("by")], "400", "403", "503")
            | {"description": "Days are 2026-05-01, in UTC; `by` is some of day, tenant, target, or day and function"},
        },
        "/openapi.json": {"get": _operation("openapi", "This document", [])},
        "/": {"get": _operation("index", "Where things are", [])},
    }


def _query(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


def _operation(name: str, what: str, parameters: list[Any], *bad: str, good: str = "200") -> dict[str, Any]:
    return {
        "summary": what,
        "operationId": name,
        "parameters": parameters,
        "responses": {
            good: {"description": "OK", "content": {"application/json": {}}} if good == "200" else {"description": "Done"},
            **{status: {"description": "Problem", "content": _PROBLEM} for status in bad},
        },
    }
