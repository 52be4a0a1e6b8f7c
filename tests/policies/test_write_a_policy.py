"""`docs/how-to/write-a-policy.md` shows the file that is in `examples/policies/`, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

from lamina.sim import scenario
from lamina.sim.run import run

ROOT = Path(__file__).parents[2]
SHOWN = ROOT / "examples/policies/shortest.py"


def test_the_page_shows_the_file():
    page = (ROOT / "docs/how-to/write-a-policy.md").read_text()
    [first, *_] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert first == SHOWN.read_text()


def test_the_file_keeps_every_invariant_under_load():
    overload = scenario.read(ROOT / "scenarios/overload.toml")
    assert run(overload, str(SHOWN), calls=4_000, check=True).total.answered > 0
