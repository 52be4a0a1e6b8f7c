"""`lamina explain`: history of a call, from the event log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from lamina.cli import explain, root
from lamina.core.eventlog import EventLogWriter
from lamina.core.events import CallRecovered
from lamina.core.flight_recorder import EndRecord, call_history, records_of
from lamina.errors import BadValue
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.types import Call

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first pages through the pipeline."""
    path = tmp_path_factory.mktemp("log") / "pipeline.jsonl"
    writer = EventLogWriter(path)
    run(scenario.read(ROOT / "scenarios/pipeline.toml"), "frontier", calls=40, watch=writer.write, explain=True)
    writer.close()
    return path


def a_page(log: Path) -> str:
    calls = (json.loads(line)["event"].get("call") for line in log.read_text().splitlines())
    return next(call["id"] for call in calls if call and call["target"] == "page")


def test_every_step_of_the_call_is_told(log: Path):
    steps = explain.history_in_log(a_page(log), log)["steps"]
    assert {"detect", "read"} <= {step["step"] for step in steps}
    assert all(step["took_ms"] > 0 for step in steps)


def test_the_choice_comes_with_what_else_there_was(log: Path):
    [first, *_] = explain.history_in_log(a_page(log), log)["steps"]
    assert first["why"]["chosen"]["batch"] == first["batch"]
    assert all(option["why_not"] for option in first["why"]["alternatives"])


def test_in_a_terminal_it_is_a_table(log: Path):
    said = CliRunner().invoke(root, ["explain", a_page(log), "--log", str(log)]).output
    assert "the cheapest of those in time" in said
    assert "chosen" in said
    assert "in time, " in said


def test_programs_get_one_json_object(log: Path):
    said = CliRunner().invoke(root, ["explain", a_page(log), "--log", str(log), "--json"]).output
    assert json.loads(said)["end"]["what"] == "in time"


def test_a_refusal_says_what_could_have_been_had(tmp_path: Path):
    path = tmp_path / "overload.jsonl"
    writer = EventLogWriter(path)
    run(scenario.read(ROOT / "scenarios/overload.toml"), "frontier", calls=6_000, watch=writer.write, explain=True)
    writer.close()
    actions = (action for line in path.read_text().splitlines() for action in json.loads(line)["actions"])
    refused = next(action["call_id"] for action in actions if action["type"] == "Reject")
    end = explain.history_in_log(refused, path)["end"]
    assert end["what"] == "refused: deadline"
    assert end["offer_ms"] > 30
    assert end["why"]["because"] == "it would be too late"


def test_an_unknown_call_is_said_to_be_unknown(log: Path):
    with pytest.raises(BadValue, match="knows nothing of a call 'nobody'"):
        explain.history_in_log("nobody", log)


def test_a_rejection_names_its_rule_without_being_asked_to_explain(tmp_path: Path):
    path = tmp_path / "overload.jsonl"
    writer = EventLogWriter(path)
    run(scenario.read(ROOT / "scenarios/overload.toml"), "frontier", calls=6_000, watch=writer.write)
    writer.close()
    actions = (action for line in path.read_text().splitlines() for action in json.loads(line)["actions"])
    refused = next(action["call_id"] for action in actions if action["type"] == "Reject")
    end = explain.history_in_log(refused, path)["end"]
    assert end["why"]["rule"] in ("deadline", "load shedding")
    why = end["why"]
    assert why["expected_ms"] * (1 + why["margin"]) + why["reserve_ms"] > why["allowed_ms"]
    said = CliRunner().invoke(root, ["explain", refused, "--log", str(path)]).output
    assert "rule: " in said and "could be met" in said


def test_a_batch_that_waited_says_which_rule_delayed_it(log: Path):
    calls = (json.loads(line)["event"].get("call") for line in log.read_text().splitlines())
    steps = [step for call in calls if call for step in explain.history_in_log(call["id"], log)["steps"]]
    delays = {step["delay"].partition(":")[0] for step in steps if step["delay"]}
    assert delays and delays <= {"batching", "no slot", "blocking rule", "no instance of the function was ready"}


def test_a_run_without_a_deadline_that_was_taken_up_is_timed_from_its_arrival(capsys: pytest.CaptureFixture[str]):
    """It arrived eleven seconds before this server replayed it."""
    call = Call("r1", "f", arrived_us=-11_000_000)
    records = [*records_of(500_000, CallRecovered(call), []), EndRecord(600_000, "r1", "in time", latency_us=11_600_000)]
    told = call_history("r1", records)
    step = {"step": "f", "jobs": 1, "decided_ms": 550.0, "batch": 1, "slice": "cpu0/0", "cores": 0, "predicted_ms": 0.0}
    told["steps"] = [step | {"behind_batch": None, "why": None, "delay": None, "took_ms": 0.3}]
    explain._print(told, Console(width=120))
    said = capsys.readouterr().out
    assert "f after 11.6 s: batch of 1 on cpu0/0; took 0.30 ms" in said
    assert "answered, 11.6 s after it arrived" in said
