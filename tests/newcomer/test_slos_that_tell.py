"""SLOs that tell: an impossible one is refused with the measured time, refusals are logged, and offers are in the error."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import cli
from lamina.errors import Refused
from lamina.gateway.observability.logs import RefusalLog
from lamina.planner.slo_check import IMPOSSIBLE, slo_shortfalls
from lamina.types import FunctionSpec, Slo
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run

SRC = str(Path(lamina.__file__).parent.parent)
APP = """
import time
import lamina
app = lamina.App("slow")

@app.function(slo="{slo}", scale=lamina.Scale(min=1))
def nap(x: float) -> float:
    time.sleep({takes})
    return x

def examples():
    return {{"nap": [1.0]}}
"""


@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(1, 8), st.integers(1, 10**6)), max_size=4))
def test_a_shortfall_is_told_where_the_best_measured_time_is_over_the_slo(slo_us: int, times: list[tuple[int, int]]) -> None:
    spec = FunctionSpec(name="f", slo=Slo(latency_us=slo_us))
    found = slo_shortfalls([spec], [("f", units, float(us)) for units, us in times])
    best = min((us for _, us in times), default=0)
    assert bool(found) == bool(slo_us and best > slo_us)
    if found:
        assert found[0].takes_us == best and found[0].is_impossible == (best >= IMPOSSIBLE * slo_us)


def test_late_answers_that_are_worth_something_make_no_shortfall() -> None:
    spec = FunctionSpec(name="f", slo=Slo(latency_us=10, on_miss="serve"))
    assert slo_shortfalls([spec], [("f", 1, 1000.0)]) == []


@pytest.mark.live
def test_an_impossible_slo_is_refused_at_the_start_with_the_measured_time(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.format(slo="2ms", takes=0.05))
    words = ["serve", "app.py", "--port", "0", "--store", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "lamina", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    measured = re.search(r"nap: SLO 2ms, and one request takes ([\d.]+)ms", done.stderr)
    assert measured and float(measured[1]) >= 50 and "--slo-check warn" in done.stderr


@pytest.mark.live
def test_a_deployment_with_an_impossible_slo_is_taken_back(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.format(slo="10s", takes=0.0))

    async def work() -> tuple[str, int]:
        async with managed(app, tmp_path / "kept", probe=True) as server:
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            await server.deploy("slow", APP.format(slo="1ms", takes=0.05))
            while not (about := (await server.ask("GET", "/v1/apps")).json[0])["failed"]:
                await asyncio.sleep(0.02)
            return about["failed"], about["version"]

    failed, version = run(work)
    assert version == 0 and "SLO 1ms" in failed and "one request takes 5" in failed


def test_the_offer_is_in_the_text_of_the_error() -> None:
    error = Refused("it could not be done in time", reason="deadline", offer_ms=43.21, hint="allow more time")
    assert "43.21 ms could be met" in str(error) and "allow more time" in str(error)


class Counted:
    """Metrics as far as the log of refusals reads them."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}

    def refusals(self) -> dict[str, dict[str, int]]:
        return {target: dict(reasons) for target, reasons in self.counts.items()}

    def last_offer_us(self, target: str) -> int:
        return 43_000


def test_refusals_are_logged_in_one_line_per_target_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = Counted()
    log = RefusalLog(metrics)
    with caplog.at_level(logging.INFO, "lamina.request"):
        metrics.counts = {"nude": {"deadline": 609, "queue-full": 2}}
        log.poll()
        log.poll()
        metrics.counts = {"nude": {"deadline": 610, "queue-full": 2}}
        log.poll()
    assert [record.getMessage() for record in caplog.records] == [
        "nude: refused 611 calls: 609 deadline, 2 queue-full; 43ms could be met",
        "nude: refused 1 calls: 1 deadline; 43ms could be met",
    ]


def test_doctor_checks_an_app(tmp_path: Path) -> None:
    (tmp_path / "ill.py").write_text(
        APP.format(slo="1ms", takes=0.02)
        + "\n\n@app.function()\nclass Model:\n    def load(self):\n        open('/no/weights')\n"
        + "    def __call__(self, x):\n        return x\n\n\n@app.function()\ndef fine(x):\n    return x\n"
    )
    result = CliRunner().invoke(cli.root, ["doctor", str(tmp_path / "ill.py")], standalone_mode=False)
    assert result.return_value == 1
    lines = {line.split()[1]: line for line in result.output.splitlines()}
    assert lines["nap"].startswith("FAIL") and "one request takes 2" in lines["nap"]
    assert lines["model"].startswith("FAIL") and "/no/weights" in lines["model"]
    assert lines["fine"].startswith("ok") and "not timed" in lines["fine"]
