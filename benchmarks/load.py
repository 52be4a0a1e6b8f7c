"""Load generators: closed loop (wrk where it is installed, else our own) and open loop (Poisson, latency from the
scheduled arrival, so a server that stalls cannot hide it). `python -m benchmarks.load` runs one in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field
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
    command = [sys.executable, "-m", "benchmarks.load", "closed", url, body, str(connections), str(seconds)]
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
    statuses: dict[str, int] = field(default_factory=dict)
    in_time: int = 0
    ok_p50_ms: float = 0.0
    ok_p99_ms: float = 0.0
    refused_p50_ms: float = 0.0
    refused_p99_ms: float = 0.0
    unanswered: int = 0
    sent_late_p99_ms: float = 0.0  #: of the generator itself: from the scheduled arrival to the send

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds


def open_loop(
    url: str, body: str, rate: float, seconds: float, slo_ms: float, *, connections: int = 500, seed: int = 1
) -> OpenResult:
    command = [sys.executable, "-m", "benchmarks.load", "open", url, body]
    command += [str(rate), str(seconds), str(slo_ms), str(connections), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return OpenResult(**json.loads(done.stdout))


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


TICK_S = 0.0005
"""The open loop looks at its sockets this often: many sends and answers at a time cost less than each by itself."""


class _Line:
    """One connection with at most one request under way: a refusal must not queue behind a result."""

    __slots__ = ("buffer", "due", "receive", "send")

    def __init__(self, connection: socket.socket) -> None:
        self.send, self.receive = connection.send, connection.recv
        self.due = 0.0
        self.buffer = b""


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    mark = data.find(b"content-length: ", 0, end)
    return end >= 0 and len(data) >= end + 4 + int(data[mark + 16 : data.find(b"\r", mark)])


def _open(url: str, body: str, rate: float, seconds: float, slo_ms: float, connections: int, seed: int) -> OpenResult:
    """No event loop: at tens of thousands of requests a second the generator must not be what is measured."""
    host, port, request = _request(url, body)
    rng = random.Random(seed)
    result = OpenResult(0, seconds)
    times: dict[bytes, list[float]] = {}
    late: list[float] = []
    whole: set[tuple[bytes, int]] = set()  # status and size of answers seen: one like them needs no second look
    waiting: deque[float] = deque()  # due, and no connection free
    poll, lines, idle = select.epoll(), {}, []
    sockets = [socket.create_connection((host, port)) for _ in range(connections)]
    for connection in sockets:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines[connection.fileno()] = line = _Line(connection)
        idle.append(line)
        poll.register(connection, select.EPOLLIN)
    clock = time.perf_counter
    due = clock() + 0.05
    end = due + seconds
    open_until = end + 5
    busy = 0
    while due < end or ((waiting or busy) and clock() < open_until):
        time.sleep(TICK_S)
        for number, _ in poll.poll(0, connections):
            line = lines[number]
            data = line.receive(4096)
            if line.buffer:
                data, line.buffer = line.buffer + data, b""
            status = data[9:12]
            if (status, len(data)) not in whole:
                if not _is_whole(data):
                    line.buffer = data
                    continue
                whole.add((status, len(data)))
            times.setdefault(status, []).append(clock() - line.due)
            idle.append(line)
            busy -= 1
        now = clock()
        while due <= now and due < end:
            result.offered += 1
            waiting.append(due)
            due += rng.expovariate(rate)
        while waiting and idle:
            line = idle.pop()
            line.due = waiting.popleft()
            late.append(now - line.due)
            line.send(request)
            busy += 1
    result.unanswered = len(waiting) + busy
    result.statuses = {status.decode(): len(some) for status, some in times.items()}
    result.in_time = sum(took_s * 1000 <= slo_ms for took_s in times.get(b"200", ()))
    result.ok_p50_ms, result.ok_p99_ms = _quantiles_ms(times.get(b"200", []))
    result.refused_p50_ms, result.refused_p99_ms = _quantiles_ms(times.get(b"429", []))
    result.sent_late_p99_ms = _quantiles_ms(late)[1]
    for connection in sockets:
        connection.close()
    return result


def _quantiles_ms(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    some = sorted(seconds)
    return (1000 * some[len(some) // 2], 1000 * some[int(len(some) * 0.99)]) if some else (0.0, 0.0)


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
    kind, url, body, *rest = sys.argv[1:]
    if kind == "open":
        rate, seconds, slo_ms = map(float, rest[:3])
        print(json.dumps(asdict(_open(url, body, rate, seconds, slo_ms, int(rest[3]), int(rest[4])))))
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_closed(url, body, int(rest[0]), float(rest[1]))))))


if __name__ == "__main__":
    main()
