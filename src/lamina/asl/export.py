"""Export of flows as documents, and what those would do differently on another engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lamina.asl.document import inner_machines
from lamina.asl.fields import EXTENDED, EXTENDED_TOP, Dialect
from lamina.asl.flow_export import export_flow
from lamina.asl.paths import member_path
from lamina.core.workflow.flow import Each, Flow, Node, Parallel
from lamina.errors import BadFlow


def is_asl_flow(flow: Flow) -> bool:
    """Whether a flow was written as states, as a document or with the builder."""
    return isinstance(flow.data, dict) and "asl" in flow.data


def to_document(
    flow: Flow, dialect: Dialect = "extended", params_of: Callable[[str], Sequence[str]] = lambda function: ()
) -> dict[str, Any]:
    """The document this flow was made of, or one that does the same as it does. `strict` refuses what only the extended dialect
    can say. `params_of` tells the parameters of a function."""
    if not is_asl_flow(flow):
        return export_flow(flow, params_of)
    document = _machine(flow)
    if dialect == "strict" and (found := extended_fields(document)):
        where, field = found[0]
        raise BadFlow(f"{where}: {field} is no part of the States Language", hint='export with dialect="extended"')
    return document


def extended_fields(document: dict[str, Any], path: str = "$") -> list[tuple[str, str]]:
    """Fields of a document that only the extended dialect has, with their paths."""
    found = [(path, key) for key in document if key in EXTENDED_TOP]
    for name, state in document["States"].items():
        at = member_path(f"{path}.States", name)
        found += [(at, key) for key in state if key in EXTENDED.get(state["Type"], ())]
        for index, branch in enumerate(state.get("Branches", ())):
            found += extended_fields(branch, f"{at}.Branches[{index}]")
        for key in ("ItemProcessor", "Iterator"):
            if key in state:
                found += extended_fields(state[key], f"{at}.{key}")
    return found


def _machine(flow: Flow) -> dict[str, Any]:
    states = {name: _state(node) for name, node in flow.nodes.items()}
    return {**flow.data["asl"], "StartAt": flow.start[0], "States": states}


def _state(node: Node) -> dict[str, Any]:
    state = dict(node.data["asl"])
    if isinstance(node, Parallel):
        state["Branches"] = [_machine(branch) for branch in node.branches]
    elif isinstance(node, Each):
        state[node.data["body"]] = _machine(node.body)
    return state


_SAYS = {
    "WaitForNumBranches": "only this and KNIX wait for some branches; elsewhere all are waited for",
    "PotentialNext": "only this and KNIX let a task choose where to go; elsewhere it goes to Next",
    "SessionFunction": "only KNIX has sessions; it is kept and does nothing here",
    "SessionFunctionParameters": "only KNIX has sessions; it is kept and does nothing here",
    "EnableCheckpoints": "only KNIX asks for checkpoints; it is kept and does nothing here",
    "AllowImmediateMessages": "only KNIX has immediate messages; it is kept and does nothing here",
}


def portability(document: dict[str, Any], text: str = "") -> list[str]:
    """Portability remarks: number of the line in `text`, JSON path, and what is different."""
    text = text or json.dumps(document, indent=2, ensure_ascii=False)
    lines = line_numbers(text)
    found = [(path, field, _SAYS[field]) for path, field in extended_fields(document)]
    found += _remarks(document, "$")
    return [f"{_line(lines, path, field)}: {path}: {field}: {remark}" for path, field, remark in found]


def _remarks(machine: dict[str, Any], path: str) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for name, state in machine["States"].items():
        at = member_path(f"{path}.States", name)
        if state["Type"] == "Task":
            resource = state["Resource"]
            if not resource.startswith("arn:"):
                found.append((at, "Resource", f"{resource!r} is a name of ours; elsewhere give it an ARN"))
            if resource.endswith((".sync", ".sync:2")):
                found.append((at, "Resource", "waits for a job elsewhere; here it is an ordinary call"))
            if "TimeoutSeconds" not in state and "TimeoutSecondsPath" not in state:
                found.append((at, "TimeoutSeconds", "none is given: none here, and a default of its own elsewhere"))
            if "Credentials" in state:
                found.append((at, "Credentials", "is kept and does nothing here"))
        if state["Type"] == "Map" and any(key.startswith("ToleratedFailure") for key in state):
            found.append((at, "ToleratedFailure", "failed items are left out of the output here"))
        for index, inner in enumerate(inner_machines(state)):
            key = (
                f"Branches[{index}]"
                if state["Type"] == "Parallel"
                else "ItemProcessor"
                if "ItemProcessor" in state
                else "Iterator"
            )
            found += _remarks(inner, f"{at}.{key}")
    return found


def _line(lines: dict[str, int], path: str, field: str) -> int:
    """Line of a field, or of its state where that has none."""
    own = [number for key, number in lines.items() if key.startswith(member_path(path, field))]
    return own[0] if own else lines.get(path, 1)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def line_numbers(text: str) -> dict[str, int]:
    """Line of every member and item of a JSON document, by its path."""
    found = {"$": 1}
    stack: list[tuple[str, bool, int]] = []  #: path, is it an object, and the index of an array's item
    path, line, at, key = "$", 1, 0, ""
    for token in _TOKEN.finditer(text):
        line += text.count("\n", at, token.start())
        at, word = token.start(), token.group()
        if stack and not stack[-1][1] and word not in ("]", ","):
            path = f"{stack[-1][0]}[{stack[-1][2]}]"
            found.setdefault(path, line)
        if word in "{[":
            stack.append((path, word == "{", 0))
            key = ""
        elif word in "}]":
            stack.pop()
            key = "" if stack else key
        elif word == ",":
            outer, is_object, index = stack[-1]
            stack[-1] = (outer, is_object, index + 1)
            key = ""
        elif word == ":" and stack and stack[-1][1]:
            path = member_path(stack[-1][0], json.loads(key))
            found.setdefault(path, line)
        elif stack and stack[-1][1] and not key:
            key = word
    return found
