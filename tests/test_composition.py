"""Composition: objects are complete when they are made. Files that wire assign no attributes of other objects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "lamina"
WIRING = ["bootstrap.py", "gateway/bootstrap.py", *(f"cli/{path.name}" for path in sorted((SRC / "cli").glob("*.py")))]


def assigned_attributes(source: str) -> list[str]:
    """`line: target` of every assignment to an attribute, but for an object's own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            found += [
                f"{node.lineno}: {ast.unparse(part)}" for part in parts if isinstance(part, ast.Attribute) and not _is_own(part)
            ]
    return found


def _is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


@pytest.mark.parametrize("file", WIRING)
def test_nothing_is_assigned_to_an_object_after_it_was_made(file: str):
    assert assigned_attributes((SRC / file).read_text(encoding="utf-8")) == []


def test_assignments_of_all_kinds_are_found():
    source = (
        "a.b = 1\nc.d += 1\ne.f, g = 1, 2\nsetattr(h, 'i', 1)\n\nclass A:\n    def __init__(self) -> None:\n        self.x = 1\n"
    )
    assert assigned_attributes(source) == ["1: a.b", "2: c.d", "3: e.f", "4: setattr(h, 'i', 1)"]
