"""`lamina asl`: what goes to stdout, and with which exit code."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.cli import main

TASKS = """
def double(n):
    print("doubling")
    return n * 2

def boom(_):
    raise KeyError("gone")

def handle(event, context):
    return [event, context.state]
"""

TWICE = {"StartAt": "D", "States": {"D": {"Type": "Task", "Resource": "double", "InputPath": "$.n", "End": True}}}
BOOM = {"StartAt": "B", "States": {"B": {"Type": "Task", "Resource": "boom", "End": True}}}


@pytest.fixture
def lamina(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "asl_tasks.py").write_text(TASKS)

    def run(*words: str, **documents: Any) -> tuple[int, str, str]:
        for name, document in documents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(document, indent=2))
        with pytest.raises(SystemExit) as caught:
            main(["asl", *words])
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


def test_the_output_stands_alone_on_stdout(lamina):
    assert lamina("run", "m.json", "--input", '{"n": 21}', "--bind", "double=asl_tasks:double", m=TWICE) == (
        0,
        "42\n",
        "doubling\n",
    )


def test_a_failed_execution_gives_error_and_cause_and_exit_code_1(lamina):
    code, out, err = lamina("run", "m.json", "--virtual-time", "--bind", "boom=asl_tasks:boom", m=BOOM)
    assert (code, json.loads(out), err) == (1, {"Error": "KeyError", "Cause": "'gone'"}, "")


def test_an_invalid_document_gives_file_path_and_clause_and_exit_code_2(lamina):
    code, out, err = lamina("run", "m.json", m={"StartAt": "A", "States": {"A": {"Type": "Pass", "Next": "B"}}})
    assert (code, out) == (2, "")
    assert "m.json: $.States.A.Next: [Transitions] there is no state 'B' beside this one" in err


def test_an_unbound_resource_fails_before_anything_runs(lamina):
    code, out, err = lamina("run", "m.json", m=TWICE)
    assert (code, out) == (2, "")
    assert "Resource 'double' is bound to nothing" in err


@pytest.mark.parametrize(
    "bind", ["double", "double=asl_tasks", "double=nowhere:f", "double=asl_tasks:nothing", "double=asl_tasks:TASKS.x"]
)
def test_a_binding_that_cannot_be_is_bad_usage(lamina, bind: str):
    assert lamina("run", "m.json", "--bind", bind, m=TWICE)[0] == 2


def test_input_that_is_no_json_is_bad_usage(lamina):
    code, _, err = lamina("run", "m.json", "--input", "{", "--bind", "double=asl_tasks:double", m=TWICE)
    assert code == 2 and "--input" in err


def test_input_may_come_from_a_file(lamina, tmp_path: Path):
    (tmp_path / "in.json").write_text('{"n": 4}')
    assert lamina("run", "m.json", "--input", "@in.json", "--bind", "double=asl_tasks.py:double", m=TWICE)[1] == "8\n"


def test_virtual_time_waits_for_nothing(lamina):
    began = time.monotonic()
    assert (
        lamina(
            "run",
            "m.json",
            "--virtual-time",
            m={"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 86_400, "End": True}}},
        )[0]
        == 0
    )
    assert time.monotonic() - began < 60


@pytest.mark.live
def test_real_time_waits(lamina):
    began = time.monotonic()
    assert lamina("run", "m.json", m={"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 1, "End": True}}}) == (
        0,
        "{}\n",
        "",
    )
    assert time.monotonic() - began >= 1


def test_a_task_may_take_a_context_as_its_second_argument(lamina):
    document = {"StartAt": "H", "States": {"H": {"Type": "Task", "Resource": "arn:aws:lambda:eu:1:function:handle", "End": True}}}
    assert lamina("run", "m.json", "--input", "1", "--bind", "handle=asl_tasks:handle", m=document)[1] == '[1,"H"]\n'


def test_lint_says_nothing_about_a_valid_document(lamina):
    assert lamina("lint", "m.json", m=TWICE) == (0, "", "")


def test_lint_says_what_would_not_carry_over(lamina):
    code, out, _ = lamina("lint", "m.json", "--portability", m=TWICE)
    assert code == 0
    assert "m.json:6: $.States.D: Resource: 'double' is a name of ours; elsewhere give it an ARN" in out


def test_an_imported_document_is_an_app_that_exports_it_again(lamina, tmp_path: Path):
    assert lamina("import", "m.json", "--out", "app.py", m=TWICE)[0] == 0
    code, out, err = lamina("export", "app.py", "m")
    assert (code, json.loads(out)) == (0, TWICE), err


def test_drawings_have_every_state(lamina):
    states = {f"S{i}": {"Type": "Pass", "Next": f"S{i + 1}"} for i in range(39)} | {"S39": {"Type": "Succeed"}}
    code, out, _ = lamina("draw", "m.json", m={"StartAt": "S0", "States": states})
    assert code == 0
    assert {f"S{i}" for i in range(39)} < set(re.findall(r'"(.*?)"', out))
