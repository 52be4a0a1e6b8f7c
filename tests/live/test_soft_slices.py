"""Hard or soft: said once, at the start, and known to whoever cuts, plans or looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.gpu.opened import open_slicer
from lamina.live.gpu_lives import Life
from lamina.live.start import open_local
from tests.serving import write_app

APP = """
import lamina

app = lamina.App("soft")


@app.function(gpu=lamina.GPU("1/4"))
def f(x):
    return x
"""

both = pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])


@both
def test_planner_and_executor_are_told_the_same(tmp_path: Path, soft: bool):
    (gpu,) = open_local(str(write_app(tmp_path, APP)), gpu="null", soft=soft).loop.engine.gpus
    life = Life(gpu._ledger.open_worker(), gpu._ledger.open_device(lambda slot: None))
    assert gpu.device.limits.soft is gpu._setup(life).soft is soft


@both
@pytest.mark.parametrize("name", ["cpu", "null"])
def test_a_twin_is_opened_as_it_is_asked_for(name: str, soft: bool):
    assert open_slicer(name, soft=soft).device.limits.soft is soft
