"""What `docs/reference/scenarios.md` says about scenario files is complete and true."""

from __future__ import annotations

import re

import pytest

from lamina.sim import scenario
from lamina.sim import scenario_sections as sections
from lamina.sim.scenario import parse

from .conftest import ROOT, SCENARIOS

TEXT = (ROOT / "docs/reference/scenarios.md").read_text()
KEYS = {
    *scenario._ABOUT,
    *sections._DEVICE_KEYS,
    *sections._DEVICE_LIMITS,
    *sections._FUNCTION_KEYS,
    *sections._LOAD_KEYS,
    *sections.SHAPES,
    *(key for keys in sections.SHAPES.values() for key in keys),
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
