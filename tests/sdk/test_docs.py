"""The page about the SDK runs: its blocks, in order, as one program."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import lamina

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sdk.md"
BLOCK = re.compile(r"^(<!-- not run -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> list[tuple[bool, str]]:
    """Whether each is run, and its text."""
    return [(not mark, text) for mark, text in BLOCK.findall(PAGE.read_text())]


def test_the_blocks_run_in_order(blocks: list[tuple[bool, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "page.py"
    file.write_text("\n".join(text for is_run, text in blocks if is_run))
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(file))["app"].name == "vision"


def test_the_blocks_that_need_a_server_are_python_too(blocks: list[tuple[bool, str]]):
    marked = [text for is_run, text in blocks if not is_run]
    assert marked
    for text in marked:
        ast.parse(text)


def test_every_block_is_found(blocks: list[tuple[bool, str]]):
    assert len(blocks) == len(re.findall(r"^```python", PAGE.read_text(), re.MULTILINE))


def test_every_public_name_is_on_the_page():
    text = PAGE.read_text()
    assert [name for name in lamina.__all__ if not re.search(rf"\b{name}\b", text)] == []
