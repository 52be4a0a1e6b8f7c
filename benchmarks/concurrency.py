"""Calls and streams at once in one instance, over HTTP: `python -m benchmarks.concurrency [--out FILE]`.

Two questions. How long do 40 calls that wait 200 ms take, in one instance on one core? And how soon does each of 100 clients that
come at once have the first piece of its stream, the function pinned to one core?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import open_gateway
from lamina.server.http_server import event_loop_factory

APP = """
import asyncio
import lamina

app = lamina.App("concurrency")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE, concurrency=40)
async def wait(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.function(scale=ONE, concurrency=100, slo=lamina.SLO(timeout="60s"))
async def tokens(count: int):
    for number in range(count):
        yield f"token {number}"
        await asyncio.sleep(0.05)
"""


def post(path: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST /v1/functions/{path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def calls_at_once(port: int, count: int, seconds: float) -> float:
    """Seconds until all have their answers; connections are open before."""
    open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    began_s = time.perf_counter()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post("wait", seconds))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        writer.close()

    await asyncio.gather(*(one(*pair) for pair in open_ones))
    return time.perf_counter() - began_s


async def first_pieces(port: int, count: int, pieces: int) -> tuple[list[float], int]:
    """Per stream the milliseconds until its first piece, all begun at once; and how many were whole."""
    open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    whole = 0

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        nonlocal whole
        began_s = time.perf_counter()
        writer.write(post("tokens", pieces, "accept: text/event-stream", "connection: close"))
        await reader.readuntil(b'"token 0"')
        first_ms = (time.perf_counter() - began_s) * 1e3
        rest = await reader.read()
        whole += rest.count(b"token") == pieces - 1 and b"event: end" in rest
        writer.close()
        return first_ms

    return sorted(await asyncio.gather(*(one(*pair) for pair in open_ones))), whole


async def play_clients(port: int, rounds: int, streams: int, pieces: int) -> tuple[list[float], list[float], int]:
    """All clients, in a process of their own: of streams, or of calls if there are none."""
    if not streams:
        await calls_at_once(port, 4, 0.01)
        return [await calls_at_once(port, 40, 0.2) for _ in range(rounds)], [], 0
    await first_pieces(port, 4, 2)
    waits: list[float] = []
    firsts: list[float] = []
    whole = 0
    for _ in range(rounds):
        found, complete = await first_pieces(port, streams, pieces)
        firsts, whole = firsts + found, whole + complete
    return waits, firsts, whole


async def clients_told(*numbers: int) -> Any:
    options = [str(number) for number in numbers]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.concurrency", "--client", *options, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await client.communicate()
    return json.loads(told)


async def measure(rounds: int, streams: int, pieces: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app.py"
        app.write_text(APP)
        gateway = await open_gateway(open_local(str(app)))
        try:
            while not gateway.is_ready():
                await asyncio.sleep(0.05)
            waits, _, _ = await clients_told(gateway.port, rounds, 0, 0)
            began_s = time.process_time()
            _, firsts, whole = await clients_told(gateway.port, rounds, streams, pieces)
            cpu_ms = (time.process_time() - began_s) * 1e3 / (rounds * streams)
        finally:
            await gateway.stop(5)
    firsts.sort()
    return {
        "label": "measured",
        "setup": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "policy": "frontier",
            "load_average": os.getloadavg()[0],
            "clients": "a process of their own on the same machine, all streams begun at once",
        },
        "forty_calls_of_200_ms": {"seconds": [round(one, 4) for one in waits]},
        "streams": {
            "at_once": streams,
            "rounds": rounds,
            "pieces": pieces,
            "whole": whole,
            "gateway_cpu_ms_per_stream": round(cpu_ms, 3),
            "first_piece_ms": {
                "p50": round(firsts[len(firsts) // 2], 2),
                "p99": round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 2),
                "max": round(firsts[-1], 2),
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--client", nargs=4, type=int, help="port, rounds, streams, pieces: used by itself")
    given = parser.parse_args()
    if given.client:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            print(json.dumps(runner.run(play_clients(*given.client))))
        return
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        found = runner.run(measure(given.rounds, given.streams, given.pieces))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
