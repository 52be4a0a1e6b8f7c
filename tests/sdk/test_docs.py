"""The page about the SDK runs: its blocks, in order, as one program."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import lamina

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sdk.md"
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
    return [(options.strip(), text) for options, text in BLOCK.findall(PAGE.read_text())]


def test_the_blocks_run_in_order(blocks: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "page.py"
    file.write_text("\n".join(text for options, text in blocks if options == ""))
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(file))["app"].name == "vision"


def test_the_blocks_that_need_a_server_are_python_too(blocks: list[tuple[str, str]]):
    marked = [text for options, text in blocks if options == "no-run"]
    assert marked
    for text in marked:
        ast.parse(text)


def test_every_block_is_marked_one_way_or_the_other(blocks: list[tuple[str, str]]):
    assert {options for options, _ in blocks} == {"", "no-run"}


def test_every_public_name_is_on_the_page():
    text = PAGE.read_text()
    assert [name for name in lamina.__all__ if not re.search(rf"\b{name}\b", text)] == []
