"""Published systems and the lab stay apart: nothing in the product imports them; they are found by file name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from lamina import plugins
from tests.source_trees import SRC, all_files, nodes_of, tree_of

APART = ("published", "lab")


def imported(tree: ast.AST) -> list[str]:
    """Modules that are imported anywhere, also inside functions and for type checkers alone."""
    found: list[str] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.slow
def test_nothing_in_the_product_imports_published_systems_or_the_lab() -> None:
    wrong = [
        f"{path.relative_to(SRC)} imports {name}"
        for path in all_files()
        if path.relative_to(SRC).parts[0] not in APART
        for name in imported(tree_of(path))
        if name.split(".")[:1] == ["lamina"] and name.split(".")[1:2] and name.split(".")[1] in APART
    ]
    assert not wrong


def test_published_systems_do_not_need_the_lab() -> None:
    files = sorted((SRC / "published").rglob("*.py"))
    assert not [file for file in files for name in imported(tree_of(file)) if name.startswith("lamina.lab")]


@pytest.mark.live
def test_a_server_loads_neither() -> None:
    code = (
        "import sys, lamina, lamina.bootstrap, lamina.policies; lamina.policies.build('frontier');"
        "print(*[name for name in sys.modules if name.startswith(('lamina.published', 'lamina.lab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.live
def test_names_of_policies_are_listed_without_importing_them() -> None:
    code = (
        "import sys; from lamina import plugins; names = plugins.names('policies'); assert 'esg' in names and 'edf' in names;"
        "print(*[name for name in sys.modules if name.startswith('lamina.published')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_paper_has_a_readme_that_cites_it_and_says_what_was_changed() -> None:
    papers = [path for path in (SRC / "published").iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert len(papers) >= 8
    for paper in papers:
        text = (paper / "README.md").read_text(encoding="utf-8")
        for heading in (
            "## What is claimed",
            "## What is here",
            "## What we changed, and why",
            "## Which tests hold published facts",
        ):
            assert heading in text, f"{paper.name}: no {heading!r}"
        named = re.findall(r"`([\w./]+\.(?:py|md))`", text)
        lost = [name for name in named if not any((base / name).exists() for base in (paper, SRC, SRC.parent.parent))]
        there = [name for name in lost if not list((SRC.parent.parent / "tests" / "published" / paper.name).glob(name))]
        assert not there, f"{paper.name}: its README names what is not there"


def test_policies_are_product_or_of_a_paper() -> None:
    papers = plugins.papers()
    assert papers["esg"] == papers["orion"] == "esg"
    assert papers["kaas_rr"] == "kaas"
    assert "frontier" not in papers and set(papers) < set(plugins.names("policies"))
