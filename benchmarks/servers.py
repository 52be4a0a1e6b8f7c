"""Start a server as a user would, wait until it answers, and stop it again."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

APPS = Path(__file__).parent / "apps"


PORTS = range(12_000, 32_000)
"""Below those that the kernel gives to connections: one of these could be taken between the choice of a port and its use."""


def free_port(count: int = 1) -> int:
    """A port of loopback that is free, with the next ones: for a server that is told its port, and may be started again on it."""
    while True:
        port = random.SystemRandom().choice(PORTS)  # processes that look at the same time must not find the same one
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for place in range(count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + place))
            return port


def wait_for(url: str, body: bytes | None, limit_s: float = 20.0) -> None:
    """Until the first right answer."""
    end = time.monotonic() + limit_s
    while True:
        try:
            request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=limit_s):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


@contextlib.contextmanager
def started(
    command: list[str], env: dict[str, str] | None = None, log: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """What it says goes to `log`; without one nobody hears it, and no pipe can fill up and stop it."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=log or subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def lamina(app: str, *options: str, env: dict[str, str] | None = None) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "lamina", "serve", str(APPS / app), "--port", str(port), "--json", *options]
    command += [f"--env={name}" for name in env or {}]
    with started(command, env):
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def floor(name: str, body: bytes, env: dict[str, str] | None = None) -> Iterator[str]:
    port = free_port()
    with started([sys.executable, "-m", "benchmarks.floors", name, str(port)], env):
        wait_for(f"http://127.0.0.1:{port}/{name}", body)
        yield f"http://127.0.0.1:{port}/{name}"


def children_by_parent() -> dict[int, list[int]]:
    """All processes of the machine, by who started them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    return children


def cpu_s(pid: int) -> float:
    """Time on a core so far, in user and kernel mode."""
    used = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def family_rss_mb(pid: int) -> float:
    """Resident memory of a process and all below it, each page counted in every process that has it."""
    children = children_by_parent()
    total, todo = 0.0, [pid]
    while todo:
        at = todo.pop()
        todo += children.get(at, [])
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{at}/statm").read_text().split()[1]) * 4096 / 1e6
    return total
