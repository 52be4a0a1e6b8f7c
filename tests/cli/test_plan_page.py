"""The page of a plan: one file in the colours of the console, with nothing from elsewhere and nothing that runs."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from lamina.cli.plan import command
from lamina.gateway.console.theme import theme_css
from lamina.lab.report_style import CSS

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.toml"


def test_a_plan_is_written_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = CliRunner().invoke(command, [str(SCENARIO), "--page", str(page)], standalone_mode=False)
    assert done.exception is None, done.output
    text = page.read_text()
    assert "everything fits" in text and "resnet50" in text and "--c0" in text
    assert "<script" not in text and "http" not in text


def test_reports_have_the_colours_of_the_console() -> None:
    assert CSS.startswith(theme_css())
