"""Transports stand on their own: `lamina.server` imports nothing of the domain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "src" / "lamina" / "server"
ALLOWED = ("lamina.server", "lamina.errors", "lamina.units", "lamina.ipc.event_loop")


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: str(path.relative_to(SERVER)))
def test_it_imports_nothing_of_the_domain(path: Path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    imported += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    ours = [name for name in imported if name.partition(".")[0] == "lamina"]
    assert [name for name in ours if not name.startswith(ALLOWED)] == []
    assert "lamina" not in ours, "import the module that is meant"
