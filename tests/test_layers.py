"""Import layers and forbidden calls, checked over the whole package."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.source_trees import SRC, all_files, nodes_of, tree_of

LAYERS = (
    ("lab",),
    ("cli",),
    ("testing",),
    ("gateway", "load"),
    ("bootstrap", "asl_local_run"),
    ("profiler",),
    ("cluster",),
    ("engines",),
    ("state",),
    ("sim", "durable", "gpu", "published"),
    ("drivers", "worker", "access"),
    ("policies", "predict", "values", "server"),
    ("planner", "ipc", "store"),
    ("sdk",),
    ("asl", "kernels"),
    ("core",),
)
"""From the top; imports point down. Names of one layer never import each other."""

GROUND = ("types", "units", "errors", "plugins", "encoding", "expr")
"""Below everything; these may import each other."""

RANK = {name: rank for rank, names in enumerate((*LAYERS, GROUND)) for name in names}
CORE_MAY_NOT = {"time", "asyncio", "random", "threading", "socket", "os", "datetime", "subprocess", "multiprocessing", "secrets"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_LOADERS = {"torch", "numpy", "np", "yaml", "pickle"}
LATE = {"numpy", "matplotlib", "rich", "torch", "onnxruntime", "cv2", "PIL", "rapidocr"}


@dataclass(frozen=True)
class Module:
    """What the rules ask about."""

    name: str
    imports: list[tuple[str, bool]]  #: anywhere, with full names, and whether for type checkers alone
    early: set[str]  #: libraries that come along when it is imported
    calls: list[tuple[int, str]]  #: line, and what is called, as far as it is a name, or a name of a name
    pickles: list[int]  #: lines that allow it
    says_what_for: bool
    postpones: bool  #: its annotations, or it has none

    @property
    def top(self) -> str:
        return top_of(self.name)

    @property
    def uses(self) -> set[str]:
        return {imported.split(".")[0] for imported, _ in self.imports}


def top_of(module: str) -> str:
    """`lamina.core.scheduling.state` belongs to core; `lamina` itself to nobody."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def read(path: Path) -> Module:
    name = ".".join(("lamina", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
    tree = tree_of(path)
    nodes = nodes_of(tree)
    type_only = for_type_checkers(nodes)
    imports = [(imported, node in type_only) for node in nodes for imported in imported_by(node, name)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    has_annotations = any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign) for node in tree.body)
    return Module(
        name,
        imports,
        {imported.split(".")[0] for node in at_import(tree, type_only) for imported in imported_by(node, name)},
        [(node.lineno, called(node.func)) for node in calls],
        [node.lineno for node in calls if any(word.arg == "allow_pickle" and not is_false(word.value) for word in node.keywords)],
        bool(ast.get_docstring(tree)),
        not has_annotations or ("__future__.annotations", False) in imports,
    )


def imported_by(node: ast.AST, module: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, f"{module} imports relatively; write the whole name"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def called(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def for_type_checkers(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`."""
    ifs = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {inner for node in ifs for branch in node.body for inner in ast.walk(branch)}


def at_import(tree: ast.Module, type_only: set[ast.AST]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if node in type_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        todo += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = [read(path) for path in all_files()]
    assert len(found) > 300, "where is the code?"
    return found


def test_imports_point_down(modules: list[Module]):
    assert [wrong for module in modules for wrong in wrong_way(module)] == []


def wrong_way(module: Module) -> Iterator[str]:
    own = module.top
    if own in ("", "__main__"):
        return  # the public face of the package may look at everything
    assert own in RANK, f"{own} is in no layer; add it to LAYERS"
    for imported, is_for_types in module.imports:
        other = top_of(imported) if imported.startswith("lamina.") else ""
        if other in ("", "__version__", own) or (own in GROUND and other in GROUND):
            continue
        assert other in RANK, f"{module.name} imports {imported}, which is in no layer"
        if RANK[other] < RANK[own] or (RANK[other] == RANK[own] and not is_for_types):
            yield f"{module.name} must not import {imported}"


def test_the_core_knows_no_clock_no_dice_and_no_machine(modules: list[Module]):
    pure = [module for module in modules if module.top in ("core", "planner")]
    assert [(module.name, found) for module in pure if (found := module.uses & CORE_MAY_NOT)] == []


def test_nothing_that_could_run_what_it_reads(modules: list[Module]):
    risky = FORBIDDEN_CALLS | {f"{library}.{verb}" for library in FORBIDDEN_LOADERS for verb in ("load", "loads")}
    assert [(module.name, found) for module in modules if (found := module.uses & FORBIDDEN_IMPORTS)] == []
    assert [f"{module.name}:{line} calls {what}" for module in modules for line, what in module.calls if what in risky] == []
    assert [f"{module.name}:{line} allows pickles" for module in modules for line in module.pickles] == []


def test_a_module_says_what_it_is_for(modules: list[Module]):
    assert [module.name for module in modules if not module.says_what_for] == []


def test_only_the_command_line_prints(modules: list[Module]):
    others = [module for module in modules if module.top != "cli"]
    assert [f"{module.name}:{line}" for module in others for line, what in module.calls if what == "print"] == []


def test_heavy_libraries_are_imported_when_they_are_needed_and_not_before(modules: list[Module]):
    assert [(module.name, found) for module in modules if (found := module.early & LATE)] == []


def test_every_module_postpones_its_annotations(modules: list[Module]):
    assert [module.name for module in modules if not module.postpones] == []


def code_lines(path: Path) -> int:
    """Lines with code on them: no docstrings, comments and blank lines."""
    nodes = nodes_of(tree_of(path))
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    said = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    return len({line for token in tokens if token.type in kinds for line in range(token.start[0], token.end[0] + 1)} - said)


def test_the_heart_is_read_in_an_hour():
    """CONTRIBUTING says: about 2,000 lines of code. A feature enters the controller as an object of its own."""
    heart = [SRC / "core" / "controller.py", *(SRC / "core" / "scheduling").glob("*.py")]
    assert 1_500 < sum(map(code_lines, heart)) < 2_200
