"""`lamina profile` and `lamina profiles`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lamina.cli import root

ROOT = Path(__file__).parents[2]
RESNET = str(ROOT / "profiles/v100/resnet50.json")
APP = """
import lamina

app = lamina.App("quick")

@app.function()
def add(a, b=1):
    return a + b
"""


def lamina(*words: str) -> str:
    done = CliRunner().invoke(root, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_ls_names_every_profile_below_a_folder() -> None:
    listed = json.loads(lamina("profiles", "ls", str(ROOT / "profiles"), "--json"))
    (row,) = [row for row in listed if row["file"] == RESNET]
    assert (row["function"], row["device"], row["points"], row["max_units"]) == ("resnet50", "v100", 80, 100)
    assert "resnet50" in lamina("profiles", "ls", str(ROOT / "profiles"))


def test_show_is_a_table_of_latencies() -> None:
    text = lamina("profiles", "show", RESNET)
    assert "batch 8" in text and "22.5ms" in text
    assert json.loads(lamina("profiles", "show", RESNET, "--json"))["function"] == "resnet50"


def test_a_table_wider_than_the_screen_becomes_two(tmp_path: Path) -> None:
    points = [{"batch": b, "units": u, "p50_us": 900.4 * b, "p99_us": 1234.5 * b} for b in range(1, 9) for u in range(1, 9)]
    (tmp_path / "f.json").write_text(json.dumps({"function": "f", "device": "cpu", "points": points}))
    text = lamina("profiles", "show", str(tmp_path / "f.json"))
    assert text.count("900us / 1.23ms") == 8 and text.count("7.2 / 9.88ms") == 8, text


def test_show_tells_what_was_measured_besides(tmp_path: Path) -> None:
    point = {"batch": 1, "units": 1, "p50_us": 1000}
    traits = {"parameter_bytes": 2**20, "fixed_bytes": 2**21, "item_bytes": 2**10}
    more = {"handover": {"batch_us": 250, "item_us": 10}, "spread": [0.9, 1.0, 1.5], "bandwidth": 0.25, "traits": traits}
    (tmp_path / "f.json").write_text(json.dumps({"function": "f", "device": "cpu", "points": [point], **more}))
    text = lamina("profiles", "show", str(tmp_path / "f.json"))
    for said in ("hand-over 250us a batch and 10us an item", "0.90 to 1.50 of the median", "25.0% of", "2MiB a batch", "1MiB"):
        assert said in text, text


@pytest.mark.parametrize(("name", "head"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_plot_draws_a_picture(tmp_path: Path, name: str, head: bytes) -> None:
    pytest.importorskip("matplotlib")
    lamina("profiles", "plot", RESNET, "--out", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(head)


def test_compare_gives_ratios_and_the_biggest() -> None:
    other = str(ROOT / "profiles/v100/resnet101.json")
    found = json.loads(lamina("profiles", "compare", RESNET, other, "--json"))
    assert len(found["changes"]) == 80 and found["median_ratio"] > 1.3
    assert "biggest change" in lamina("profiles", "compare", RESNET, other)


@pytest.mark.live
def test_profile_measures_and_writes_beside_the_app(tmp_path: Path) -> None:
    (tmp_path / "quick_app.py").write_text(APP)
    target = f"{tmp_path / 'quick_app.py'}:add"
    told = json.loads(lamina("profile", target, "--input", '{"a": 2}', "--budget", "60s", "--target", "90%", "--json"))
    assert told["reached"] and told["file"] == str(tmp_path / "profiles" / "add.cpu.json")
    assert "add" in lamina("profiles", "ls", str(tmp_path / "profiles"))
