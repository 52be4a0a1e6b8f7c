"""`kill -9` of a random worker every two seconds under 70 % load: nothing accepted is lost, doubled or mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field

from benchmarks.load import closed
from benchmarks.report import Report
from benchmarks.servers import APPS, children_by_parent, free_port, started, wait_for

PATH = "/v1/functions/stamp"


@dataclass
class History:
    """What the clients saw, and nothing else: the server is not asked."""

    sent: int = 0
    ok: int = 0
    wrong: int = 0
    refused: int = 0
    failed: int = 0
    doubled: int = 0
    lost: int = 0
    kills: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def success(self) -> float:
        return self.ok / max(1, self.sent - self.refused)


def run(report: Report, seconds: float = 60.0, every_s: float = 2.0) -> None:
    port = free_port()
    with started([sys.executable, "-m", "lamina", "serve", str(APPS / "nonce.py"), "--port", str(port), "--json"]) as server:
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        capacity = closed(f"http://127.0.0.1:{port}{PATH}", '"warm"', 16, 3).rate
        rate = 0.7 * capacity
        calm = asyncio.run(torture(server.pid, port, rate, min(seconds, 10), 0.0))
        storm = asyncio.run(torture(server.pid, port, rate, seconds, every_s))
    calm_p99, storm_p99 = p99(calm.latencies_ms), p99(storm.latencies_ms)
    report.add("without faults: success", calm.success, "x", least=0.99, rate=rate, p99_ms=calm_p99)
    report.add("workers killed", float(storm.kills), "", calls=storm.sent)
    report.add("accepted and lost", float(storm.lost), "calls", most=0)
    report.add("answered twice, or with another's answer", float(storm.doubled + storm.wrong), "calls", most=0)
    report.add("success", storm.success, "x", least=0.99, refused=storm.refused, p99_ms=storm_p99, failures=str(storm.failures))


def p99(times_ms: list[float]) -> float:
    return sorted(times_ms)[int(len(times_ms) * 0.99)] if times_ms else 0.0


async def torture(
    pid: int, port: int, rate: float, seconds: float, every_s: float, seed: int = 1, *, kills: int = 0, deadline_s: int = 0
) -> History:
    """Open-loop Poisson calls with a nonce each; a killer with a seed of its own beside them (none if `every_s` is 0).

    For machines of any speed: with `kills` it goes on until so many workers died, each when all of them stood; with `deadline_s`
    clients wait that long instead of what the app promises."""
    rng = random.Random(seed)
    history = History()
    answers: dict[str, int] = {}
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    room = asyncio.Semaphore(900)  # the server takes a thousand connections
    patience_s = deadline_s + 8
    wish = b"Lamina-Deadline-Ms: %d\r\n" % (1000 * deadline_s) if deadline_s else b""

    async def call(nonce: str, due: float) -> None:
        async with room:
            await one_call(nonce, due)

    async def one_call(nonce: str, due: float) -> None:
        history.sent += 1
        if idle:
            reader, writer = idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = f'"{nonce}"'.encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (PATH.encode(), wish, len(body)) + body
        )
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), patience_s)
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            said = await asyncio.wait_for(reader.readexactly(length), patience_s)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            history.lost += 1
            writer.close()
            return
        status = int(head[9:12])
        if status == 200:
            history.ok += 1
            history.wrong += said != f'"{hashlib.sha256(nonce.encode()).hexdigest()}"'.encode()
            answers[nonce] = answers.get(nonce, 0) + 1
            history.doubled += answers[nonce] > 1
            history.latencies_ms.append((time.perf_counter() - due) * 1000)
        elif status == 429:
            history.refused += 1
        else:
            history.failed += 1
            word = said.split(b'"code":"')[1].split(b'"')[0].decode() if b'"code":"' in said else str(status)
            history.failures[word] = history.failures.get(word, 0) + 1
        idle.append((reader, writer))

    async def killer() -> None:
        dice = random.Random(seed + 1)
        while True:
            await asyncio.sleep(every_s)
            if kills:
                await asyncio.to_thread(wait_for, f"http://127.0.0.1:{port}/readyz", None, 60.0)
            victims = sorted(children_by_parent().get(pid, []))
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(victims), signal.SIGKILL)
                    history.kills += 1

    killing = asyncio.create_task(killer()) if every_s else None
    begin = due = time.perf_counter()
    calls: set[asyncio.Task[None]] = set()
    number = 0
    while due < begin + seconds or history.kills < kills:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(call(f"{seed}-{number}", due))
        calls.add(task)
        task.add_done_callback(calls.discard)
        number += 1
        due += rng.expovariate(rate)
    if killing is not None:
        killing.cancel()
    if calls:
        await asyncio.wait(calls)
    for _, writer in idle:
        writer.close()
    return history
