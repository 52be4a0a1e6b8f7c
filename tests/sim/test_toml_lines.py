from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.sim.toml_lines import find_lines

from .conftest import SCENARIOS

TEXT = '''\
top = 1
[a]
x = "a # [not] a comment = at all"   # but this is [one]
"quoted key".deep = [1,
  2, # two
  { y = 3,   z = [
    "}",
  ] },
]
long = """
[b]
fake = 1
"""
after_long = true
[[rows]]
n = 1
[rows.inner]
m = 'C:\\'
[[rows]]
n = 2
[rows.inner]
m = 3
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 1),
        (("a",), 2),
        (("a", "x"), 3),
        (("a", "quoted key", "deep"), 4),
        (("a", "quoted key", "deep", 0), 4),
        (("a", "quoted key", "deep", 1), 5),
        (("a", "quoted key", "deep", 2, "y"), 6),
        (("a", "quoted key", "deep", 2, "z", 0), 7),
        (("a", "long"), 10),
        (("a", "after_long"), 14),
        (("rows", 0), 15),
        (("rows", 0, "n"), 16),
        (("rows", 0, "inner", "m"), 18),
        (("rows", 1), 19),
        (("rows", 1, "inner", "m"), 22),
    ],
)
def test_a_value_is_found_on_its_line(path: tuple[str | int, ...], line: int):
    tomllib.loads(TEXT)  # the scanner is promised a valid text
    assert find_lines(TEXT)[path] == line


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from paths(inner, (*path, place))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_value_of_every_scenario_has_a_line_that_mentions_it(file: Path):
    text = file.read_text()
    lines, rows = find_lines(text), text.splitlines()
    for path in paths(tomllib.loads(text)):
        if path and isinstance(path[-1], str):
            assert path[-1] in rows[lines[path] - 1]
        else:
            assert path in lines
