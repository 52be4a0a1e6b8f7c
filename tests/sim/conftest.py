from __future__ import annotations

from pathlib import Path

import pytest

from lamina.sim.scenario import Scenario, parse

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
SCENARIOS = sorted((ROOT / "scenarios").glob("*.toml"))

SMALL = """\
[scenario]
name = "small"
seed = 4
duration = "2s"
policy = "fifo"

[[device]]
kind = "h200"

[[function]]
name = "a"
max_batch = 8
share = "1/4"
memory = "1GiB"
slo = "30ms"
scale = { min = 1 }
load = "20ms"
[function.profile.h200]
batch = [1, 8]
p50_ms.4 = [2.0, 6.0]

[[function]]
name = "b"
max_batch = 4
share = "1/2"
memory = "1GiB"
slo = "60ms"
load = "30ms"
[function.profile.h200]
batch = [1, 4]
p50_ms.8 = [4.0, 9.0]

[[load]]
target = "a"
rate = 400

[[load]]
target = "b"
shape = "gamma"
rate = 100
cv = 2.0
"""

PAGES = """\
[[workflow]]
name = "page"
slo = "200ms"

[[workflow.step]]
function = "a"

[[workflow.step]]
name = "parts"
after = ["a"]
each = { expect = 3, steps = [
  { name = "look", function = "b" },
  { name = "again", after = ["look"], choice = [{ odds = 0.3, steps = [{ name = "more", function = "a" }] }, { odds = 0.7 }] },
] }

[[load]]
target = "page"
rate = 50
"""


@pytest.fixture
def small() -> Scenario:
    """Two functions on one device, two seconds."""
    return parse(SMALL)


@pytest.fixture
def pages() -> Scenario:
    """The same, and a workflow with items and a choice over them."""
    return parse(SMALL + PAGES)
