"""A `lamina serve` as a child process, and calls to it: open-loop, by as many processes as it takes to keep up."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

APP = "benchmarks/gpu/app.py"
IMAGE = random.Random(0).randbytes(224 * 224 * 3)
WORDS = json.dumps(list(range(1, 129))).encode()


def request(name: str, kind: str = "functions", *, patient: bool = False, peer: str = "lamina") -> bytes:
    text = name == "bert_base"
    if peer == "litserve":
        return post(f"/{name}", b'{"words": %s}' % WORDS if text else b'{"image": "%s"}' % base64.b64encode(IMAGE))
    body, mime = (WORDS, "application/json") if text else (IMAGE, "application/octet-stream")
    return post(f"/v1/{kind}/{name}", body, mime, patient=patient)


def post(path: str, body: bytes, mime: str = "application/json", *, patient: bool = False) -> bytes:
    """`patient` waits two minutes, whatever the goal: for first calls, which load."""
    more = "Lamina-Deadline-Ms: 120000\r\n" if patient else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {mime}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


@contextmanager
def served(*options: str, app: str = APP) -> Iterator[tuple[str, int, int]]:
    """(url, port, pid) of a server on this machine."""
    command = [sys.executable, "-m", "lamina", "serve", app, "--json", "--port", "0", *options]
    path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = json.loads(line)["url"]
        yield url, int(url.rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.wait(40)


async def ask(port: int, wire: bytes) -> tuple[int, bytes, float]:
    """(status, body, seconds), on a connection of its own."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(wire)
    status, body = await read(reader)
    writer.close()
    return status, body, time.perf_counter() - begin


async def read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


def once(port: int, wire: bytes) -> tuple[int, bytes, float]:
    return asyncio.run(ask(port, wire))


# ------------------------------------------------------------------- open-loop load


async def _open_loop(port: int, rates: dict[str, float], seconds: float, seed: int, peer: str) -> list[tuple[str, int, float]]:
    """Poisson arrivals of each name; (name, status, seconds) of every call, counted from when it was due."""
    found: list[tuple[str, int, float]] = []
    idle: list[tuple[Any, Any]] = []
    rng = random.Random(seed)
    wires = {name: request(name, peer=peer) for name in rates}

    async def one(name: str, due: float) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            writer.write(wires[name])
            status, _ = await read(reader)
            idle.append((reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        found.append((name, status, time.perf_counter() - due))

    begin = time.perf_counter() + 0.2
    plan = []
    for name, rate in rates.items():
        at = begin
        while (at := at + rng.expovariate(rate)) < begin + seconds:
            plan.append((at, name))
    tasks = []
    for at, name in sorted(plan):
        if (wait := at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(name, at)))
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for _, writer in idle:
        writer.close()
    return found


def load(
    port: int, rates: dict[str, float], seconds: float, seed: int = 1, processes: int = 4, peer: str = "lamina"
) -> list[tuple[str, int, float]]:
    """By several processes, each with its part of the rate."""
    part = {name: rate / processes for name, rate in rates.items()}
    words = [
        [sys.executable, "-m", "benchmarks.gpu.server", str(port), json.dumps(part), str(seconds), str(seed + n), peer]
        for n in range(processes)
    ]
    running = [subprocess.Popen(word, stdout=subprocess.PIPE) for word in words]
    found: list[tuple[str, int, float]] = []
    for process in running:
        out, _ = process.communicate(timeout=120)
        found += [(name, status, took) for name, status, took in json.loads(out)]
    return found


if __name__ == "__main__":
    result = asyncio.run(_open_loop(int(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
    sys.stdout.write(json.dumps(result))
