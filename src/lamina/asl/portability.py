"""Portability report: what a document would do differently on another engine, line by line. Nothing here is an error."""

from __future__ import annotations

import json
from typing import Any

from lamina.asl.compile import inner_machines
from lamina.asl.export import extended_fields
from lamina.asl.paths import member_path

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
    lines = text.splitlines()
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
            if resource.endswith((".sync", ".sync:2", ".waitForTaskToken")):
                found.append((at, "Resource", "waits for a job or a token elsewhere; here it is an ordinary call"))
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


def _line(lines: list[str], path: str, field: str) -> int:
    """Line of the field, or of its state: searched downwards, name by name, since each contains the next."""
    at = 0
    for name in [part.strip("'\"") for part in path.replace("[", ".").replace("]", "").split(".")[1:]] + [field]:
        for number in range(at, len(lines)):
            if f'"{name}"' in lines[number]:
                at = number
                break
    return at + 1
