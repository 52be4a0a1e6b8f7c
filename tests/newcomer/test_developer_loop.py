"""The loop of a developer: a template, options from a file and from variables, a server that starts again after a change."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import lamina
from lamina import cli
from lamina.cli import dev, option_name, serve
from lamina.errors import BadValue
from tests.test_testing_server import post

SRC = str(Path(lamina.__file__).parent.parent)


def options_of_serve(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, object]:
    """What `lamina serve` would have been called with."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(serve.command, "callback", lambda **options: seen.update(options))
    result = CliRunner().invoke(cli.root, ["serve", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


# -------------------------------------------------------------------------------- options


def test_every_option_of_every_command_has_a_variable() -> None:
    def options(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Option]]:
        for param in command.params:
            if isinstance(param, click.Option) and not param.is_eager:
                yield path, param
        for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
            yield from options(inner, (*path, name))

    context = click.Context(cli.root)
    for name in cli.root.list_commands(context):
        command = cli.root.get_command(context, name)
        assert command is not None
        for path, option in options(command, ()):
            variable = "_".join(("LAMINA", name, *path, option_name(option))).upper().replace("-", "_")
            found = cli.from_environment(command, f"LAMINA_{name}", {variable: "1"})
            for part in path:
                found = found[part]
            assert found == {option.name: ["1"] if option.multiple else "1"}


def test_the_command_line_comes_before_variables_and_these_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lamina.toml").write_text(
        '[serve]\nfile = "app.py"\nport = 1001\ngrpc-port = 1002\nadmin_port = 1003\nstore = "none"\ncors-origin = ["https://a.b"]\n'
        "log-calls = true\n"
    )
    monkeypatch.setenv("LAMINA_SERVE_GRPC_PORT", "2002")
    monkeypatch.setenv("LAMINA_SERVE_PORT", "2001")
    seen = options_of_serve(monkeypatch, "--port", "3001")
    assert (seen["port"], seen["grpc_port"], seen["admin_port"]) == (3001, 2002, 1003)
    assert (seen["file"], seen["place"], seen["cors_origins"], seen["log_calls"]) == ("app.py", "none", ("https://a.b",), True)


def test_a_variable_that_looks_like_an_option_is_warned_about() -> None:
    serve = cli.root.get_command(click.Context(cli.root), "serve")
    assert serve is not None
    given = {
        "LAMINA_PORT": "abc",
        "LAMINA_SERVE_PROT": "1",
        "LAMINA_SERVE_PORT": "1",
        "LAMINA_URL": "http://a",
        "LAMINA_SECRET_A": "x",
    }
    found = cli.unread_variables(serve, ("serve",), given)
    assert set(found) == {"LAMINA_PORT", "LAMINA_SERVE_PROT"}
    assert "LAMINA_SERVE_PORT" in found["LAMINA_PORT"] and "LAMINA_SERVE_PORT" in found["LAMINA_SERVE_PROT"]


def test_variables_of_a_service_of_kubernetes_are_no_options() -> None:
    serve = cli.root.get_command(click.Context(cli.root), "serve")
    assert serve is not None
    given = {
        "LAMINA_PORT": "tcp://10.0.0.1:8700",
        "LAMINA_PORT_8700_TCP": "tcp://10.0.0.1:8700",
        "LAMINA_PORT_8700_TCP_PORT": "8700",
        "LAMINA_SERVICE_PORT": "8700",
        "LAMINA_SERVE_SERVICE_HOST": "10.0.0.1",
    }
    assert cli.unread_variables(serve, ("serve",), given) == {}


