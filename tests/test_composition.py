"""Composition: objects are complete when they are made. Files that wire assign no attributes of other objects."""

from __future__ import annotations

import ast

import pytest

from tests.source_trees import SRC, all_files, nodes_of, tree_of

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


def test_two_drivers_run_the_controller_and_no_other_loop_does():
    """Replays, and the simulator's charge for deciding, hand events to a controller that a driver runs."""
    classes = [node for path in all_files() for node in nodes_of(tree_of(path)) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    assert {name for name, above in bases.items() if "Driver" in above} == {"RealtimeDriver", "VirtualDriver"}
    callers = {
        str(path.relative_to(SRC))
        for path in all_files()
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "handle"
        if ast.unparse(node.func.value).endswith("controller")
    }
    assert {one for one in callers if not one.startswith(("drivers/", "lab/"))} <= {"core/eventlog.py", "sim/decision_charge.py"}
    assert callers & {"drivers/driver.py", "drivers/realtime.py", "drivers/virtual.py"}


def test_slots_are_found_in_one_place():
    """Homes of instances, the bandwidth limit and followers are rules of slots: others ask `core/scheduling/slots.py`."""
    finders = {
        str(path.relative_to(SRC))
        for path in all_files()
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef) and node.name in ("slots", "free_slots", "upcoming_slots")
    }
    assert finders == {"core/scheduling/slots.py"}


def test_completion_times_rejections_and_arrivals_have_one_owner_each():
    """A second estimator, memory of rejections or arrival statistic would disagree with the first, and each would be right."""
    found = {"estimate": set[str](), "rejection": set[str](), "arrival": set[str]()}
    for path in all_files():
        file = str(path.relative_to(SRC))
        for node in nodes_of(tree_of(path)) if not file.startswith(("published/", "lab/")) else ():
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").endswith("estimate_us"):
                found["estimate"].add(file)
            elif isinstance(node, ast.ClassDef) and "Rejection" in node.name and "Cache" in node.name:
                found["rejection"].add(file)
            elif (
                isinstance(node, ast.ClassDef)
                and node.name.startswith("Arrival")
                and node.name.endswith(("Stats", "Rates", "Rate"))
            ):
                found["arrival"].add(file)
    assert found == {
        "estimate": {"policies/frontier/estimate.py"},
        "rejection": {"gateway/routes/rejection_cache.py"},
        "arrival": {"core/scheduling/state.py", "planner/arrival_rates.py"},  # bursts, and calmer averages over the same counts
    }


def test_small_files_are_few():
    """Of less than forty lines, but for package markers: a file is a thing that a reader looks for."""
    files = [path for path in all_files() if len(tree_of(path).body) > 1]
    small = [str(path.relative_to(SRC)) for path in files if len(path.read_text(encoding="utf-8").splitlines()) < 40]
    assert len(small) < 30, small
