"""Syntax trees of the package, parsed once in a process: several tests look at all of it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "lamina"


@contextmanager
def no_garbage() -> Iterator[None]:
    """Trees are kept, and have no garbage: with a search for some after every few hundred nodes they take four times as long,
    and later each search by another test would look at all of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
@no_garbage()
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
@no_garbage()
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of `ast.walk`, which takes longer than what the tests do with it."""
    return tuple(ast.walk(tree))


@cache
def all_files() -> tuple[Path, ...]:
    return tuple(sorted(SRC.rglob("*.py")))
