"""`lamina lab` end to end: rows in a file with their provenance, figures on the terminal, an HTML report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lamina.errors import BadValue, UnknownPlugin
from lamina.lab import data, experiment, provenance, results, runner
from lamina.lab.command import command
from lamina.lab.experiment import ResultTable

pytestmark = pytest.mark.live

FAKE = str(Path(__file__).with_name("fake.py"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cells.log"
    path.touch()
    monkeypatch.setenv("FAKE_LOG", str(path))
    monkeypatch.delenv("FAKE_TROUBLE", raising=False)
    monkeypatch.setattr(provenance, "commit", lambda: "abc123")  # others may be editing while a test runs
    return path


def lab(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def run(folder: Path, *words: str) -> Result:
    return lab("run", FAKE, "--jobs", "1", "--out", str(folder), *words)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_experiment_has_all_its_parts_and_quick_cells_that_are_json() -> None:
    for name in experiment.names():
        module = experiment.load(name)
        cells = module.cells(1, True)
        assert cells and all(isinstance(cell, dict) for cell in json.loads(json.dumps(cells))), name
        assert module.TITLE and module.ABOUT.strip(), name


def test_an_experiment_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UnknownPlugin, match="traces"):
        experiment.load("tracse")


def test_a_file_without_the_parts_of_an_experiment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("TITLE = 'x'\n")
    with pytest.raises(BadValue, match="no ABOUT, REPORTED, cells"):
        experiment.load(str(tmp_path / "half.py"))


def test_a_table_with_a_short_row_is_refused() -> None:
    with pytest.raises(BadValue, match="row of 1 under 2"):
        ResultTable(["a", "b"], [[1]])


def test_the_first_line_says_where_the_rows_come_from(tmp_path: Path, log: Path) -> None:
    assert run(tmp_path, "--seed", "8").return_value == 0
    head, *rows = lines(tmp_path / "fake.jsonl")
    assert {key: head[key] for key in ("experiment", "seed", "quick", "commit")} == {
        "experiment": "fake",
        "seed": 8,
        "quick": False,
        "commit": "abc123",
    }
    assert head["version"] and head["python"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(head["date"]))
    assert head["machine"]["cpu"] and head["machine"]["cores"] >= 1  # type: ignore[index]
    assert rows == [{"half": x / 2, "x": x, "seed": 8} for x in range(4)]


def test_json_is_one_object_on_stdout_and_nothing_else(tmp_path: Path, log: Path) -> None:
    done = run(tmp_path, "--json")
    assert json.loads(done.stdout) == {"mean": 0.75, "beside": {"mean": 0.75}}
    assert done.stderr == ""


def test_tables_are_printed(tmp_path: Path, log: Path) -> None:
    assert "All halves" in run(tmp_path).stdout


@pytest.mark.parametrize(("trouble", "words"), [("raise", "ValueError: no half of a word"), ("object", "TypeError")])
def test_a_cell_that_fails_becomes_a_row_and_the_others_go_on(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", trouble)
    done = run(tmp_path)
    assert done.return_value == 1
    _, *rows = lines(tmp_path / "fake.jsonl")
    assert [row.get("half") for row in rows] == [0, None, 0.5, 1, 1.5]
    assert words in str(rows[1]["error"]) and words in done.stderr


def test_the_trace_of_a_failed_cell_names_the_line(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", "raise")
    run(tmp_path, "--quick")
    rows = results.read(tmp_path / "fake.quick.jsonl").failed
    assert re.fullmatch(r"fake\.py:\d+ in run", rows[0]["trace"][-1])


def test_a_process_that_dies_takes_only_its_own_cell_with_it(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", "die")
    run(tmp_path, "--quick")
    rows = results.read(tmp_path / "fake.quick.jsonl").rows
    assert [row.get("error", row.get("half")) for row in rows] == [0, "the process died", 0.5]


def test_resume_makes_only_what_is_missing(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    path = tmp_path / "fake.jsonl"
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines()[:3]))
    log.write_text("")
    run(tmp_path, "--resume")
    assert log.read_text().split() == ["2", "3"]
    assert lines(path)[1:] == [json.loads(line) for line in whole.splitlines()[1:]]


def test_resume_takes_up_a_run_that_was_cut_off_in_the_middle_of_a_line(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    path = tmp_path / "fake.jsonl"
    results.unfinished(path).write_text("\n".join(path.read_text().splitlines()[:3]) + '\n{"half": 1.')
    path.unlink()
    log.write_text("")
    run(tmp_path, "--resume")
    assert log.read_text().split() == ["2", "3"]
    assert not results.unfinished(path).exists()


@pytest.mark.parametrize("change", [["--seed", "4"], ["--resume", "--seed", "4"], []])
def test_rows_of_another_seed_or_without_resume_are_made_again(tmp_path: Path, log: Path, change: list[str]) -> None:
    run(tmp_path)
    log.write_text("")
    run(tmp_path, *change)
    assert log.read_text().split() == ["0", "1", "2", "3"]


def test_rows_of_other_code_are_made_again(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    log.write_text("")
    monkeypatch.setattr(provenance, "commit", lambda: "def456")
    run(tmp_path, "--resume")
    assert log.read_text().split() == ["0", "1", "2", "3"]


def test_a_quick_run_leaves_the_full_one_alone(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "fake.jsonl").read_bytes()
    run(tmp_path, "--quick")
    assert (tmp_path / "fake.jsonl").read_bytes() == before
    assert len(lines(tmp_path / "fake.quick.jsonl")) == 3


def test_a_run_for_tuning_leaves_the_reported_one_alone(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "fake.jsonl").read_bytes()
    run(tmp_path, "--seed", "1")
    assert (tmp_path / "fake.jsonl").read_bytes() == before
    assert len(lines(tmp_path / "fake.tuning.jsonl")) == 5


def test_headline_tables_are_written_as_markdown(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    page = lab("report", FAKE, "--results", str(tmp_path), "--markdown", "--out", "-").stdout
    assert "## Halves of numbers" in page and "commit abc123" in page
    assert "### All halves\n\nOne per number.\n\n| x | half |\n|--:|--:|\n| 0 | 0 |\n| 1 | 0.5 |" in page
    assert "Bars of halves" not in page  # not a headline


def test_without_a_checkout_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_git", lambda *words: "")
    monkeypatch.setenv("LAMINA_COMMIT", "feedbeef")
    assert provenance.commit() == "feedbeef"


class Outside(HTMLParser):
    """What a page would fetch, and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")]
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def page(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FAKE_TROUBLE", "raise")
    run(tmp_path)
    out = tmp_path / "deep" / "report.html"
    assert lab("report", FAKE, "--results", str(tmp_path), "--out", str(out)).exit_code == 0
    return out.read_text()


def test_the_page_holds_every_section_with_its_table_and_plot(page: str) -> None:
    for words in (
        "Halves of numbers",
        "All halves",
        "Bars of halves",
        "One per number.",
        "<th",
        "stroke: var(--c0)",
        "fill: var(--c0)",
    ):
        assert words in page


def test_the_page_says_where_everything_comes_from(page: str) -> None:
    for words in ("abc123", "Python 3.", "<dt>seed</dt><dd>2</dd>", "<dt>machine</dt>", "<dt>date</dt>"):
        assert words in page


def test_reported_figures_stand_beside_ours_and_are_called_so(page: str) -> None:
    assert '<span class="reported">reported</span>' in page
    row = re.search(r"<tr><td[^>]*>mean</td>(.*?)</tr>", page)
    assert row and re.findall(r">([^<]+)</td>", row[1]) == ["2.5 &lt;exactly&gt;", "0.75", "the authors, table 1"]


def test_the_page_names_cells_that_failed(page: str) -> None:
    assert "ValueError: no half of a word" in page


def test_the_page_needs_nothing_but_itself_and_escapes_what_it_shows(page: str) -> None:
    parser = Outside()
    parser.feed(page)
    parser.close()
    assert not parser.fetched and not parser.open
    assert not re.search(r"url\((?!#)", page) and "@import" not in page
    assert "Nothing &lt;else&gt; happens." in page


def test_rows_that_no_figure_can_be_made_of_do_not_spoil_the_page(tmp_path: Path, log: Path) -> None:
    run(tmp_path)
    path = tmp_path / "fake.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    out = tmp_path / "report.html"
    assert lab("report", FAKE, "--results", str(tmp_path), "--out", str(out)).exit_code == 0
    assert "could not be made into figures: ZeroDivisionError" in out.read_text()


def test_a_report_of_an_experiment_without_results_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="no results"):
        CliRunner().invoke(command, ["report", FAKE, "--results", str(tmp_path)], standalone_mode=False, catch_exceptions=False)


