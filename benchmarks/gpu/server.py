"""A `lamina serve` as a child process, and calls to it: open-loop, by as many processes as it takes to keep up."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load import generator

APP = "benchmarks/gpu/app.py"
GPU = os.environ.get("LAMINA_GPU", "auto")
"""`null`: the executor's twin, to try a benchmark before there is a device."""
CLIENT_CORES = 4
LOGS = os.environ.get("LAMINA_EVENT_LOGS")
"""A folder for the event log of each server, to read afterwards why a call was late; writing it costs time."""
IMAGE = random.Random(0).randbytes(224 * 224 * 3)
WORDS = json.dumps(list(range(1, 129))).encode()


def request(name: str, kind: str = "functions", *, patient: bool = False, peer: str = "lamina") -> bytes:
    if name.startswith("/"):
        return post(name, IMAGE, "application/octet-stream", patient=patient)
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


def on_cores(*, clients: bool) -> Callable[[], None] | None:
    """For a child process: cores of its own for clients, as if they were on other machines, where there are enough.

    A generator that sends 4 GB/s would otherwise take turns with the server on its cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 16:
        return None
    return lambda: os.sched_setaffinity(0, cores[-CLIENT_CORES:] if clients else cores[:-CLIENT_CORES])


@contextmanager
def served(*options: str, app: str = APP) -> Iterator[tuple[str, int, int]]:
    """(url, port, pid) of a server on this machine."""
    command = [
        sys.executable,
        "-m",
        "lamina",
        "serve",
        app,
        "--json",
        "--port",
        "0",
        "--gpu",
        GPU,
        "--env",
        f"LAMINA_GPU={GPU}",
        *options,
        *(("--log", str(Path(LOGS, f"{Path(app).stem}-{time.time():.0f}.jsonl"))) if LOGS else ()),
    ]
    path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, preexec_fn=on_cores(clients=False)
    )
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


def load(
    port: int,
    rates: dict[str, float],
    seconds: float,
    seed: int = 1,
    processes: int = 4,
    peer: str = "lamina",
    connections: int = 200,
) -> list[tuple[str, int, float]]:
    """Poisson arrivals at equal rates; (name, status, seconds) of every call, in order and counted from when it was due.

    By several processes in C, each with its part of the rate: bodies of 150 KB at 25,000 calls/s are 4 GB/s, and a generator
    that is late itself would be measured as the server. All connections together are fewer than a server takes: it would close
    the idlest ones for others.
    """
    assert len(set(rates.values())) == 1, rates
    names = list(rates)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, str(place))) for place in range(len(names))]
        for name, path in zip(names, paths, strict=True):
            Path(path).write_bytes(request(name, peer=peer))
        rate = str(sum(rates.values()) / processes)
        words = [str(generator()), "127.0.0.1", str(port), rate, str(seconds), str(connections)]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": on_cores(clients=True)}
        running = [subprocess.Popen([*words, str(seed + n), *paths], **options) for n in range(processes)]
        found: list[tuple[int, tuple[str, int, float]]] = []
        for process in running:
            *lines, last = process.communicate(timeout=seconds + 60)[0].splitlines()
            for line in lines:
                kind, status, due_us, _, took_us = line.split()
                found.append((int(due_us), (names[int(kind)], int(status), int(took_us) / 1e6)))
            found += [(int(seconds * 1e6), (names[0], 0, seconds))] * int(last.split()[2])  # unanswered
    return [call for _, call in sorted(found)]
