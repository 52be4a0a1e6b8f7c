"""Rules of the house that a machine can check: who may import whom, and what nobody may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "lamina"

LAYERS = (
    ("cli", "ui"),
    ("gateway", "lab", "profiler", "testing", "load"),
    ("sim", "live", "access"),
    ("policies", "predict", "gpu", "sdk", "store"),
    ("planner", "asl"),
    ("core",),
)
"""From the top; imports point down. Names of one layer never import each other."""

GROUND = ("types", "units", "errors", "plugins", "values", "expr")
"""Below everything; these may import each other."""

RANK = {name: rank for rank, names in enumerate((*LAYERS, GROUND)) for name in names}
CORE_MAY_NOT = {"time", "asyncio", "random", "threading", "socket", "os", "datetime", "subprocess", "multiprocessing", "secrets"}
NOBODY_MAY_IMPORT = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
NOBODY_MAY_CALL = {"eval", "exec", "compile", "__import__"}
NOBODY_MAY_LOAD_WITH = {"torch", "numpy", "np", "yaml", "pickle"}
LATE = {"numpy", "matplotlib", "rich", "torch", "onnxruntime", "cv2", "PIL", "rapidocr"}

MODULES = sorted(SRC.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(("lamina", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


def top_of(module: str) -> str:
    """`lamina.core.state` belongs to core; `lamina` itself to nobody."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Everything imported anywhere in a module, with full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively; write the whole name"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def for_type_checkers(tree: ast.AST) -> set[ast.stmt]:
    """Statements under `if TYPE_CHECKING:`."""
    found: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found.update(inner for branch in node.body for inner in ast.walk(branch) if isinstance(inner, ast.stmt))
    return found


def at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    todo: list[ast.stmt] = list(tree.body)
    skipped = for_type_checkers(tree)
    while todo:
        node = todo.pop()
        if node in skipped or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        todo += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]


@pytest.fixture(params=MODULES, ids=name_of)
def module(request: pytest.FixtureRequest) -> tuple[str, ast.Module]:
    path: Path = request.param
    return name_of(path), ast.parse(path.read_text(encoding="utf-8"))


def test_imports_point_down(module: tuple[str, ast.Module]):
    name, tree = module
    own = top_of(name)
    if own in ("", "__main__"):
        return  # the public face of the package may look at everything
    assert own in RANK, f"{own} is in no layer; add it to LAYERS"
    type_only = for_type_checkers(tree)
    for imported, statement in imports(tree, name):
        other = top_of(imported) if imported.startswith("lamina.") else ""
        if other in ("", "__version__", own) or (own in GROUND and other in GROUND):
            continue
        assert other in RANK, f"{name} imports {imported}, which is in no layer"
        sideways = RANK[other] == RANK[own]
        assert RANK[other] > RANK[own] or (sideways and statement in type_only), f"{name} must not import {imported}"


def test_the_core_knows_no_clock_no_dice_and_no_machine(module: tuple[str, ast.Module]):
    name, tree = module
    if top_of(name) in ("core", "planner"):
        used = {imported.split(".")[0] for imported, _ in imports(tree, name)}
        assert not used & CORE_MAY_NOT


def test_nothing_that_could_run_what_it_reads(module: tuple[str, ast.Module]):
    name, tree = module
    assert not {imported.split(".")[0] for imported, _ in imports(tree, name)} & NOBODY_MAY_IMPORT
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in NOBODY_MAY_CALL, f"{name}:{node.lineno} calls {node.func.id}"
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            risky = node.func.attr in ("load", "loads") and node.func.value.id in NOBODY_MAY_LOAD_WITH
            assert not risky, f"{name}:{node.lineno} calls {node.func.value.id}.{node.func.attr}"
        allowed = [word.value for word in node.keywords if word.arg == "allow_pickle"]
        assert not [value for value in allowed if not isinstance(value, ast.Constant) or value.value]


def test_a_module_says_what_it_is_for(module: tuple[str, ast.Module]):
    name, tree = module
    assert ast.get_docstring(tree), f"{name} has no docstring"


def test_only_the_command_line_prints(module: tuple[str, ast.Module]):
    name, tree = module
    if top_of(name) != "cli":
        prints = [
            n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
        ]
        assert not prints, f"{name} prints in line {prints}"


def test_heavy_libraries_are_imported_when_they_are_needed_and_not_before(module: tuple[str, ast.Module]):
    name, tree = module
    early = set()
    for statement in at_import(tree):
        if isinstance(statement, ast.Import):
            early |= {alias.name.split(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            early.add(statement.module.split(".")[0])
    assert not early & LATE, f"{name} imports {early & LATE} at once"


def test_every_module_postpones_its_annotations(module: tuple[str, ast.Module]):
    name, tree = module
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign) for node in tree.body):
        assert "__future__.annotations" in {imported for imported, _ in imports(tree, name)}, name
