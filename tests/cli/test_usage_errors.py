"""Usage errors: field, value, what to do, exit code 2, and never a traceback of ours."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.cli import main
from lamina.cli._serve_command import unplaceable
from lamina.errors import BadValue
from lamina.load.load_plan import check_trace, parse_stages
from lamina.types import DeviceSpec, FunctionSpec

APP = 'import lamina\napp = lamina.App("small")\n'


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports_undone: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAMINA_URL", "http://127.0.0.1:9")  # `serve` would set it


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code, and what was said on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_a_wrong_value_in_an_app_is_told_with_its_line(capsys):
    Path("mine.py").write_text(APP + '\n@app.function(slo="fast")\ndef f(x): ...\n')
    code, said = typed(capsys, "serve", "mine.py")
    assert (code, said.splitlines()[0]) == (2, "error: mine.py:4: slo.latency: 'fast' is not a quantity")


def test_an_app_that_raises_shows_where(capsys):
    Path("mine.py").write_text(APP + "\nraise RuntimeError('no weights')\n")
    code, said = typed(capsys, "serve", "mine.py")
    assert code == 1
    assert 'mine.py", line 4, in <module>' in said
    assert "cli" not in said


@pytest.mark.parametrize(("name", "told"), [("folder", "no app.py in 'folder'"), ("notes.txt", "'notes.txt' is no Python file")])
def test_what_is_no_app_file_is_told(capsys, name: str, told: str):
    Path("folder").mkdir()
    Path("notes.txt").touch()
    code, said = typed(capsys, "serve", name)
    assert code == 2
    assert told in said


@pytest.mark.parametrize(
    "words",
    [
        ("--port", "99999"),
        ("--gpu", "gren"),
        ("--ingress", "-1"),
        ("--trace-ratio", "7"),
        ("--trace-ratio", "nan"),
        ("--admin-port", "99999"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_starts(capsys, words: tuple[str, str]):
    code, said = typed(capsys, "serve", "mine.py", *words)
    assert code == 2
    assert f"Invalid value for '{words[0]}'" in said


def test_a_collector_needs_an_address(capsys):
    Path("mine.py").write_text(APP)
    code, said = typed(capsys, "serve", "mine.py", "--store", "none", "--otlp", "collector")
    assert code == 2
    assert "--otlp: 'collector' is no address" in said


def test_a_file_that_is_not_there_is_named_with_its_input(capsys):
    Path("mine.py").write_text(APP + "\n@app.function()\ndef f(x): return x\n")
    code, said = typed(capsys, "run", "mine.py", "f", "--input", "x=@nowhere.png")
    assert code == 2
    assert said == "error: x: no file 'nowhere.png'\n  hint: write name=@FILE, or name=JSON\n"


def test_an_input_that_is_no_json_says_how_to_quote(capsys):
    code, said = typed(capsys, "run", "mine.py", "f", "--input", "x=word")
    assert code == 2
    assert """x='"word"'""" in said


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ("hi there", """'"hi there"'"""),
        ("text=hello", """--input text='"hello"'"""),
        ("count=3", "--input count=3"),
        ("{text: 1}", """'{"x": 1}'"""),
    ],
)
def test_a_body_that_is_no_json_is_shown_as_it_was_meant(capsys, body: str, meant: str):
    code, said = typed(capsys, "call", "shout", body)
    assert code == 2
    assert f"hint: quote it for the shell: {meant}" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("help",), "Did you mean '--help'?"),
        (("version",), "Did you mean '--version'?"),
        (("serve", "Mine.py"), "hint: did you mean 'mine.py'?"),
        (("serve", "https://example.org/mine.py"), "'https://example.org/mine.py' is an address"),
        (("profile", "mine.py", "f"), "one function of a file is written mine.py:f"),
        (("call", "f", "--async", "--stream"), "give one of --async and --stream"),
        (("call", "f", "--url", "http://127.0.0.1:9/v1/"), 'hint: give the server alone: "http://127.0.0.1:9"'),
        (("call", "f", "--url", "http://127.0.0.1:9/v1/functions/f"), 'hint: give the server alone: "http://127.0.0.1:9"'),
    ],
)
def test_what_was_meant_is_said(capsys, words: tuple[str, ...], told: str):
    Path("mine.py").write_text(APP)
    code, said = typed(capsys, *words)
    assert code == 2
    assert told in said


def test_a_token_for_a_server_that_does_not_run_goes_to_its_store(capsys):
    code, said = typed(capsys, "token", "create", "ci", "--admin-url", "http://127.0.0.1:9")
    assert code == 4
    assert "without a server: --store .lamina/APP.db" in said


@pytest.mark.live
@pytest.mark.parametrize("option", ["--port", "--grpc-port", "--admin-port"])
def test_a_port_that_is_taken_is_named_before_anything_is_touched(capsys, option: str):
    Path("mine.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", option: str(port)}
        code, said = typed(capsys, "serve", "mine.py", *(word for pair in ports.items() for word in pair))
    assert code == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert not Path(".lamina").exists()


def test_an_unknown_input_is_bad_usage(capsys):
    Path("mine.py").write_text(APP + "\n@app.function()\ndef f(x): return x\n")
    code, said = typed(capsys, "run", "mine.py", "f", "--input", "y=1")
    assert (code, said.splitlines()[0]) == (2, "error: unknown parameter 'y'")


def test_a_policy_file_with_a_mistake_shows_it(capsys):
    Path("mine.py").write_text(APP)
    Path("policy.py").write_text("x = 1\n1 / 0\n")
    code, said = typed(capsys, "serve", "mine.py", "--policy", "policy.py")
    assert code == 1
    assert 'policy.py", line 2, in <module>' in said
    assert "policy.py cannot be imported: ZeroDivisionError" in said


def test_a_policy_file_without_a_policy_is_told(capsys):
    Path("policy.py").write_text("x = 1\n")
    code, said = typed(capsys, "serve", "mine.py", "--policy", "policy.py")
    assert code == 2
    assert "no policy in policy.py" in said


def test_what_cannot_be_written_is_told(capsys):
    Path("mine.py").write_text(APP)
    code, said = typed(capsys, "serve", "mine.py", "--port", "0", "--store", "none", "--log", "nowhere/log")
    hint = "is the path right, and are its folders there?"
    assert (code, said) == (2, f"error: nowhere/log: No such file or directory\n  hint: {hint}\n")


def test_tasks_that_are_not_there_come_before_profiles_that_are_not(capsys):
    code, said = typed(capsys, "plan", "tasks.csv")
    assert code == 2
    assert "no file 'tasks.csv'" in said


def test_an_app_without_workflows_is_told_so(capsys):
    Path("mine.py").write_text(APP)
    code, said = typed(capsys, "draw", "mine.py")
    assert code == 2
    assert said == "error: app 'small' has no workflows\n  hint: make one with @app.workflow()\n"


def test_a_store_that_is_not_there_is_not_made_by_looking(capsys):
    code, said = typed(capsys, "token", "list", "--store", "typo.db")
    assert code == 2
    assert "no file 'typo.db'" in said
    assert not Path("typo.db").exists()


@pytest.mark.parametrize("command", [("bill", "--url"), ("ls", "--admin-url")])
def test_an_address_with_a_port_that_is_none_is_told(capsys, command: tuple[str, str]):
    code, said = typed(capsys, *command, "http://127.0.0.1:99999")
    assert code == 2
    assert "'http://127.0.0.1:99999'" in said


@pytest.mark.parametrize("rate", ["nan", "1e12", "-1", "0", ""])
def test_a_rate_that_cannot_be_sent_is_refused(rate: str):
    with pytest.raises(BadValue, match="no rate"):
        parse_stages(rate, 1.0)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "t_us\n"])
def test_a_trace_without_calls_is_refused_before_the_generator_starts(tmp_path: Path, text: str):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(BadValue, match=r"trace\.csv"):
        check_trace(tmp_path / "trace.csv")


CORES = DeviceSpec(id="cpu0", kind="cpu", units=2, memory_mib=1000, family="cpu")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (FunctionSpec(name="f"), []),
        (FunctionSpec(name="f", memory_mib=2000), ["f asks for 1.95GiB where there are 1000MiB: its calls are refused"]),
        (FunctionSpec(name="f", cores=4), ["f asks for 4 cores where there are 2: it gets those"]),
        (FunctionSpec(name="f", gpu="must", share=0.5), ["f needs a GPU, and there is none: its calls are refused"]),
    ],
)
def test_functions_that_fit_nowhere_are_named_before_the_first_call(spec: FunctionSpec, told: list[str]):
    assert unplaceable([spec], [CORES]) == told


def test_a_store_that_keeps_nothing_is_none_to_manage(capsys):
    code, said = typed(capsys, "token", "create", "ci", "--store", "none")
    assert (code, said.splitlines()[0]) == (2, "error: --store: 'none' keeps nothing")
    assert not Path("none").exists()


def test_a_report_of_no_results_is_not_written(capsys):
    code, said = typed(capsys, "lab", "report", "--results", "nowhere")
    assert (code, said.splitlines()[0]) == (2, "error: --results nowhere: no results of any experiment")


@pytest.mark.parametrize("group", ["asl", "lab", "profiles", "runs", "secret", "state", "tenant", "token", "user"])
def test_help_tells_in_full_what_each_command_does(group: str, capsys):
    with pytest.raises(SystemExit):
        main([group, "--help"])
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--operator-token-file", "absent"), "error: --operator-token-file: [Errno 2]"),
        (("--operator-token-file", "empty"), "error: --operator-token-file: empty is empty"),
        (("--operator-token-file", "short"), "error: the operator's token has 5 characters"),
        (("--role-label-pods", "a-0,a-1"), "error: this process has no Kubernetes service account"),
    ],
)
def test_what_a_container_lacks_is_told(capsys, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], told: str):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    Path("mine.py").write_text(APP)
    Path("empty").write_text("\n")
    Path("short").write_text("abcde\n")
    code, said = typed(capsys, "serve", "mine.py", "--port", "0", *words)
    assert code == 2 and said.startswith(told)


def test_started_without_stdin_stdout_or_stderr_nothing_else_gets_their_numbers(tmp_path: Path):
    """The event loop's own descriptors did, and the first child that printed ended the server."""
    code = (
        "import os, subprocess, sys; from lamina.server.async_stderr import open_standard_files; open_standard_files();"
        "print('lost'); print('lost', file=sys.stderr); sys.stdin.read(); subprocess.run(['echo', 'lost'], check=True);"
        "print(os.open('store', os.O_CREAT), file=open('found', 'w'))"
    )
    subprocess.run(["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code], cwd=tmp_path, check=True)
    assert int((tmp_path / "found").read_text()) > 2
