"""`lamina serve FOLDER`, `lamina deploy FOLDER` and agents: each app with the packages that its folder asks for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.cli import main
from lamina.cli.deploy import _name_of
from tests.engines.wheels import make_wheel

pytestmark = pytest.mark.live

APP = """
import lamina
import tiny
app = lamina.App("{name}")

@app.function(scale=lamina.Scale(min=1, max=1))
def {name}_version():
    return tiny.version
"""


def folder_of(tmp_path: Path, name: str, version: str) -> Path:
    make_wheel(tmp_path / "wheels", "tiny", version)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "app.py").write_text(APP.format(name=name))
    (folder / "requirements.txt").write_text(f"tiny=={version}\n")
    return folder


@contextmanager
def running(*words: str, **variables: str) -> Iterator[dict[str, Any]]:
    """A command of Lamina that prints one JSON line when it is ready."""
    command = [sys.executable, "-m", "lamina", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()


def first_answer(client: lamina.Client, name: str) -> Any:
    """The first answer that is no refusal: a node that has joined counts a moment later."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return client.call(name, {})
        except lamina.errors.Refused:
            assert time.monotonic() < until_s, "no device for a minute"
            time.sleep(0.05)


def test_a_folder_is_served_in_its_environment_and_another_is_deployed_beside_it(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path, "first", "1.0"), folder_of(tmp_path, "second", "2.0")
    wheels = str(tmp_path / "wheels")
    with running("serve", str(first), "--wheelhouse", wheels, "--port", "0", "--admin-port", "0") as server:
        deploy = [sys.executable, "-m", "lamina", "deploy", str(second), "--admin-url", server["admin_url"]]
        done = subprocess.run(deploy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with lamina.Client(server["url"]) as client:
            assert [client.call("first_version", {}), client.call("second_version", {})] == ["1.0", "2.0"]


def test_an_agent_builds_the_environment_of_a_folder_for_itself(tmp_path: Path) -> None:
    folder, wheels = folder_of(tmp_path, "first", "1.0"), str(tmp_path / "wheels")
    options = ["--wheelhouse", wheels, "--port", "0", "--agents", "127.0.0.1:0", "--no-devices"]
    with running("serve", str(folder), *options) as server:
        joins = f"127.0.0.1:{server['agents_port']}"
        with running("agent", "--join", joins, "--gpu", "no", "--folder", str(tmp_path / "node"), "--wheelhouse", wheels):
            with lamina.Client(server["url"]) as client:
                assert first_answer(client, "first_version") == "1.0"
            assert len([one for one in (tmp_path / "node" / "environments").iterdir() if one.is_dir()]) == 1


def test_a_folder_without_an_app_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", str(tmp_path), "--store", "none"])
    assert "no app.py in" in capsys.readouterr().err


def test_the_name_of_an_app_is_read_without_its_packages(tmp_path: Path) -> None:
    assert _name_of(folder_of(tmp_path, "first", "1.0") / "app.py") == "first"
