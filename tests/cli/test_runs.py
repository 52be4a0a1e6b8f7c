"""`lamina runs`, against a server with durable runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lamina.asl.timeline import Timeline, show_duration
from lamina.cli import root
from tests.gateway.routes.test_runs import Server
from tests.gateway.routes.test_runs import server as server  # a fixture

pytestmark = pytest.mark.live


def lamina(server: Server, *arguments: str) -> str:
    assert server.gateway is not None
    done = CliRunner().invoke(
        root, ["runs", *arguments, "--url", server.gateway.url], catch_exceptions=False, standalone_mode=False
    )
    assert done.return_value == 0, done.output
    return done.output


def test_a_run_is_listed_shown_drawn_and_tried_again(server: Server, tmp_path: Path):
    run = server.clients[0].start("through", {"x": 4})
    with pytest.raises(Exception, match="it is shut"):
        run.result("100s")
    assert run.id in lamina(server, "ls", "--target", "through")
    assert [one["state"] for one in json.loads(lamina(server, "ls", "--state", "failed", "--json"))] == ["failed"]
    shown = lamina(server, "show", run.id)
    assert "at step  gate" in shown and "failed: RuntimeError" in shown
    lamina(server, "trace", run.id, "--output", str(tmp_path / "run.mmd"))
    assert "section gate" in (tmp_path / "run.mmd").read_text()
    lamina(server, "trace", run.id, "--output", str(tmp_path / "run.svg"))
    assert "<svg" in (tmp_path / "run.svg").read_text()
    (server.folder / "open").touch()
    assert lamina(server, "retry", run.id).strip() == f"{run.id} queued"
    assert run.result("100s") == 9
    assert json.loads(lamina(server, "show", run.id, "--json"))["retries"] == 1


def test_a_run_is_cancelled(server: Server):
    run = server.clients[0].start("dozing", {"x": 4})
    assert lamina(server, "cancel", run.id).strip() == f"{run.id} cancelled"


def test_a_fan_out_of_hundreds_is_drawn_in_as_many_lanes_as_it_took():
    events = [
        {"kind": "step", "step": "work", "scope": n, "at_us": 10 + n // 8, "queued_us": 10 + n // 8, "began_us": 10 + n // 8}
        | {"ended_us": 11 + n // 8, "ok": True}
        for n in range(400)
    ]
    chart = Timeline("many", events).mermaid()
    assert "section work x400\n" in chart
    assert chart.count(":active, ") == 400


def test_what_is_beyond_the_lanes_is_counted():
    events = [
        {"kind": "step", "step": "work", "scope": n, "at_us": 10, "began_us": 10, "ended_us": 20, "ok": True} for n in range(30)
    ]
    assert "section work x30 (6 not drawn)" in Timeline("many", events).mermaid()


def test_what_users_named_cannot_break_the_chart():
    chart = Timeline("a:b", [{"kind": "wait", "step": "x:crit;\n#y", "scope": 0, "at_us": 1}]).mermaid()
    assert "    section x crit y\n    x crit y 0 :0, 1\n" in chart


def test_waiting_running_and_failing_look_different():
    step = {"kind": "step", "step": "f", "scope": 0, "at_us": 0, "queued_us": 1_000, "began_us": 3_000, "ended_us": 8_000}
    chart = Timeline("w", [{**step, "ok": False, "error": "ValueError"}]).mermaid()
    assert "    queued :done, 0, 2000\n    f 5 ms, 2 ms queued, ValueError :crit, 2000, 7000\n" in chart


@pytest.mark.parametrize(("us", "text"), [(0, "0"), (999, "999 us"), (1_500, "1.5 ms"), (90_000_000, "1.5 min")])
def test_times_are_short(us: int, text: str):
    assert show_duration(us) == text
