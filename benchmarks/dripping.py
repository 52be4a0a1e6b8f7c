"""T10: a thousand clients that send a byte a second, half in the header and half in the body, and two hundred that never read.

`python -m benchmarks.dripping`, about 50 s. Server, slow clients and honest client are processes of their own. The slow ones are
cut off at the limits of a server as it comes (10 s for a header, 30 s between pieces of a body, 30 s for a reader that takes
nothing, and at least 512 bytes a second of a body on average).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hostile import APP, request, rss_mib
from benchmarks.report import Report
from benchmarks.servers import free_port, started, wait_for

DRIPPING, DEAF = 1_000, 200
SPAN_S = 40.0
RATE = 100.0


async def drip(port: int, number: int, until_s: float) -> float:
    """How long it was let to; the whole time if it was not cut off."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/functions/echo HTTP/1.1\r\nHost: localhost\r\n"
    writer.write(head + (b"X-Slow: " if number % 2 else b"Content-Length: 9000\r\n\r\n"))
    answer = asyncio.create_task(reader.read(1))
    try:
        while time.monotonic() < until_s and not answer.done():
            await asyncio.wait([answer], timeout=1.0)
            writer.write(b"a")
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return time.monotonic() - begun


async def deaf(port: int, until_s: float) -> None:
    """Asks for megabytes and reads none of them."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    body = b'"' + b"x" * 200_000 + b'"'
    writer.write(request("POST", "/v1/functions/echo", body) * 5)
    await asyncio.sleep(until_s - time.monotonic())
    writer.transport.abort()


async def attack(port: int) -> None:
    until_s = time.monotonic() + SPAN_S
    waiting = [asyncio.create_task(deaf(port, until_s)) for _ in range(DEAF)]
    lasted = await asyncio.gather(*(drip(port, number, until_s) for number in range(DRIPPING)))
    await asyncio.gather(*waiting)
    heads = lasted[1::2]
    print(json.dumps({"heads_s": max(heads), "bodies_s": max(lasted[::2])}))


async def honest(port: int, attackers: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """A valid request every hundredth of a second on an old connection, first alone, then among `attackers`."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    alone = await _asked(*connection, 10.0)
    attackers()
    await asyncio.sleep(3.0)
    among = await _asked(*connection, 15.0)
    connection[1].close()
    return alone, among


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, span_s: float) -> list[float]:
    """Open loop; milliseconds each, from when it was due."""
    times = []
    begun = time.perf_counter()
    for number in range(int(span_s * RATE)):
        due = begun + number / RATE
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        writer.write(request("POST", "/v1/functions/echo", b"1"))
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1)
        times.append(1e3 * (time.perf_counter() - due))
    return times


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "dripping_app.py"
        app.write_text(APP)
        port = free_port()
        serve = [sys.executable, "-m", "lamina", "serve", str(app), "--port", str(port), "--json", "--store", "none"]
        with started(serve) as process:
            wait_for(f"http://127.0.0.1:{port}/readyz", None)
            held_mib = rss_mib(process.pid)
            attackers: list[subprocess.Popen[str]] = []

            def attack_now() -> None:
                command = [sys.executable, "-m", "benchmarks.dripping", "attack", str(port)]
                attackers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

            before, during = asyncio.run(honest(port, attack_now))
            grown_mib = rss_mib(process.pid) - held_mib
            said = json.loads(attackers[0].communicate()[0])
            report.add("p99 of others, alone", _p99(before), "ms", p50_ms=statistics.median(before))
            report.add("p99 of others, among the slow", _p99(during), "ms", p50_ms=statistics.median(during))
            report.add("p99 among them, against alone", _p99(during) / _p99(before), "times", most=1.1)
            report.add("longest that a header could drip", said["heads_s"], "s", most=13)
            report.add("longest that a body could drip", said["bodies_s"], "s", most=34)
            report.add("memory for each slow client", 1024 * grown_mib / (DRIPPING + DEAF), "KiB", most=64)


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def main() -> None:
    if sys.argv[1:2] == ["attack"]:
        asyncio.run(attack(int(sys.argv[2])))
        return
    report = Report()
    run(report)
    report.write(Path("results") / "bench-dripping.json")


if __name__ == "__main__":
    main()
