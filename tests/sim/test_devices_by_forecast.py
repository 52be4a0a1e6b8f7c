"""Machines by forecast, simulated: with a boot of half a minute, they are there when a rising load needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.planner import device_forecast
from lamina.sim.run import run
from lamina.sim.scenario import read

SCENARIO = """
[scenario]
seed = 3
boot = "30s"
duration = "110s"

[[device]]
kind = "gpu"
units = 8
memory = "16GiB"
count = 2
max = 12
family = "gpu"

[[function]]
name = "f"
gpu = "must"
share = 0.125
slo = "2s"
max_batch = 1
scale = { min = 2, max = 40 }
load = "1s"

[function.profile.gpu]
batch = [1]
p50_ms.1 = [400.0]

[[load]]
target = "f"
shape = "ramp"
from = 20
stages = [["90s", 90], ["20s", 90]]
"""


def in_time(tmp_path: Path) -> float:
    """Share of calls in time."""
    file = tmp_path / "rising.toml"
    file.write_text(SCENARIO)
    return run(read(file)).total.attainment


@pytest.mark.slow
def test_a_rising_load_finds_its_machines_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ahead = in_time(tmp_path)
    monkeypatch.setattr(device_forecast, "MOST", 1.0)  # the load of now is all that counts
    late = in_time(tmp_path)
    assert ahead > 0.97 and ahead > late
