"""Commands as a person types them: real processes, real exit codes."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lamina.cli import main
from tests.serving import APP, write_app

pytestmark = pytest.mark.live

COUNT = """

@app.function()
def count(to):
    yield from range(to)
"""


def lamina(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lamina", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)  # type: ignore[call-overload,no-any-return]


def side_by_side(*commands: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda words: lamina(*words), commands))


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A server that does not outlive a test, also one that fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"), APP + COUNT)


@pytest.fixture(scope="module")
def server(app: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "lamina", "serve", str(app), "--port", "0", "--json"]
    with started(command) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_help_lists_every_command_and_is_quick_about_it() -> None:
    done = lamina("--help")
    assert done.returncode == 0
    for name in ("serve", "call", "run", "sim", "policies", "doctor"):
        assert f"  {name}" in done.stdout


def test_an_unknown_command_is_bad_usage() -> None:
    assert lamina("sevre").returncode == 2


def test_listings_come_as_json() -> None:
    policies = json.loads(lamina("policies", "--json").stdout)
    assert {"edf", "fifo"} <= {policy["name"] for policy in policies}
    assert {"admit", "dispatch"} <= set(next(p for p in policies if p["name"] == "edf")["roles"])
    doctor = json.loads(lamina("doctor", "--json").stdout)
    assert doctor["ok"] is True
    assert "python" in {check["what"] for check in doctor["checks"]}


def test_run_prints_the_result_alone_and_says_how_it_ended(app: Path) -> None:
    calls = (("twice", "21"), ("fail", "1"))
    good, failed = side_by_side(*(("run", str(app), *call) for call in calls))
    assert (good.returncode, good.stdout.strip()) == (0, "42")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "ValueError: cannot take 1" in failed.stderr


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("picky", "1"), "x: 1 is too small\n  hint: send more"),
        (("nope", "1"), "there is echo"),
        (("add", '{"a": 1, "x": 2}'), "unknown parameter 'x'"),
    ],
)
def test_run_says_what_is_wrong_with_a_call(
    app: Path, capsys: pytest.CaptureFixture[str], call: tuple[str, str], told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(app), *call])
    assert told in capsys.readouterr().err


def test_call_reaches_a_server_with_json_files_and_names(server: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\x00\xff")
    done = lamina("call", "add", '{"a": 1, "b": 2}', "--url", server)
    assert (done.returncode, done.stdout.strip()) == (0, "3")
    assert " ms, of which " in done.stderr
    by_name = lamina("call", "add", "--input", "a=5", "--url", server, "--quiet")
    assert (by_name.stdout.strip(), by_name.stderr) == ("15", "")
    details = json.loads(lamina("call", "echo", '"x"', "--url", server, "--json").stdout)
    assert details["value"] == "x"
    assert details["latency_ms"] > 0
    for given in (["--file", str(picture)], [f"@{picture}"]):
        command = [sys.executable, "-m", "lamina", "call", "echo", *given, "--url", server, "-q"]
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"\x89PNG\x00\xff"
    order = tmp_path / "order.json"
    order.write_text('{"a": 1}')
    command = [sys.executable, "-m", "lamina", "call", "echo", "-", "--url", server, "-q"]
    with order.open("rb") as file:
        assert json.loads(subprocess.run(command, stdin=file, capture_output=True, check=True).stdout) == {"a": 1}
    by_name = lamina("call", "echo", "--input", f"x=@{order}", "--url", server, "--quiet")
    assert json.loads(by_name.stdout) == {"a": 1}


def test_pieces_are_printed_line_by_line(server: str) -> None:
    done = lamina("call", "count", "3", "--stream", "--url", server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n1\n2\n", "")


def test_call_says_what_went_wrong_with_its_exit_code(server: str) -> None:
    assert lamina("call", "fail", "1", "--url", server).returncode == 1
    assert lamina("call", "nope", "1", "--url", server).returncode == 2
    refused = lamina("call", "echo", "1", "--url", server, "--deadline", "1us")
    assert refused.returncode == 3
    assert "refused" in refused.stderr
    nobody = lamina("call", "echo", "1", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 4
    assert "hint" in nobody.stderr


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (("--host", "0.0.0.0"), "loopback"),
        (("--policy", "efd"), "did you mean 'edf'"),
        (("--policy-option", "lead=5"), "lead"),
        (("--emulate", "cpu"), "no profile of 'echo'"),
    ],
)
def test_serve_refuses_what_it_cannot_do(app: Path, capsys: pytest.CaptureFixture[str], wish: tuple[str, str], told: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", str(app), "--store", "none", *wish])
    assert told in capsys.readouterr().err


def introduction(*words: str, program: tuple[str, ...] = ("-m", "lamina")) -> str:
    """What a server says until it listens."""
    with started([sys.executable, *program, "serve", *words, "--port", "0"]) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("listening"):
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    return "".join(lines)


IMPATIENT = """
import sys
from lamina.cli import main
from lamina.store import group_commit
group_commit.OPEN_TIMEOUT_S = 1.0
main(sys.argv[1:])
"""
"""`lamina`, which waits for another server to make the tables of its store for a second, and not for half a minute."""


def test_a_store_that_another_server_uses_keeps_no_runs_and_that_is_said(app: Path, tmp_path: Path) -> None:
    with (tmp_path / "runs.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = introduction(str(app), "--store", str(tmp_path / "runs.db"), program=("-c", IMPATIENT))
    assert f"runs      not kept now: store {tmp_path}/runs.db: another server uses it" in said
    assert "hint: stop that one, or give this one another --store" in said


def test_serve_says_what_it_serves(app: Path) -> None:
    said = introduction(str(app))
    for word in ("policy frontier", "device", "echo(x)", "add(a, b)", "workflow  twice(x)   SLO 5s", "http://127.0.0.1:"):
        assert word in said


def test_an_app_is_declared_by_the_variables_that_its_functions_will_have(tmp_path: Path) -> None:
    """What a file reads at its top must be the same in the server, which decides by it, and in the processes of the functions."""
    text = "import lamina, os\napp = lamina.App('v')\n@app.function(slo=os.environ['GOAL'])\ndef echo(x):\n    return x\n"
    said = introduction(str(write_app(tmp_path, text)), "--env", "GOAL=750ms", "--store", "none")
    assert "SLO 750ms" in said


def test_a_server_on_make_believe_devices_takes_the_profiled_time(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    points = [{"batch": 1, "units": 4, "p50_us": 30_000}, {"batch": 8, "units": 4, "p50_us": 60_000}]
    profile = {"function": "see", "device": "h200", "points": points, "load_us": 1000}
    (tmp_path / "profiles" / "see.json").write_text(json.dumps(profile))
    text = "import lamina\napp = lamina.App('v')\n@app.function(batch=8, gpu='1/4', slo='1s')\ndef see(x):\n    return x\n"
    command = [
        sys.executable,
        "-m",
        "lamina",
        "serve",
        str(write_app(tmp_path, text)),
        "--emulate",
        "h200x2",
        "--port",
        "0",
        "--json",
    ]
    with started(command) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        request = urllib.request.Request(f"{url}/v1/functions/see", data=b"1", headers={"content-type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == b"null"
            assert answer.headers["lamina-slice"].startswith("h200-")
        took_s = time.perf_counter() - begin
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert took_s > 0.02
