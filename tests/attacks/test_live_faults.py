"""Faults of the machine under a live server: a sync to disk that fails or hangs, and a wall clock that jumps by an hour.

A library that is loaded before all others (`faults_shim.c`) makes them, as a page of shared memory says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.servers import free_port, started, wait_for

from tests.serving import write_app

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc, on Linux"),
]

APP = """
import time

import lamina

app = lamina.App("faulty")

@app.function(scale=lamina.Scale(min=1, max=1))
def echo(x):
    return x

@app.workflow()
async def naps(x):
    await lamina.sleep(1.0)
    return await echo(x)

@app.every("500ms")
@app.function()
def tick():
    print("ticked", flush=True)
    return 1
"""

HOUR_S = 3_600
SYNC_FAILS, SYNC_HANGS = "sync_fails", "sync_hangs"


class Faults:
    """The page that the shim looks at."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4_096))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 4_096)
        self.env = {"LAMINA_TEST_FAULTS": str(path)}
        self.wall_s, self.sync_fails, self.sync_hangs = 0, False, False

    def set(self, **what: Any) -> None:
        self.__dict__.update(what)
        self._page[:16] = struct.pack("<qii", self.wall_s, self.sync_fails, self.sync_hangs)


class Server:
    """A server under faults, and a client of it."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.port = free_port()
        self.faults = Faults(folder / "faults")
        self.app = write_app(folder, APP)
        self.log = folder / "log"
        self._env = {**self.faults.env, "LD_PRELOAD": str(shim)}
        store = str(folder / "runs.db")
        self._command = [sys.executable, "-m", "lamina", "serve", str(self.app), "--port", str(self.port), "--store", store]

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as log, started([*self._command, *options], self._env, log) as process:
            wait_for(f"http://127.0.0.1:{self.port}/v1/functions/echo", b"1")
            yield process

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = 20.0, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request(method, path, json.dumps(body) if body is not None else None, sent)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None

    def run(self, target: str, x: Any, timeout_s: float = 20.0, **headers: str) -> tuple[int, Any]:
        return self.ask("POST", target, x, timeout_s, prefer="respond-async", **headers)

    def result(self, id: str) -> tuple[int, Any]:
        return self.ask("GET", f"/v1/runs/{id}/result?wait_ms=20000", timeout_s=40.0)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "faults.so"
    source = Path(__file__).with_name("faults_shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made


@pytest.fixture
def server(tmp_path: Path, shim: Path) -> Server:
    return Server(tmp_path, shim)


ECHO, NAPS = "/v1/functions/echo", "/v1/workflows/naps"


def test_what_a_failing_sync_keeps_from_the_disk_is_not_accepted_and_nothing_accepted_is_lost(server: Server) -> None:
    with server.running() as process:
        accepted = [server.run(NAPS, number)[1]["id"] for number in range(10)]
        server.faults.set(sync_fails=True)
        refused = [server.run(ECHO, number)[0] for number in range(5)]
        assert all(status == 503 for status in refused), refused
        assert server.ask("POST", ECHO, 7) == (200, 7)
        time.sleep(1.5)  # steps of the accepted ones end meanwhile, and cannot be journaled
        server.faults.set(sync_fails=False)
        until_s = time.monotonic() + 20
        while (status := server.run(ECHO, 1)[0]) != 202 and time.monotonic() < until_s:
            time.sleep(0.1)
        assert status == 202
        assert [server.result(id) for id in accepted] == [(200, number) for number in range(10)]
        more = [server.run(NAPS, number)[1]["id"] for number in range(10)]
        server.faults.set(sync_fails=True)
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
    server.faults.set(sync_fails=False)
    with server.running():
        assert [server.result(id) for id in more] == [(200, number) for number in range(10)]


def test_a_sync_that_hangs_holds_up_what_is_written_and_nothing_else(server: Server) -> None:
    found: list[Any] = []
    with server.running() as process:
        assert server.run(ECHO, 1)[0] == 202
        server.faults.set(sync_hangs=True)
        waiting = threading.Thread(target=lambda: found.append(server.run(ECHO, 2, timeout_s=60)))
        waiting.start()
        took = []
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            assert server.ask("POST", ECHO, 7) == (200, 7)
            took.append(time.monotonic() - began_s)
        assert not found and sorted(took)[int(0.9 * len(took))] < 0.5
        assert server.ask("GET", "/healthz")[0] == 200
        server.faults.set(sync_hangs=False)
        waiting.join(20)
        ((status, row),) = found
        assert status == 202 and server.result(row["id"]) == (200, 2)
        server.faults.set(sync_hangs=True)
        process.terminate()
        time.sleep(1.0)
        server.faults.set(sync_hangs=False)
        assert process.wait(20) is not None


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_wall_clock_that_jumps_changes_no_deadline_wait_or_trigger(server: Server, by_s: int) -> None:
    with server.running():
        before = server.run(NAPS, 1, lamina_deadline_ms="60000")[1]["id"]
        server.faults.set(wall_s=by_s)
        began_s = time.monotonic()
        after = server.run(NAPS, 2, lamina_deadline_ms="60000")[1]["id"]
        assert server.result(before) == (200, 1) and server.result(after) == (200, 2)
        assert time.monotonic() - began_s < 15
        late = server.run(NAPS, 3, lamina_deadline_ms="200")[1]["id"]
        assert server.result(late)[0] in (429, 504)  # it was not admitted, or not done
        assert server.ask("POST", ECHO, 7, lamina_deadline_ms="5000") == (200, 7)
        ticks = server.log.read_bytes().count(b"ticked")
        time.sleep(5.0)
        assert 2 <= server.log.read_bytes().count(b"ticked") - ticks <= 30
        assert server.ask("GET", "/readyz")[0] == 200
