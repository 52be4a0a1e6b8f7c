"""Three wings of the core: scheduling is whole without workflows and tenancy, and the heart stays small enough to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[2] / "src" / "lamina" / "core"

MAY_IMPORT = {
    "scheduling": {"scheduling"},
    "tenancy": {"tenancy", "scheduling"},
    "workflow": {"workflow", "scheduling"},
}
"""Of the wings. What lies above them (events, actions, the interface of policies, lifecycles) all may import."""


def imports(path: Path) -> Iterator[str]:
    """Modules of the core that this one imports, for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lamina.core"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("lamina.core"))


def test_wings_import_only_what_they_may():
    wrong = [
        f"{path.relative_to(CORE)} imports {imported}"
        for wing, allowed in MAY_IMPORT.items()
        for path in (CORE / wing).glob("*.py")
        for imported in imports(path)
        if (room := imported.split(".")[2]) in MAY_IMPORT.keys() - allowed or room == "controller"
    ]
    assert wrong == []


def test_controller_and_scheduling_can_be_read_in_an_hour():
    files = [CORE / "controller.py", *(CORE / "scheduling").glob("*.py")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 2_890
