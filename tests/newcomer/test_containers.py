"""A server in a container: a token from a variable or none at all, said out loud; and a drain before it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.cli import serve

SRC = str(Path(lamina.__file__).parent.parent)
APP = (
    "import lamina\napp = lamina.App('boxed')\n\n@app.function(scale=lamina.Scale(min=1))\ndef f(x: int) -> int:\n    return x\n"
)
TOKEN = "a-token-of-twenty-and-more-characters"

pytestmark = pytest.mark.live


@contextmanager
def serving(folder: Path, *words: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    (folder / "app.py").write_text(APP)
    process = subprocess.Popen(
        [sys.executable, "-m", "lamina", "serve", "app.py", "--port", "0", "--json", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SRC, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"].replace("0.0.0.0", "127.0.0.1"), process
    finally:
        process.kill()
        process.communicate()


def status_of(url: str, body: bytes | None = None, token: str = "") -> int:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def until(url: str, status: int) -> None:
    while status_of(url) != status:
        pass


def test_an_open_address_takes_the_token_of_the_variable(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", LAMINA_TOKEN=TOKEN) as (url, _):
        assert status_of(f"{url}/v1/functions/f", b"1") == 401
        assert status_of(f"{url}/v1/functions/f", b"1", TOKEN) == 200


def test_an_open_address_without_a_token_is_refused_with_three_ways_out(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    environment = {key: value for key, value in os.environ.items() if key != "LAMINA_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "lamina", "serve", "app.py", "--host", "0.0.0.0", "--port", "0"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert all(way in done.stderr for way in ("LAMINA_TOKEN", "lamina token create", "--no-auth"))


def test_without_authentication_all_may_call(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", "--no-auth") as (url, _):
        assert status_of(f"{url}/v1/functions/f", b"1") == 200


def test_a_server_told_to_stop_is_not_ready_and_serves_until_it_has_drained(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain", "60s", "--store", "none") as (url, process):
        until(f"{url}/readyz", 200)
        process.send_signal(signal.SIGTERM)
        until(f"{url}/readyz", 503)
        seen: list[Any] = [status_of(f"{url}/v1/functions/f", b"1"), status_of(f"{url}/healthz")]
        process.send_signal(signal.SIGTERM)  # a second one does not wait
        assert process.wait(30) == 0
    assert seen == [200, 200]


def test_the_compose_file_serves_with_options_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    root = Path(__file__).parent.parent.parent
    compose = yaml.safe_load((root / "deploy" / "compose" / "compose.yaml").read_text())
    lamina_service = compose["services"]["lamina"]
    command, *words = lamina_service["command"]
    options = serve.command.make_context(command, list(words)).params
    assert (
        command == "serve"
        and options["host"] == "0.0.0.0"
        and options["drain"] == "5s"
        and options["place"].startswith("postgres")
    )
    assert lamina_service["read_only"] and lamina_service["cap_drop"] == ["ALL"]
    folder = root / "deploy" / "compose"
    mounted = [volume.split(":")[0] for one in compose["services"].values() for volume in one.get("volumes", ())]
    assert all((folder / path).exists() for path in mounted if path.startswith("."))
    assert (folder / lamina_service["build"]["context"] / lamina_service["build"]["dockerfile"]).is_file()
    for config in compose["configs"].values():
        yaml.safe_load(config["content"])
