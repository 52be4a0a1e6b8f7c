"""Memory taken by clients without a token: leavers, endless bodies, and large calls at once, at a real server.

Beside each attack one client calls an echo twenty times a second: all its calls must be answered, and afterwards the gateway must
be back at the memory it had. Three attacks, each at a server of its own:

- leavers: each sends 31 MiB of an announced 32 and closes, four at a time;
- endless bodies: each announces 31 MiB, sends as much as it is allowed and then a byte a second; all at once. Those that are
  turned away come again. All come from one address, which has its share of the budget; the client beside them has the same;
- large calls: thirty legitimate calls of 31 MiB at once, again and again until each is answered, at a server whose processes may
  have 1.2 GiB of address space each (RLIMIT_AS).

`python -m benchmarks.attacks.memory [LEAVERS] [ENDLESS]` writes `results/attacks/memory.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, started, wait_for

RESULTS = Path(__file__).parents[2] / "results" / "attacks" / "memory.json"
MIB = 2**20
LEAVERS, ENDLESS, LARGE = 10_000, 1_000, 30
LIMIT_BYTES = int(1.2 * 2**30)
BACK_MIB = 20.0
EVERY_S = 0.05
SETTLE_S = 15.0
PATIENCE_S = 30.0
HEAD = b"POST /v1/functions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
PIECE = b"x" * MIB


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / MIB


@contextlib.contextmanager
def server(limit_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """A server; its port and process. `limit_bytes`: of address space, for each of its processes."""
    port = free_port()
    command = [sys.executable, "-m", "lamina", "serve", str(APPS / "echo.py"), "--port", str(port), "--store", "none", "--json"]
    if limit_bytes:
        command = ["prlimit", f"--as={limit_bytes}", *command]
    with started(command) as process:
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        wait_for(f"http://127.0.0.1:{port}/v1/functions/echo", b"1")
        yield port, process.pid


async def status_of(reader: asyncio.StreamReader) -> int:
    """Status of the next answer, which is read to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while length:
        length -= len(await reader.read(min(length, 2**18)))
    return int(head.split(b" ")[1])


class Victim:
    """A client with small calls, each on a connection of its own: those that are answered, and how soon."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.latencies_ms: list[float] = []
        self.failed = 0

    async def call(self) -> None:
        began_s = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(HEAD % 4 + b'"hi"')
                if await asyncio.wait_for(status_of(reader), PATIENCE_S) != 200:
                    self.failed += 1
            finally:
                writer.transport.abort()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self.failed += 1
        self.latencies_ms.append((time.monotonic() - began_s) * 1000)

    async def keep_calling(self) -> None:
        while True:
            await self.call()
            await asyncio.sleep(EVERY_S)

    async def call_until_told(self) -> None:
        """As a process of its own: attackers must not slow it down. Ends with its input, and says what it saw."""
        calling = asyncio.create_task(self.keep_calling())
        await asyncio.to_thread(sys.stdin.read)
        calling.cancel()
        ordered = sorted(self.latencies_ms) or [0.0]
        at = {"p50_ms": 0.5, "p99_ms": 0.99, "worst_ms": 1.0}
        figures = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
        print(json.dumps({"calls": len(self.latencies_ms), "failed": self.failed, **figures}))


@contextlib.asynccontextmanager
async def watched(port: int, pid: int) -> AsyncIterator[dict[str, Any]]:
    """What a client beside the attack sees, and the most memory the gateway has."""
    found: dict[str, Any] = {"peak_mib": 0.0}
    command = (sys.executable, "-m", "benchmarks.attacks.memory", "--victim", str(port))
    calling = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def watch() -> None:
        while True:
            found["peak_mib"] = max(found["peak_mib"], rss_mib(pid))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        told, _ = await calling.communicate(b"stop")
        found |= json.loads(told)


async def leave(port: int, mib: int) -> None:
    """Send all but one MiB of a body and close."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(HEAD % (mib * MIB))
            for _ in range(mib - 1):
                writer.write(PIECE)
                await writer.drain()
                if reader._buffer:  # type: ignore[attr-defined]
                    break  # it was turned away
        finally:
            writer.transport.abort()


async def leavers(port: int, count: int, mib: int = 32, at_once: int = 4) -> dict[str, Any]:
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            await leave(port, mib)

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return {"leavers": count, "mib_each": mib - 1}


