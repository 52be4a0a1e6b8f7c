"""Foreign clients, unchanged: each does everything it can, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.gateway.oip.apps import APP
from tests.serving import write_app

ROOT = Path(__file__).parents[3]
LIMIT_S = 100
pytestmark = pytest.mark.live


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: pip install 'lamina[clients]'")


CLIENTS = {
    "triton_http": needs("tritonclient", "gevent", "aiohttp", "grpc", "ml_dtypes"),
    "triton_grpc": needs("tritonclient", "grpc", "ml_dtypes"),
    "kserve_rest": needs("kserve", "httpx", "grpc"),
}


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "several processes"])
def ports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Ports of a server for HTTP and gRPC. No client may be able to tell how many processes answer, nor earlier clients."""
    app = write_app(tmp_path_factory.mktemp("tensors"), APP)
    ways = ["--policy", "edf", "--store", "none", "--port", "0", "--grpc-port", "0", "--ingress", str(request.param), "--json"]
    command = [sys.executable, "-m", "lamina", "serve", str(app), *ways]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            _wait_until_ready(told["url"])
            yield int(told["url"].rpartition(":")[2]), told["grpc_port"]
        finally:
            process.terminate()


def _wait_until_ready(url: str) -> None:
    """It listens before its functions are loaded."""
    while True:
        with contextlib.suppress(HTTPError), urlopen(f"{url}/readyz"):
            return
        time.sleep(0.02)


@pytest.mark.parametrize("client", [pytest.param(name, marks=mark) for name, mark in CLIENTS.items()])
def test_a_client_can_do_everything(client: str, ports: tuple[int, int]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.gateway.oip.{client}", f"127.0.0.1:{ports[client.endswith('grpc')]}"]
    quiet = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=quiet, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    failed = [f"{name}: {said}" for name, said in json.loads(done.stdout).items() if said != "ok"]
    assert not failed, "\n".join(failed)
