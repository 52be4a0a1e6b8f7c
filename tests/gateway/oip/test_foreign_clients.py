"""Clients nobody here wrote, unchanged: each does everything it can, in a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from lamina import policies
from lamina.gateway.serve import open_gateway
from lamina.live.start import open_local
from tests.gateway.oip.apps import APP
from tests.serving import run, write_app

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.live


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: pip install 'lamina[clients]'")


async def _served(folder: Path, client: str, ingress: int) -> dict[str, str]:
    live = open_local(str(write_app(folder, APP)), policy=policies.build("edf"))
    gateway = await open_gateway(live, port=0, grpc_port=0, ingress=ingress)
    try:
        while not gateway.api.ready():
            await asyncio.sleep(0.01)
        port = gateway.oip.grpc_port if client == "triton_grpc" else gateway.port
        command = [sys.executable, "-W", "ignore", "-m", f"tests.gateway.oip.{client}", f"127.0.0.1:{port}"]
        quiet = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT, env=quiet)
        said, wrong = await process.communicate()
        assert process.returncode == 0, wrong.decode()
        found: dict[str, str] = json.loads(said)
        return found
    finally:
        await gateway.stop(5)


def outcomes(folder: Path, client: str, ingress: int = 0) -> dict[str, str]:
    found: dict[str, str] = run(lambda: _served(folder, client, ingress), limit_s=100)
    return found


def failed(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {said}" for name, said in found.items() if said != "ok")


@needs("tritonclient", "gevent", "aiohttp", "grpc", "ml_dtypes")
def test_tritonclient_can_do_everything_over_http(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "triton_http"))


@needs("tritonclient", "grpc", "ml_dtypes")
def test_tritonclient_can_do_everything_over_grpc(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "triton_grpc"))


@needs("kserve", "httpx", "grpc")
def test_the_client_of_kserve_can_do_everything(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "kserve_rest"))


@needs("tritonclient", "gevent", "aiohttp", "grpc", "ml_dtypes")
def test_tritonclient_cannot_tell_over_http_that_several_processes_answer(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "triton_http", ingress=2))


@needs("tritonclient", "grpc", "ml_dtypes")
def test_tritonclient_cannot_tell_over_grpc_that_several_processes_answer(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "triton_grpc", ingress=2))


@needs("kserve", "httpx", "grpc")
def test_the_client_of_kserve_cannot_tell_that_several_processes_answer(tmp_path: Path) -> None:
    assert not failed(outcomes(tmp_path, "kserve_rest", ingress=2))
