"""`lamina draw`: files, options and mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from lamina.cli import root
from lamina.errors import BadValue
from lamina.predict.profile import Point, Profile
from tests.serving import write_app

APP = """
import lamina

app = lamina.App("drawn")


@app.function(batch=4)
def f(x):
    return x


@app.workflow(slo=lamina.SLO("100ms"))
def w(x):
    return f(f(x))
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    (tmp_path / "profiles").mkdir()
    profile = Profile(function="f", device="cpu", points=[Point(batch=b, units=1, p50_us=10_000.0 * b) for b in (1, 2, 4)])
    (tmp_path / "profiles" / "f.json").write_bytes(msgspec.json.encode(profile))
    return str(write_app(tmp_path, APP))


def draw(*args: str) -> Result:
    return CliRunner().invoke(root, ["draw", *args], standalone_mode=False)


def test_the_picture_has_the_time_slack_and_batch_of_each_step(app: str):
    picture = draw(app, "w", "--output", "-").stdout
    assert "SLO 100ms; planned with medians on cpu" in picture
    assert picture.count("10 ms · slack 80 ms · batch 4") == 2


def test_the_only_workflow_need_not_be_named(app: str, tmp_path: Path):
    assert draw(app, "-o", str(tmp_path / "w.mmd")).exit_code == 0
    assert "flowchart TD" in (tmp_path / "w.mmd").read_text()


def test_the_format_follows_the_file_or_the_option(app: str, tmp_path: Path):
    assert draw(app, "-o", str(tmp_path / "w.dot")).exit_code == 0
    assert (tmp_path / "w.dot").read_text() == draw(app, "-o", "-", "--format", "dot").stdout
    assert (tmp_path / "w.dot").read_text().startswith("digraph {")


@pytest.mark.live
def test_images_are_rendered_by_graphviz(app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    missing = draw(app, "-o", str(tmp_path / "w.svg")).exception
    assert isinstance(missing, BadValue) and ".mmd" in missing.hint
    dot = tmp_path / "bin" / "dot"
    dot.write_text(f"#!{sys.executable}\nimport sys; open(sys.argv[3], 'w').write(' '.join(sys.argv[1:3]) + sys.stdin.read())")
    dot.chmod(0o755)
    assert draw(app, "-o", str(tmp_path / "w.svg")).exit_code == 0
    assert (tmp_path / "w.svg").read_text().startswith("-Tsvg -odigraph {")


def test_without_profiles_the_steps_alone_are_drawn(app: str, tmp_path: Path):
    (tmp_path / "none").mkdir()
    assert "no profiles" in draw(app, "--profiles", str(tmp_path / "none"), "-o", "-").stdout


@pytest.mark.parametrize(("args", "says"), [(["f"], "'f' is a function"), (["w", "--device", "h200"], "no profiles of it")])
def test_what_cannot_be_drawn_is_refused(app: str, args: list[str], says: str):
    error = draw(app, *args).exception
    assert isinstance(error, BadValue)
    assert says in error.message
