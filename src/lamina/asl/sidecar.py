"""Sidecar file of a document: GPU, SLO and scaling per state, which no document may hold.

    {"states": {"Tag": {"share": 0.25, "gpu": "may", "memory_mib": 3072, "slo": {"latency_us": 120000}}}}

Fields are those of `FunctionSpec`; a document stays valid elsewhere, and its side file is simply left behind.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from lamina.asl.document import inner_machines, parse_document
from lamina.asl.errors import BadDocument, LintProblem
from lamina.asl.paths import member_path
from lamina.core.workflow.flow import Flow
from lamina.types import FunctionSpec

_KEPT = ("name", "max_queue")
CLAUSE = "Side file"


def write_sidecar(flow: Flow, specs: dict[str, FunctionSpec]) -> str:
    """Write the sidecar: what differs from the defaults, for every task of a flow."""
    usual = msgspec.to_builtins(FunctionSpec(name=""))
    states: dict[str, Any] = {}
    for task in flow.tasks():
        given = msgspec.to_builtins(specs[task.function])
        states[task.name] = {key: value for key, value in given.items() if key not in _KEPT and value != usual[key]}
    return json.dumps({"states": states}, indent=2) + "\n"


def read_sidecar(text: str, document: dict[str, Any], source: str = "") -> dict[str, dict[str, Any]]:
    """Read a sidecar: per state the fields to replace. A state the document lacks is an error: its needs would be lost."""
    side = parse_document(text, source)
    states = side.get("states") if isinstance(side, dict) else None
    if not isinstance(states, dict):
        raise BadDocument([LintProblem("$.states", CLAUSE, "must be an object keyed by state")], source)
    tasks = _tasks(document)
    problems: list[LintProblem] = []
    found: dict[str, dict[str, Any]] = {}
    for name, fields in states.items():
        at = member_path("$.states", name)
        if name not in tasks:
            problems.append(LintProblem(at, CLAUSE, f"the document has no Task state {name!r}"))
            continue
        try:
            spec = msgspec.convert({**fields, "name": name}, FunctionSpec)
            unknown = sorted(fields.keys() - set(FunctionSpec.__struct_fields__) | fields.keys() & set(_KEPT))
            if unknown:
                problems.append(LintProblem(at, CLAUSE, f"there is no field {unknown[0]!r}"))
            found[name] = {key: getattr(spec, key) for key in fields if key not in unknown}
        except (msgspec.ValidationError, TypeError) as error:
            problems.append(LintProblem(at, CLAUSE, str(error)))
    if problems:
        raise BadDocument(problems, source)
    return found


def _tasks(document: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, state in document["States"].items():
        if state["Type"] == "Task":
            found.add(name)
        for inner in inner_machines(state):
            found |= _tasks(inner)
    return found