def test_another_file_of_options_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.toml").write_text("[serve]\nport = 1001\n")
    monkeypatch.setenv("LAMINA_CONFIG", "other.toml")
    assert options_of_serve(monkeypatch, "app.py")["port"] == 1001


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[serve]\nprot = 1\n", "no option 'prot'"),
        ("[serv]\nport = 1\n", "no command 'serv'"),
        ("serve = 1\n", "no table"),
        ("[serve\n", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_of_options_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lamina.toml").write_text(text)
    with pytest.raises(BadValue, match=told) as refused:
        CliRunner().invoke(cli.root, ["serve", "app.py"], catch_exceptions=False)
    assert "lamina.toml" in refused.value.message and refused.value.hint


# ----------------------------------------------------------------------------- templates


@pytest.mark.parametrize("template", ["function", "workflow", "onnx", "torch"])
def test_a_template_passes_its_own_tests(tmp_path: Path, template: str) -> None:
    if template == "torch":
        pytest.importorskip("torch")
    result = CliRunner().invoke(cli.root, ["init", str(tmp_path / "shop"), "--template", template], catch_exceptions=False)
    assert result.exit_code == 0 and 'lamina.App("shop")' in (tmp_path / "shop" / "app.py").read_text()
    names = {path.name for path in (tmp_path / "shop").iterdir()}
    assert names == {"app.py", "test_app.py", "lamina.toml", "requirements.txt", ".gitignore"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "shop",
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout


def test_init_says_which_file_an_app_still_needs(tmp_path: Path) -> None:
    (tmp_path / "has").mkdir()
    (tmp_path / "has" / "model.onnx").touch()
    said = {name: CliRunner().invoke(cli.root, ["init", str(tmp_path / name), "--template", "onnx"]) for name in ("lacks", "has")}
    assert f"needed: your model, as {tmp_path / 'lacks' / 'model.onnx'}" in said["lacks"].output
    assert "needed" not in said["has"].output


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("mine")
    with pytest.raises(BadValue, match=r"app\.py is there already"):
        CliRunner().invoke(cli.root, ["init", str(tmp_path), "--name", "x"], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


# ----------------------------------------------------------------------------------- dev


def test_the_options_of_serve_are_handed_on_as_they_were_given() -> None:
    given = [
        "app.py",
        "--port",
        "0",
        "--cors-origin",
        "https://a.b",
        "--cors-origin",
        "https://c.d",
        "--no-probe",
        "--grace",
        "1s",
    ]
    options = serve.command.make_context("serve", list(given)).params
    words = dev.serve_words(serve.command.params, options)
    assert serve.command.make_context("serve", words).params == options


APP = """
import logging
import lamina
app = lamina.App("dev")
log = logging.getLogger("mine")

@app.function(scale=lamina.Scale(min=1))
def version(x: int) -> str:
    log.info("asked with %s", x)
    return "{0}"
"""


@pytest.mark.live
def test_dev_serves_the_new_code_after_a_change_and_survives_a_mistake(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    a_second_ns = time.time_ns() // 10**9 * 10**9
    save(app, APP.format("v1"), a_second_ns)
    with open(tmp_path / "log.txt", "w+b") as log:
        words = ["dev", "app.py", "--port", "0", "--store", "none", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lamina", *words],
            cwd=tmp_path,
            env={**{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}, "PYTHONPATH": SRC},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        try:
            until(lambda: lines)
            assert post(f"{json.loads(lines[0])['url']}/v1/functions/version", 7) == (200, "v1")
            save(app, "def broken(:\n", a_second_ns + 1)
            until(lambda: b"SyntaxError" in text(log) or b"invalid syntax" in text(log))
            save(app, APP.format("v2"), a_second_ns + 2)
            until(lambda: len(lines) > 1)
            assert post(f"{json.loads(lines[1])['url']}/v1/functions/version", 7) == (200, "v2")
            until(lambda: text(log).count(b"asked with 7") == 2)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            reader.join(30)
            process.stdout.close()
        shown = text(log).decode()
    assert process.returncode == 0
    assert "app.py has changed" in shown and "INFO mine: asked with 7" in shown
    assert re.search(r"version \S+ met: \d+\.\d ms, queued \d+\.\d.*; batch 1 on cpu0/\d+; cost", shown)


def save(path: Path, source: str, changed_ns: int) -> None:
    """Save a file at once, as changed at this time: all within one second here, which compiled modules cannot tell apart."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(source)
    os.utime(hidden, ns=(changed_ns, changed_ns))
    hidden.rename(path)


def text(log: object) -> bytes:
    return Path(log.name).read_bytes()  # type: ignore[attr-defined]


def until(holds: object) -> None:
    deadline = time.monotonic() + 60
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
