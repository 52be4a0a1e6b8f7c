"""What `docs/scenarios.md` says about scenario files is complete and true."""

from __future__ import annotations

import re

import pytest

from lamina.sim import scenario
from lamina.sim.parts import devices, functions, loads
from lamina.sim.scenario import parse

from .conftest import ROOT, SCENARIOS

TEXT = (ROOT / "docs/scenarios.md").read_text()
KEYS = {
    *scenario._ABOUT,
    *devices._KEYS,
    *devices._LIMITS,
    *functions._KEYS,
    *functions._MORE,
    *loads._COMMON,
    *loads.SHAPES,
    *(key for keys in loads.SHAPES.values() for key in keys),
}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_field_is_explained(key: str):
    assert f"`{key}`" in TEXT


@pytest.mark.parametrize("name", [file.stem for file in SCENARIOS])
def test_every_scenario_is_listed(name: str):
    assert f"`{name}`" in TEXT


def test_the_small_scenario_can_be_read():
    block = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0]
    assert parse(block).functions[0].name == "resnet50"
