"""A server with a console under a load of several targets, as tests, pictures and measurements of the console need it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ZOO = (str(ROOT / "benchmarks" / "apps" / "zoo.py"), "--profiles", str(ROOT / "profiles" / "h200"))
RATES = {
    "resnet50": 30.0,
    "bert_base": 15.0,
    "convnext_tiny": 20.0,
    "mobilenet_v3_large": 25.0,
    "distilbert": 20.0,
    "swin_t": 12.0,
    "describe_album": 20.0,
}
"""Calls a second of the zoo: what two cores can send beside a browser."""

STUDIO = (str(ROOT / "benchmarks" / "apps" / "studio.py"), "--profiles", str(ROOT / "profiles" / "v100"))
STUDIO_RATES = {
    "mobilenet_v2": 10.0,
    "resnet50": 16.0,
    "vgg16": 10.0,
    "efficientnet_b7": 12.0,
    "resnet101": 10.0,
    "convnext_large": 45.0,
    "describe_album": 14.0,
}
"""Calls a second of the studio: two V100s have much to do, the machine that emulates them little."""


@contextlib.contextmanager
def served(*command: str, emulate: str = "h200x2") -> Iterator[dict[str, Any]]:
    """A server with a console, as a user starts it; gives what it says when it is ready."""
    with tempfile.TemporaryDirectory(prefix="lamina-console-") as folder:
        options = [*command, "--console", "--port", "0", "--admin-port", "0", "--store", f"{folder}/store.db", "--json"]
        options += ["--emulate", emulate] if emulate else []
        process = subprocess.Popen(
            [sys.executable, "-m", "lamina", "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        reader: threading.Thread | None = None
        try:
            assert process.stdout is not None
            told = {**json.loads(process.stdout.readline()), "pid": process.pid}
            reader = threading.Thread(target=process.stdout.read)  # a full pipe would stop it
            reader.start()
            yield told
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if reader is not None:
                reader.join()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def loaded(
    url: str, rates: dict[str, float], *, workflows: tuple[str, ...] = ("describe_album",), token: str = ""
) -> Iterator[None]:
    """Open-loop calls from a process of its own, until the end of the block."""
    paths = {f"/v1/{'workflows' if name in workflows else 'functions'}/{name}": rate for name, rate in rates.items()}
    command = [sys.executable, "-m", "benchmarks.console.demo", url, json.dumps(paths), token]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def administer(admin_url: str, what: str, **given: Any) -> Any:
    """A request to management, such as `tenant/set`."""
    body, headers = json.dumps(given).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{admin_url}/v1/admin/{what}", body, headers)) as answer:
        return json.load(answer)


# ------------------------------------------------------------------------------- the generator


async def _call_all(url: str, paths: dict[str, float], token: str) -> None:
    host, _, port = url.partition("://")[2].partition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(path: str) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
            body = b"[1, 2, 3, 4, 5, 6]"
            head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            head += f"authorization: Bearer {token}\r\n\r\n" if token else "\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = next((line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"x: 0")
            await reader.readexactly(int(size.split(b":")[1]))
            idle.append((reader, writer))

    async def arrivals(path: str, rate: float, rng: random.Random) -> None:
        tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            task = asyncio.create_task(call(path))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    seeds = random.Random(2)
    await asyncio.gather(*(arrivals(path, rate, random.Random(seeds.random())) for path, rate in paths.items()))


if __name__ == "__main__":
    asyncio.run(_call_all(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