def test_ls_names_every_experiment(tmp_path: Path) -> None:
    found = json.loads(lab("ls", "--json", "--out", str(tmp_path)).stdout)
    assert [row["name"] for row in found] == experiment.names()
    assert {row["date"] for row in found} == {None}


def test_the_script_for_the_whole_lab_names_every_experiment_once_and_the_one_that_measures_time_last() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "lab_all.sh").read_text()
    found = re.search(r'^EXPECTED="(.*)"$', text, re.MULTILINE)
    assert found is not None
    listed = [entry.partition(":")[0] for entry in found[1].split()]
    assert sorted(listed) == experiment.names()
    assert [name for name in listed if getattr(experiment.load(name), "ALONE", False)] == listed[-1:]


def test_data_is_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").touch()
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path))
    assert data.path("x.csv") == tmp_path / "x.csv"
    with pytest.raises(BadValue, match="not in"):
        data.path("y.csv")


def test_every_option_of_every_lab_command_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    section = page.split("## `lamina lab")[1].split("\n## ")[0]
    for name, sub in command.commands.items():
        assert f"lamina lab {name}" in section
        for param in sub.params:
            assert all(option in section for option in param.opts if option.startswith("--")), (name, param.opts)


def test_a_bound_that_is_reached_in_a_destructor_is_told_again(monkeypatch: pytest.MonkeyPatch):
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(runner, "TELL_AGAIN_S", 0.05)

    class Slow:
        def __del__(self) -> None:
            spin()

    def spin() -> None:
        ends_s = time.process_time() + 20
        while time.process_time() < ends_s:
            pass

    def work() -> None:
        Slow()
        spin()

    with pytest.raises(runner.CpuLimitExceeded), runner.cpu_limit(0.05):
        work()
    assert len(lost) == 1, "nothing was lost, so this test shows nothing"


ENDLESS = """
import os, time
from lamina.lab.runner import _pool

if __name__ == "__main__":
    with _pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_end_of_the_lab_ends_the_cells_under_way(tmp_path: Path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    lab = subprocess.Popen([sys.executable, tmp_path / "endless.py"], stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    cell = int(lab.stdout.readline())
    lab.terminate()
    lab.wait(20)
    ends_s = time.monotonic() + 20
    while _is_alive(cell):
        assert time.monotonic() < ends_s, "it goes on though the lab has ended"
        time.sleep(0.01)
    lab.stdout.close()
