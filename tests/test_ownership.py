"""State has one writer: fields are assigned by the module of their class, and registers of the core by one module each.

An `ast` test over the product. It knows names, not types: an assignment `x.attr = ...`, where `x` is not `self`, is a foreign
write if `attr` is a field of some class of the package and none of the classes that have it is defined in the same module.
That also finds objects that are completed after their construction.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.source_trees import SRC, all_files, nodes_of, tree_of

LEFT_OUT = ("published", "lab")
"""Baselines and experiments."""

NOT_OURS = {
    "gpu/driver.py": {"self._pages.type", "location.type", "location.id"},
    "gpu/device_telemetry.py": {"question.metrics[0].id"},
    "gpu/weights.py": {"tensor.data"},
}
"""Writes to objects of libraries whose fields happen to be called like some of ours: structs of CUDA and NVML, torch tensors."""

WRITERS = {
    "functions": "core/rolling_update.py",
    "devices": "core/scheduling/cluster.py",
    "instances": "core/scheduling/cluster.py",
    "batches": "core/scheduling/cluster.py",
    "runs": "core/scheduling/jobs.py",
    "waiting": "core/scheduling/queues.py",
    "deferred": "core/scheduling/queues.py",
    "backlogged": "core/scheduling/queues.py",
}
"""Registers of `ControllerState`, and who adds and removes."""

MUTATORS = {"pop", "popitem", "popleft", "append", "appendleft", "extend", "insert", "clear", "update", "setdefault", "discard"}


@dataclass
class Module:
    path: str
    tree: ast.Module
    classes: dict[str, set[str]] = field(default_factory=dict)  #: class -> its fields

    @property
    def fields(self) -> set[str]:
        return {name for fields in self.classes.values() for name in fields}


def read(path: Path) -> Module:
    module = Module(str(path.relative_to(SRC)), tree_of(path))
    for node in nodes_of(module.tree):
        if isinstance(node, ast.ClassDef):
            module.classes[node.name] = set(fields_of(node))
    return module


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.FunctionDef):
            yield from (target.attr for target in writes(inner) if is_self(target.value))


def writes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, also by `+=` and as part of a tuple."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def changes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes with containers that are changed in place: `x.attr[k] = v`, `del x.attr[k]`, `x.attr.pop(k)`; also by a local
    name for one."""
    for function in [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
        local: dict[str, ast.Attribute] = {}
        for node in nodes_of(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and isinstance(node.targets[0], ast.Name):
                local[node.targets[0].id] = node.value
        for node in nodes_of(function):
            changed: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                changed = node.func.value
            if isinstance(changed, ast.Name):
                changed = local.get(changed.id)
            if isinstance(changed, ast.Attribute):
                yield changed


def is_state(node: ast.expr) -> bool:
    """`state` or `self._state`: the one of the controller."""
    return (isinstance(node, ast.Name) and node.id == "state") or (isinstance(node, ast.Attribute) and node.attr == "_state")


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    paths = [path for path in all_files() if path.relative_to(SRC).parts[0] not in LEFT_OUT]
    return [read(path) for path in paths]


@pytest.fixture(scope="module")
def owners(modules: list[Module]) -> dict[str, set[str]]:
    """By field: the modules of classes that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.fields:
            found[name].add(module.path)
    return found


def foreign_writes(module: Module, owners: dict[str, set[str]]) -> list[str]:
    return [
        f"{module.path}:{target.lineno} writes {ast.unparse(target)}, a field of {', '.join(sorted(owners[target.attr])[:3])}"
        for target in writes(module.tree)
        if not is_self(target.value)
        and owners.get(target.attr)
        and module.path not in owners[target.attr]
        and ast.unparse(target) not in NOT_OURS.get(module.path, ())
    ]


def test_a_field_is_assigned_by_the_module_of_its_class_alone(modules: list[Module], owners: dict[str, set[str]]):
    assert [wrong for module in modules for wrong in foreign_writes(module, owners)] == []


def test_what_is_said_to_be_of_libraries_is_still_written(modules: list[Module]):
    written = {module.path: {ast.unparse(target) for target in writes(module.tree)} for module in modules}
    assert {path: names - written[path] for path, names in NOT_OURS.items() if names - written[path]} == {}


def test_fields_of_the_core_are_assigned_in_the_core_alone(modules: list[Module]):
    own = defaultdict(set)
    for module in modules:
        for name in module.fields:
            own[name].add(module.path.split("/")[0])
    wrong = [
        f"{module.path}:{target.lineno} writes {ast.unparse(target)}"
        for module in modules
        if not module.path.startswith("core/")
        for target in writes(module.tree)
        if not is_self(target.value) and own[target.attr] == {"core"}
    ]
    assert wrong == []


def test_containers_of_the_core_are_changed_by_their_class_or_their_one_writer(modules: list[Module]):
    core = [module for module in modules if module.path.startswith("core/")]
    fields = {name for module in core for name in module.fields}
    wrong = [
        f"{module.path}:{target.lineno} changes {ast.unparse(target)}"
        for module in core
        for target in changes(module.tree)
        if target.attr in fields
        and not is_self(target.value)
        and target.attr not in module.fields
        and not (is_state(target.value) and WRITERS.get(target.attr) == module.path)
    ]
    assert wrong == []


def test_registers_of_the_state_have_one_writer(modules: list[Module]):
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in changes(module.tree) if module.path.startswith("core/") else ():
            if is_state(target.value) and target.attr in WRITERS:
                found[target.attr].add(module.path)
    assert found == {name: {path} for name, path in WRITERS.items()}


def test_a_write_into_another_module_is_found():
    owner = Module("a.py", ast.parse("class A:\n    def __init__(self):\n        self.x = 1\n"))
    owner.classes["A"] = {"x"}
    poker = Module("b.py", ast.parse("def poke(a):\n    a.x = 2\n"))
    assert foreign_writes(poker, {"x": {"a.py"}}) == ["b.py:2 writes a.x, a field of a.py"]
