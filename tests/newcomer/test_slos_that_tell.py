"""SLOs that tell: an impossible one is refused with the measured time, refusals are logged, and offers are in the error."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import cli
from lamina.core.actions import Reject
from lamina.core.workflow.flow import competing_flow
from lamina.errors import Refused
from lamina.gateway.observability.logs import RefusalLog
from lamina.gateway.routes.problems import rejection_problem
from lamina.planner.slo_check import IMPOSSIBLE, slo_shortfalls
from lamina.testing import Server
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
WORKFLOW = (
    APP
    + """
@app.workflow(slo="{workflow_slo}")
def twice(x: float) -> float:
    return nap(nap(x))
"""
)


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


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_workflow_is_told_of_where_its_longest_path_is_over_its_slo(slo_us: int, a_us: int, b_us: int) -> None:
    app = lamina.App("steps")

    @app.function()
    def a(x: float) -> float:
        return x

    @app.function()
    def b(x: float) -> float:
        return x

    @app.workflow(slo=f"{slo_us}us")
    def chain(x: float) -> float:
        return a(b(x))

    @app.workflow(slo=f"{slo_us}us")
    def fork(x: float) -> list[float]:
        return [a(x), b(x)]

    flows = app.deployed().flows
    found = {one.target: one for one in slo_shortfalls([], [("a", 1, float(a_us)), ("b", 1, float(b_us))], flows)}
    for name, takes_us in (("chain", a_us + b_us), ("fork", max(a_us, b_us))):
        assert (name in found) == (takes_us > slo_us)
        if name in found:
            assert found[name].takes_us == takes_us and found[name].is_impossible == (takes_us >= IMPOSSIBLE * slo_us)


def test_a_function_with_competing_bodies_is_as_fast_as_the_fastest() -> None:
    flow = competing_flow("f", ["slow", "fast"], Slo(latency_us=10))
    assert slo_shortfalls([], [("slow", 1, 900.0), ("fast", 1, 5.0)], [flow]) == []


@pytest.mark.live
@pytest.mark.parametrize(
    ("source", "told"),
    [
        (APP.format(slo="2ms", takes=0.05), r"nap: SLO 2ms, and one request takes ([\d.]+)ms"),
        (
            WORKFLOW.format(slo="10s", takes=0.03, workflow_slo="20ms"),
            r"twice: SLO 20ms, and its longest path takes ([\d.]+)ms on idle devices",
        ),
    ],
)
def test_an_impossible_slo_is_refused_at_the_start_with_the_measured_time(source: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(source)
    words = ["serve", "app.py", "--port", "0", "--store", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "lamina", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    measured = re.search(told, done.stderr)
    assert measured and float(measured[1]) >= 50 and "--slo-check warn" in done.stderr


@pytest.mark.live
@pytest.mark.parametrize(
    ("source", "told", "least_ms"),
    [
        (APP.format(slo="1ms", takes=0.05), r"SLO 1ms, and one request takes ([\d.]+)ms", 50),
        (
            WORKFLOW.format(slo="10s", takes=0.03, workflow_slo="20ms"),
            r"twice: SLO 20ms, and its longest path takes ([\d.]+)ms",
            60,
        ),
    ],
)
def test_a_deployment_with_an_impossible_slo_is_taken_back(source: str, told: str, least_ms: int, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.format(slo="10s", takes=0.0))

    async def work() -> tuple[str, int]:
        async with managed(app, tmp_path / "kept", probe=True) as server:
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            await server.deploy("slow", source)
            while not (about := (await server.ask("GET", "/v1/apps")).json[0])["failed"]:
                await asyncio.sleep(0.02)
            return about["failed"], about["version"]

    failed, version = run(work)
    measured = re.search(told, failed)
    assert version == 0 and measured and float(measured[1]) >= least_ms


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
        "nude: refused 1 call: 1 deadline; 43ms could be met",
    ]


def test_an_slo_that_cannot_be_met_is_told_once_with_the_refusals(caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = Counted()
    spec = FunctionSpec(name="nude", slo=Slo(latency_us=2_000))
    log = RefusalLog(metrics, lambda target: slo_shortfalls([spec], [("nude", 1, 41_000.0)]))
    with caplog.at_level(logging.WARNING, "lamina.request"):
        for count in (1, 2):
            metrics.counts = {"nude": {"deadline": count}}
            log.poll()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "nude: SLO 2ms, and one request takes 41ms on 1 unit (measured): all of its calls would be refused"
    ]


@pytest.mark.live
def test_a_function_that_scales_to_zero_says_that_its_slo_cannot_be_met_after_its_first_call() -> None:
    app = lamina.App("slow")

    @app.function(slo="2ms")
    def nap(x: float) -> float:
        time.sleep(0.05)
        return x

    with Server(app) as server:
        assert server.client.call("nap", {"x": 1.0}) == 1.0  # the first is served, however late
        with pytest.raises(Refused) as refused:
            server.client.call("nap", {"x": 1.0})
        with urllib.request.urlopen(f"{server.url}/v1/functions/nap") as answer:
            about = json.load(answer)
    assert "on an idle server, so trying again does not help" in str(refused.value) and not refused.value.retry_after_s
    assert about["slo_ms"] == 2.0 and about["takes_ms"] >= 50


@pytest.mark.live
def test_a_workflow_that_was_served_is_offered_the_time_it_takes_even_if_its_deadline_is_over_on_arrival() -> None:
    app = lamina.App("steps")

    @app.function(scale=lamina.Scale(min=1))
    def nap(x: float) -> float:
        time.sleep(0.02)
        return x

    @app.workflow(slo="10s")
    def twice(x: float) -> float:
        return nap(nap(x))

    with Server(app) as server:
        for _ in range(3):
            server.client.call("twice", {"x": 1.0})
        with pytest.raises(Refused) as refused:
            server.client.call("twice", {"x": 1.0}, deadline="10us")
    assert (refused.value.offer_ms or 0) >= 40


def test_what_is_not_known_of_a_refused_call_is_left_out() -> None:
    told = json.loads(rejection_problem(Reject("c1", "deadline")).body())
    assert not {"offer_ms", "price", "retry_after_s"} & set(told)


def test_doctor_checks_an_app(tmp_path: Path) -> None:
    (tmp_path / "ill.py").write_text(
        WORKFLOW.format(slo="1ms", takes=0.02, workflow_slo="5ms")
        + "\n\n@app.function()\nclass Model:\n    def load(self):\n        open('/no/weights')\n"
        + "    def __call__(self, x):\n        return x\n\n\n@app.function()\ndef fine(x):\n    return x\n"
    )
    result = CliRunner().invoke(cli.root, ["doctor", str(tmp_path / "ill.py")], standalone_mode=False)
    assert result.return_value == 1
    lines = {line.split()[1]: line for line in result.output.splitlines()}
    assert lines["nap"].startswith("FAIL") and "one request takes 2" in lines["nap"]
    assert lines["twice"].startswith("FAIL") and "its longest path takes 4" in lines["twice"]
    assert lines["model"].startswith("FAIL") and "/no/weights" in lines["model"]
    assert lines["fine"].startswith("ok") and "not timed" in lines["fine"]
