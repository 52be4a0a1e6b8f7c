"""Fields of a TOML file: on which line an error is said to be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lamina.sim.toml_fields import Field, find_lines

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
b
fake
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
        (("a", "long"), 10),
        (("a", "after_long"), 14),
        (("rows", 0), 15),
        (("rows", 0, "n"), 16),
        (("rows", 0, "inner", "m"), 18),
        (("rows", 1), 19),
        (("rows", 1, "inner", "m"), 22),
        (("rows", 1, "inner", "m", 3, "deep"), 22),
        (("rows", 1, "not there"), 19),
    ],
)
def test_a_value_is_found_on_its_line_or_that_of_the_key_it_belongs_to(path: tuple[str | int, ...], line: int):
    tomllib.loads(TEXT)
    assert Field("it.toml", find_lines(TEXT), path, None).line == line


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_section_and_key_of_every_scenario_has_a_line_that_mentions_it(file: Path):
    text = file.read_text()
    lines, rows = find_lines(text), text.splitlines()
    for section, value in tomllib.loads(text).items():
        for place, table in enumerate(value) if isinstance(value, list) else ((None, value),):
            for key in table:
                path = (section, key) if place is None else (section, place, key)
                assert key in rows[lines[path] - 1]
