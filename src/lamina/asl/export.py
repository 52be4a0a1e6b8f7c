"""Export of flows as documents."""

from __future__ import annotations

from typing import Any

from lamina.asl.fields import EXTENDED, EXTENDED_TOP, Dialect
from lamina.asl.paths import member_path
from lamina.core.workflow.flow import Each, Flow, Node, Parallel
from lamina.errors import BadFlow


def is_asl_flow(flow: Flow) -> bool:
    """Whether a flow was written as states, as a document or with the builder."""
    return isinstance(flow.data, dict) and "asl" in flow.data


def to_document(flow: Flow, dialect: Dialect = "extended") -> dict[str, Any]:
    """The document this flow was made of. `strict` refuses what only the extended dialect can say."""
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
    if not is_asl_flow(flow):
        raise BadFlow(
            f"workflow {flow.name!r} is traced from Python: its steps run as their values arrive, and states run in turn",
            hint="write it with the builder to export it",
        )
    states = {name: _state(node) for name, node in flow.nodes.items()}
    return {**flow.data["asl"], "StartAt": flow.start[0], "States": states}


def _state(node: Node) -> dict[str, Any]:
    state = dict(node.data["asl"])
    if isinstance(node, Parallel):
        state["Branches"] = [_machine(branch) for branch in node.branches]
    elif isinstance(node, Each):
        state[node.data["body"]] = _machine(node.body)
    return state
