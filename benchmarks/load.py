"""Load generators: closed loop (wrk where it is installed, else our own, `python -m benchmarks.load`) and open loop (Poisson,
latency from the scheduled arrival, so a server that stalls cannot hide it; in C, see `open_loop.c`).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit


@dataclass
class Result:
    rate: float  #: answers per second
    p50_ms: float
    p99_ms: float
    errors: int = 0


def closed(url: str, body: str, connections: int, seconds: float) -> Result:
    """`connections` clients, each sending its next request when it has its answer."""
    if shutil.which("wrk"):
        return _wrk(url, body, connections, seconds)
    command = [sys.executable, "-m", "benchmarks.load", url, body, str(connections), str(seconds)]
    return Result(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@dataclass
class Pair:
    """Two servers measured in turns: a machine whose speed changes from second to second changes for both."""

    ours: list[Result]
    floor: list[Result]

    @property
    def ratios(self) -> list[float]:
        """Of the rates, slowest first."""
        return sorted(ours.rate / floor.rate for ours, floor in zip(self.ours, self.floor, strict=True))

    def details(self) -> dict[str, float]:
        least, *_, most = self.ratios
        shown = {"lowest": least, "highest": most, "ours": median(one.rate for one in self.ours)}
        return shown | {"floor": median(one.rate for one in self.floor), "p99_ms": median(one.p99_ms for one in self.ours)}


def in_turns(ours: str, floor: str, body: str, connections: int, seconds: float, rounds: int = 3) -> Pair:
    pair = Pair([], [])
    for _ in range(rounds):
        pair.floor.append(closed(floor, body, connections, seconds))
        pair.ours.append(closed(ours, body, connections, seconds))
    return pair


def _wrk(url: str, body: str, connections: int, seconds: float) -> Result:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f'wrk.method="POST"; wrk.body={json.dumps(body)}; wrk.headers["Content-Type"]="application/json"')
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}", "--latency", "-s", script.name, url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}

    def quantile(name: str) -> float:
        found = re.search(rf"{name}%\s+([0-9.]+)(us|ms|s|m)", said)
        assert found, said
        return float(found[1]) * units[found[2]]

    rate = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    assert rate, said
    return Result(float(rate[1]), quantile("50"), quantile("99"), int(bad[1]) if bad else 0)


@dataclass
class OpenResult:
    """One open-loop run. Latencies are in milliseconds and count from the scheduled arrival."""

    offered: int
    seconds: float
    unanswered: int
    generator_cores: float  #: what the generator itself took of the machine
    statuses: dict[str, int] = field(default_factory=dict)
    in_time: int = 0
    ok_p99_ms: float = 0.0
    refused_p50_ms: float = 0.0
    refused_p99_ms: float = 0.0
    refused_sent_p99_ms: float = 0.0  #: the same from the moment it was sent: without what the generator was late
    sent_late_p99_ms: float = 0.0  #: of the generator: from the scheduled arrival to the send

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds


def open_loop(
    url: str, body: str, rate: float, seconds: float, slo_ms: float, *, connections: int = 500, seed: int = 1
) -> OpenResult:
    host, port, request = _request(url, body)
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(request)
        file.flush()
        command = [str(_generator()), host, str(port), file.name, str(rate), str(seconds), str(connections), str(seed)]
        *lines, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    _, offered, unanswered, cpu_us = last.split()
    result = OpenResult(int(offered), seconds, int(unanswered), int(cpu_us) / 1e6 / seconds)
    times: dict[str, list[int]] = {}
    refused_sent, late = [], []
    for line in lines:
        status, due_us, sent_us, took_us = line.split()
        waited_us = int(sent_us) - int(due_us)
        late.append(waited_us)
        times.setdefault(status, []).append(int(took_us))
        if status == "429":
            refused_sent.append(int(took_us) - waited_us)
    result.statuses = {status: len(some) for status, some in times.items()}
    result.in_time = sum(took_us <= slo_ms * 1000 for took_us in times.get("200", ()))
    result.ok_p99_ms = _quantiles_ms(times.get("200", []))[1]
    result.refused_p50_ms, result.refused_p99_ms = _quantiles_ms(times.get("429", []))
    result.refused_sent_p99_ms = _quantiles_ms(refused_sent)[1]
    result.sent_late_p99_ms = _quantiles_ms(late)[1]
    return result


def _generator() -> Path:
    """Compiled when it is needed first: it shares its cores with the server, so it has to be lean."""
    source = Path(__file__).with_name("open_loop.c")
    program = source.parent.parent / "build" / "open_loop"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(program), str(source), "-lm"], check=True)
    return program


class _Pipe(asyncio.Protocol):
    """One connection; answers come in order, so the oldest request is the one answered."""

    def __init__(self, on_answer: object) -> None:
        self.on_answer = on_answer
        self.sent: deque[float] = deque()
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        start = 0
        while True:
            end = buffer.find(b"\r\n\r\n", start)
            if end < 0:
                break
            mark = buffer.find(b"content-length: ", start, end)
            stop = buffer.find(b"\r", mark, end + 2)
            whole = end + 4 + int(buffer[mark + 16 : stop])
            if len(buffer) < whole:
                break
            self.on_answer(self, buffer[start + 9 : start + 12], self.sent.popleft())  # type: ignore[operator]
            start = whole
        self.buffer = buffer[start:]


def _request(url: str, body: str) -> tuple[str, int, bytes]:
    parts = urlsplit(url)
    data = body.encode()
    lines = (
        f"POST {parts.path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    head = "\r\n".join(lines) + "\r\n\r\n"
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port, head.encode() + data


def _quantiles_ms(took_us: list[int]) -> tuple[float, float]:
    """Median and 99th percentile."""
    some = sorted(took_us)
    return (some[len(some) // 2] / 1000, some[int(len(some) * 0.99)] / 1000) if some else (0.0, 0.0)


async def _closed(url: str, body: str, connections: int, seconds: float) -> Result:
    host, port, request = _request(url, body)
    loop = asyncio.get_running_loop()
    times: list[float] = []
    errors = 0
    clock = time.perf_counter
    end = clock() + seconds

    def on_answer(pipe: _Pipe, status: bytes, sent: float) -> None:
        nonlocal errors
        now = clock()
        times.append((now - sent) * 1000)
        errors += status != b"200"
        if now < end:
            pipe.sent.append(now)
            assert pipe.transport is not None
            pipe.transport.write(request)

    pipes = [(await loop.create_connection(lambda: _Pipe(on_answer), host, port))[1] for _ in range(connections)]
    for pipe in pipes:
        pipe.sent.append(clock())
        assert pipe.transport is not None
        pipe.transport.write(request)
    await asyncio.sleep(seconds)
    while any(pipe.sent for pipe in pipes) and clock() < end + 5:
        await asyncio.sleep(0.005)
    for pipe in pipes:
        assert pipe.transport is not None
        pipe.transport.close()
    times.sort()
    return Result(len(times) / seconds, times[len(times) // 2], times[int(len(times) * 0.99)], errors)


def main() -> None:
    import uvloop

    url, body, connections, seconds = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_closed(url, body, int(connections), float(seconds))))))


if __name__ == "__main__":
    main()
