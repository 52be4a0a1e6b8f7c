"""Syntax trees of the package, parsed once in a process: several tests look at all of it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "lamina"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of `ast.walk`, which takes longer than what the tests do with it."""
    return tuple(ast.walk(tree))


@cache
def all_files() -> tuple[Path, ...]:
    return tuple(sorted(SRC.rglob("*.py")))
