from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from lamina.cli import main
from lamina.cli.sim import command
from lamina.core.eventlog import read_log

from .conftest import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_the_table_has_a_row_per_target_and_a_total(scenario: Path):
    words = [line.split()[0] for line in invoke(scenario, "--calls", 200).stdout.splitlines() if line.split()]
    assert [word for word in words if word in ("a", "b", "total", "h200-0")] == ["a", "b", "total", "h200-0"]


def test_json_is_one_object_per_line_and_nothing_else(scenario: Path):
    rows = [msgspec.json.decode(line) for line in invoke(scenario, "--calls", 200, "--json").stdout.splitlines()]
    assert [row["row"] for row in rows] == ["target", "target", "function", "function", "device", "total"]
    assert rows[-1]["offered"] == 200


def test_policy_options_and_seed_can_be_given(scenario: Path):
    options = ("--policy", "edf", "--policy-option", "margin=0.2", "--policy-option", "lead_us=1ms", "--seed", 9)
    total = msgspec.json.decode(invoke(scenario, "--calls", 50, "--json", *options).stdout.splitlines()[-1])
    assert (total["policy"], total["seed"]) == ("edf", 9)


def test_the_log_holds_every_event(scenario: Path, tmp_path: Path):
    invoke(scenario, "--calls", 50, "--log", tmp_path / "events.jsonl", "--check")
    kinds = [type(entry.event).__name__ for entry in read_log(tmp_path / "events.jsonl")]
    assert kinds.count("CallArrived") == 50


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_a_picture(scenario: Path, tmp_path: Path, ending: str):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"plot.{ending}"
    invoke(scenario, "--calls", 200, "--plot", path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_the_same_run_draws_the_same_picture(scenario: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        invoke(scenario, "--calls", 100, "--plot", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        (("max_batch = 8", "max_bach = 8"), (), "small.toml:12: function[0].max_bach: there is no such field"),
        (("", ""), ("--policy", "fife"), "did you mean 'fifo'?"),
        (("", ""), ("--policy-option", "led_us=3"), "did you mean 'lead_us'?"),
        (("", ""), ("--log", "/none/x.jsonl"), "--log /none/x.jsonl: No such file"),
        (("", ""), ("--plot", "x.gif"), "end the name in .png or .svg"),
    ],
)
def test_a_mistake_is_told_on_stderr_with_exit_code_two(
    scenario: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], args: tuple[str, ...], says: str
):
    scenario.write_text(SMALL.replace(*change))
    with pytest.raises(SystemExit) as caught:
        main(["sim", str(scenario), *args])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert says in err
    assert out == ""
