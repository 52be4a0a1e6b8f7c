"""Docs run, and nothing users can name is missing from them."""

from __future__ import annotations

import linecache
import re
import sys
import typing
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import pytest

from lamina import errors, plugins, policies
from lamina.cli import root
from lamina.core.actions import Action
from lamina.core.events import Event
from lamina.core.lifecycle import INSTANCE_TRANSITIONS, JOB_TRANSITIONS, NODE_TRANSITIONS, RUN_TRANSITIONS, mermaid

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "data", "deploy", "docs", "examples", "profiles", "results", "scenarios", "src")
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("[!d]*/*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
    ]
)
EVERY_PAGE = sorted(page for where in ("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS)) for page in ROOT.glob(where))
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
BLOCK = re.compile(r"(?<!<!-- not run -->\n)^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```.*$", re.MULTILINE)
NOT_OPTIONS = {"order"}
"""How a policy wants its queues sorted."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall(page.read_text())
    monkeypatch.chdir(ROOT)
    module = ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for number, block in enumerate(blocks, 1):
        name = f"{page.name}, block {number}"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)  # workflows are read from their source
        exec(compile(block, name, "exec"), module.__dict__)


def test_every_link_into_the_repository_leads_somewhere() -> None:
    """To a file, and to a heading where it names one: what a strict build of the site checks, also on pages beside it."""
    wrong = []
    for page in EVERY_PAGE:
        for target, heading in LINK.findall(without_blocks(page)):
            file = page.parent / target if target else page
            if not file.exists() or (heading and file.suffix == ".md" and heading not in headings(file)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{heading}")
    assert wrong == []


def test_a_heading_is_linked_as_the_site_names_it() -> None:
    assert slug("`Cache`, first (really)") == "cache-first-really"
    assert slug("What [it](is.md) -- costs") == "what-it-costs"


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def headings(page: Path) -> set[str]:
    return {slug(title) for title in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)}


def slug(title: str) -> str:
    said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", said).strip().lower())


def test_a_block_names_its_language_and_no_more() -> None:
    """The site takes one with other words behind it for text, and all that follows, up to the next, for code."""
    fences = {f"{page.relative_to(ROOT)}: {line}" for page in EVERY_PAGE for line in FENCE.findall(page.read_text())}
    assert {line for line in fences if not re.fullmatch(r".*: *```(\w[\w+-]*)?", line)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)`", page.read_text()))
    assert (
        sorted(
            file
            for file in named
            if not any((top / file).exists() for top in (ROOT / "src" / "lamina", ROOT)) and "mine" not in file
        )
        == []
    )


def test_lifecycles_are_drawn_as_the_tables_have_them() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    for table in (INSTANCE_TRANSITIONS, JOB_TRANSITIONS, RUN_TRANSITIONS, NODE_TRANSITIONS):
        assert mermaid(table) in page


def commands() -> list[tuple[str, click.Command]]:
    context = click.Context(root)
    found = []
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        found.append((name, command))
    return found


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_and_option_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    command = dict(commands())[name]
    assert f"lamina {name}" in page
    names = (name, "serve") if name == "dev" else (name,)  # which takes all options of the other
    section = "".join(page.split(f"## `lamina {one}")[1].split("\n## ")[0] for one in names)
    inner = command.commands if isinstance(command, click.Group) else {}
    for verb, one in {"": command, **inner}.items():
        assert one.help, f"{name} {verb} has no help"
        assert verb in section, f"{name} {verb}"
        for param in one.params:
            if isinstance(param, click.Option):
                for option in param.opts:
                    assert option in section, f"{option} of {name} {verb}"


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+)", (docs / "README.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert pages - linked == {"README.md"}


def test_every_page_but_decisions_is_in_the_navigation_of_the_site() -> None:
    docs, site = ROOT / "docs", (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.parent.name != "decisions"]
    assert [page for page in pages if not re.search(rf" {re.escape(page)}$", site, re.MULTILINE)] == []


def test_every_event_and_action_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    for kind in (*typing.get_args(Event), *typing.get_args(Action)):
        assert f"`{kind.__name__}`" in page, kind


def test_every_policy_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "policies.md").read_text()
    for name in plugins.names("policies"):
        assert f"`{name}`" in page


def test_every_option_of_a_policy_is_in_a_row_of_that_policy() -> None:
    told: dict[str, set[str]] = defaultdict(set)
    for line in (ROOT / "docs" / "reference" / "policies.md").read_text().splitlines():
        if line.startswith("| `"):
            first, _, rest = line.removeprefix("| ").partition(" | ")
            for name in re.findall(r"`(\w+)`", first):
                told[name] |= set(re.findall(r"`(\w+)`", rest))
    options = {name: {field.name for field in fields(policies.build(name)) if field.init} for name in plugins.names("policies")}
    assert {name: own - told[name] for name, own in options.items() if own - told[name] - NOT_OPTIONS} == {}


def test_every_error_code_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "http.md").read_text()
    todo: list[type[errors.LaminaError]] = [errors.LaminaError]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("lamina."):
            assert f"`{kind.code}`" in page, kind


def test_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for code in ("| 0 |", "| 1 |", "| 2 |", "| 3 |", "| 4 |", "| 130 |"):
        assert code in page