async def endless(port: int, count: int, seconds: float) -> dict[str, Any]:
    until_s = time.monotonic() + seconds
    turned_away = taken = 0

    async def drip() -> None:
        nonlocal turned_away, taken
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                answer = asyncio.create_task(reader.read(1))
                try:
                    writer.write(HEAD % (31 * MIB) + b'"')
                    for _ in range(30):
                        writer.write(PIECE)
                        await asyncio.wait_for(writer.drain(), 1.0)
                        if answer.done():
                            break
                    taken += not answer.done()
                    while time.monotonic() < until_s and not answer.done():
                        await asyncio.wait([answer], timeout=1.0)
                        writer.write(b"x")
                except TimeoutError:
                    pass
                finally:
                    turned_away += answer.done()
                    answer.cancel()
                    writer.transport.abort()
            await asyncio.sleep(1.0)

    await asyncio.gather(*(drip() for _ in range(count)))
    return {"clients": count, "taken": taken, "turned_away": turned_away}


async def large_calls(port: int, count: int) -> dict[str, Any]:
    """Every client tries again, as it is told to, until it is answered."""
    statuses: dict[int, int] = {}
    body = b'"' + b"x" * (31 * MIB) + b'"'

    async def call() -> None:
        status = 0
        while status != 200:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(HEAD % len(body) + body[:1])
                    answer = asyncio.create_task(status_of(reader))
                    await asyncio.wait([answer], timeout=0.1)  # who is turned away need not send the rest
                    if not answer.done():
                        writer.write(body[1:])
                    status = await answer
                    statuses[status] = statuses.get(status, 0) + 1
                finally:
                    writer.transport.abort()
            if status != 200:
                statuses[0] = statuses.get(0, 0) + (not status)
                await asyncio.sleep(1.0)
                status = 0

    await asyncio.wait_for(asyncio.gather(*(call() for _ in range(count))), 300)
    return {"large_calls": count, **{f"status_{status}": number for status, number in sorted(statuses.items())}}


async def settled_mib(port: int, pid: int, before_mib: float) -> float:
    """Memory of the gateway once it is back, or after a while."""
    end_s = time.monotonic() + SETTLE_S
    while rss_mib(pid) > before_mib + BACK_MIB / 2 and time.monotonic() < end_s:
        await Victim(port).call()
        await asyncio.sleep(0.2)
    return rss_mib(pid)


async def attacked(
    report: Report, name: str, attack: Callable[[int], Awaitable[dict[str, Any]]], limit_bytes: int = 0
) -> dict[str, Any]:
    with server(limit_bytes) as (port, pid):
        for _ in range(50):
            await Victim(port).call()
        before_mib = rss_mib(pid)
        async with watched(port, pid) as seen:
            began_s = time.monotonic()
            done = await attack(port)
            took_s = time.monotonic() - began_s
        after_mib = await settled_mib(port, pid, before_mib)
        is_alive = Path(f"/proc/{pid}").exists()
        limits = {"address_space_mib": limit_bytes // MIB} if limit_bytes else {}
        report.add(f"{name}: calls beside it that failed", seen["failed"], "calls", most=0, **seen, **done, took_s=took_s)
        grown = after_mib - before_mib
        report.add(f"{name}: memory afterwards", grown, "MiB", most=BACK_MIB, before_mib=before_mib, alive=is_alive, **limits)
    return seen


async def campaign(report: Report, count: int, clients: int, seconds: float = 60.0, large: int = LARGE) -> None:
    await attacked(report, f"{count} leavers with 31 MiB each", lambda port: leavers(port, count))
    await attacked(report, f"{clients} endless bodies", lambda port: endless(port, clients, seconds))
    await attacked(report, f"{large} calls of 31 MiB at once", lambda port: large_calls(port, large), LIMIT_BYTES)


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    if sys.argv[1:2] == ["--victim"]:
        asyncio.run(Victim(int(sys.argv[2])).call_until_told())
        return
    counts = [int(text) for text in sys.argv[1:]]
    report = Report()
    asyncio.run(campaign(report, *(counts + [LEAVERS, ENDLESS][len(counts) :])))
    report.write(RESULTS)


if __name__ == "__main__":
    main()
