"""Composition root: a fresh server has imported what its first calls need before it listens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FRESH = """
import asyncio, json, sys

import lamina
from lamina import encoding, policies
from lamina.bootstrap import open_emulated
from lamina.predict.profile import Point, Profile
from lamina.types import call_for

app = lamina.App("fresh")


@app.function(gpu=lamina.GPU(0.25), batch=4)
def detect(image):
    return image


@app.function(gpu=lamina.GPU(0.25), batch=4)
def read(box):
    return box


@app.workflow(slo=lamina.SLO("10s"))
def page(image):
    return read(detect(image))


def profile(name):
    sizes = [(batch, units) for batch in (1, 2, 4) for units in (1, 8, 66)]
    points = tuple(Point(batch=batch, units=units, p50_us=1_000 * batch, p99_us=1_200 * batch) for batch, units in sizes)
    return Profile(function=name, device="h200", points=points, load_us=1_000)


async def main():
    runtime = open_emulated(app, "h200", [profile("detect"), profile("read")], policy=policies.build(sys.argv[1]), seed=1)
    await runtime.start()
    before = set(sys.modules)
    driver, ended = runtime.driver, asyncio.get_running_loop().create_future()
    slo = app.workflows["page"].flow.slo
    driver.submit(call_for("c1", "page", driver.now_us(), slo), {"image": encoding.encode(1)}, ended.set_result)
    ending = await asyncio.wait_for(ended, 60)
    print(json.dumps({"ending": type(ending).__name__, "imported": sorted(set(sys.modules) - before)}))
    await driver.stop(1.0)


asyncio.run(main())
"""


def first_call(tmp_path: Path, policy: str) -> dict[str, object]:
    script = tmp_path / "fresh.py"
    script.write_text(FRESH)
    done = subprocess.run([sys.executable, str(script), policy], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.live
def test_the_first_workflow_call_of_a_fresh_server_imports_nothing(tmp_path: Path):
    """Importing numpy takes longer than most SLOs allow: at the first call it made a fresh server miss its first deadline."""
    assert first_call(tmp_path, "frontier") == {"ending": "Reply", "imported": []}
