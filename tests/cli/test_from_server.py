"""Plans and simulations that start from a running server: `profiles pull`, `plan --from-server`, `sim --from-server`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lamina
from lamina.cli import root
from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway
from lamina.predict import profile
from tests.serving import shared, write_app

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]

APP = """
import time

import lamina

app = lamina.App("busy")


@app.function(scale=lamina.Scale(min=1, max=1), slo="200ms", batch=4)
def ten(x):
    time.sleep(0.01)
    return x


@app.function(scale=lamina.Scale(max=1), slo="200ms")
def unused(x):
    return x


@app.workflow(slo="2s")
def twice(x):
    return ten(ten(x))
"""

SCENARIO = """
[scenario]
duration = "2s"
[[device]]
kind = "{kind}"
family = "cpu"
units = 2
memory = "8GiB"
[[function]]
name = "{name}"
load = "10ms"
slo = "200ms"
profile.{kind} = {{ batch = [1], p50_ms = {{ 1 = [150] }} }}
[[load]]
target = "{name}"
rate = 5
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("app"), APP)) as gateway:
        with lamina.Client(gateway.url) as client:
            for number in range(12):
                client.call("ten", {"x": number})
            for number in range(4):
                client.call("twice", {"x": number})
        yield gateway


def ask(*words: object) -> Any:
    return CliRunner().invoke(root, [str(word) for word in words], catch_exceptions=False)


def test_what_a_server_has_learnt_becomes_profile_files(server: Gateway, tmp_path: Path):
    said = ask("profiles", "pull", "--server", server.url, "--out", tmp_path / "learnt")
    [kind] = [device.kind for device in server.driver.engine.devices]
    found = profile.read(tmp_path / "learnt" / f"ten.{kind}.json")
    assert said.output.splitlines() == [f"{tmp_path}/learnt/ten.{kind}.json: {len(found.points)} points, learnt"]
    assert found.meta["source"] == "learnt" and found.meta["runs"] > 0 and found.load_us > 0  # drift starts afresh
    alone = next(point for point in found.points if point.batch == 1)
    assert 10_000 <= alone.p50_us <= alone.p99_us
    known = server.driver.controller.predictor.latency_us("ten", kind, 1, alone.units)
    assert alone.p99_us == pytest.approx(known, rel=0.5)


def test_a_server_is_simulated_as_it_is(server: Gateway):
    lines = [json.loads(line) for line in ask("sim", "--from-server", server.url, "--json").output.splitlines()]
    targets = {line["target"]: line for line in lines if line.get("kind") == "target" or "target" in line}
    assert {"ten", "twice"} <= targets.keys() and "unused" not in targets
    assert targets["ten"]["p50_ms"] >= 10


def test_a_scenario_takes_the_servers_times_for_its_own(server: Gateway, tmp_path: Path):
    [kind] = [device.kind for device in server.driver.engine.devices]
    file = tmp_path / "s.toml"
    file.write_text(SCENARIO.format(kind=kind, name="ten"))
    slow, fast = (
        json.loads(ask("sim", file, "--json", *options).output.splitlines()[0])["p50_ms"]
        for options in ((), ("--from-server", server.url))
    )
    assert slow > 100 > fast >= 10


def test_a_scenario_of_other_functions_is_told_what_the_server_knows(server: Gateway, tmp_path: Path):
    [kind] = [device.kind for device in server.driver.engine.devices]
    (tmp_path / "s.toml").write_text(SCENARIO.format(kind=kind, name="other"))
    with pytest.raises(BadValue, match="none of the functions here is known there"):
        ask("sim", tmp_path / "s.toml", "--from-server", server.url)


def test_a_plan_starts_from_the_rates_and_devices_of_a_server(server: Gateway):
    found = json.loads(ask("plan", "--from-server", server.url, "--policy", "frontier", "--json").output)
    assert found["schedulable"] and {cut["model"] for cut in found["gpulets"]} == {"ten"}
    assert found["worst"] >= 0.99


def test_a_list_of_tasks_is_planned_with_the_servers_profiles(server: Gateway, tmp_path: Path):
    (tmp_path / "tasks.csv").write_text("ten,5,300\n")
    words = ("plan", tmp_path / "tasks.csv", "--from-server", server.url, "--policy", "frontier", "--json")
    assert json.loads(ask(*words).output)["schedulable"]


@pytest.mark.parametrize("command", ["plan", "sim"])
def test_without_a_file_or_a_server_there_is_nothing_to_do(command: str):
    said = CliRunner().invoke(root, [command])
    assert said.exit_code == 2 and "--from-server" in said.output


def test_a_server_without_calls_says_so(tmp_path: Path):
    with shared(write_app(tmp_path, APP)) as quiet:
        with pytest.raises(BadValue, match="no call was answered there in the last minute"):
            ask("plan", "--from-server", quiet.url)
        with pytest.raises(BadValue, match="has learnt nothing yet"):
            ask("profiles", "pull", "--server", quiet.url, "--out", tmp_path / "learnt")
