"""A TypeScript client generated from /openapi.json: it compiles at its strictest, finds a wrong field, and calls a real server.

Optional: with node and npm, and a registry that npm can reach.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.gateway.bootstrap import Gateway
from tests.serving import shared, write_app

HAS_NODE = all(shutil.which(tool) for tool in ("node", "npm"))
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.skipif(not HAS_NODE, reason="no node or no npm")]

APP = """
from dataclasses import dataclass

import lamina

app = lamina.App("scores")


@dataclass
class Box:
    x: float
    label: str = ""


@dataclass
class Scored:
    value: float
    box: Box


@app.function(scale=lamina.Scale(max=1))
def score(box: Box, factor: float = 1.0) -> Scored:
    "How much a box is worth."
    return Scored(box.x * factor, box)


@app.function(scale=lamina.Scale(max=1))
def counts(to: int):
    yield from range(to)
"""
PACKAGES = ("openapi-typescript@7", "openapi-fetch@0.13", "typescript@5", "@types/node@20")
SETTINGS = {
    "compilerOptions": {"strict": True, "module": "nodenext", "target": "es2022", "skipLibCheck": True, "types": ["node"]},
    "files": ["client.ts"],
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("scores"), APP)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def project(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    (folder / "package.json").write_text(json.dumps({"name": "client", "private": True, "type": "module"}))
    (folder / "tsconfig.json").write_text(json.dumps(SETTINGS))
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    try:
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm reaches no registry in time")
    if installed.returncode:
        pytest.skip(f"npm cannot install: {installed.stderr[-200:]}")
    with urllib.request.urlopen(f"{gateway.url}/openapi.json") as answer:
        (folder / "openapi.json").write_bytes(answer.read())
    run(folder, "openapi-typescript", "openapi.json", "-o", "api.d.ts")
    shutil.copy(Path(__file__).with_name("client.ts"), folder)
    return folder


def run(folder: Path, tool: str, *arguments: str, code: int = 0) -> str:
    path = folder / "node_modules" / ".bin" / tool
    done = subprocess.run([str(path), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_generated_client_compiles_and_calls_a_server(gateway: Gateway, project: Path) -> None:
    run(project, "tsc")
    command = ["node", "client.js", gateway.url]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["value"], told["label"], told["events"]) == (40, "cat", [0, 1, 2, {}])  # and the end
    assert (told["status"], told["code"]) == (422, "unprocessable") and "box" in told["detail"]


def test_a_call_that_does_not_fit_the_function_does_not_compile(project: Path) -> None:
    wrong = (project / "client.ts").read_text().replace("factor: 2", 'factor: "twice"')
    (project / "wrong.ts").write_text(wrong)
    (project / "wrong.json").write_text(json.dumps({**SETTINGS, "files": ["wrong.ts"]}))
    said = run(project, "tsc", "-p", "wrong.json", code=2)
    assert "wrong.ts(16," in said and "'string' is not assignable to type 'number'" in said
