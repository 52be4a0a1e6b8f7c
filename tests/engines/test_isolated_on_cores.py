"""Process isolation on a machine without a GPU: each instance has a process anyway, and no slice is reserved for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.bootstrap import open_local
from tests.gpu.test_slice_mode import write_app

pytestmark = pytest.mark.live

APP = """import lamina
app = lamina.App("alone")

@app.function(gpu=lamina.GPU("1/4", isolated=True))
def plain(x): return x

@app.function(gpu=lamina.GPU("1/4", isolated=True), home=True)
def kept(x): return x
"""


@pytest.mark.parametrize(("gpu", "homes"), [("no", {"kept"}), ("null", {"plain", "kept"})])
def test_isolated_functions_have_a_home_where_there_is_a_gpu_or_they_asked_for_one(tmp_path: Path, gpu: str, homes: set[str]):
    app = open_local(str(write_app(tmp_path, APP)), gpu=gpu).app
    assert {name for name, function in app.functions.items() if function.spec.home} == homes
