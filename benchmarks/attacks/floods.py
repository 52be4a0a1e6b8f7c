"""Floods of HTTP/2 frames, and of requests and WebSocket frames over HTTP/1, at a real server: how soon a flooder is cut off, and
what calls beside it wait. What is flooded with whole requests need not be cut off: it is to have its turn and no more.

Each flood lasts three seconds from 1 and from 20 connections, without a token. A flooder that is cut off connects again at once
and goes on. Beside it one client calls an echo over HTTP/1 a hundred times a second, and its latencies are what counts. The
flooders have processes of their own on the same machine, at the lowest priority: they are to cost the server time, not to take
its core.

`python -m benchmarks.attacks.floods [SECONDS]` writes `results/attacks/floods.json`.
"""

from __future__ import annotations

import http.client
import itertools
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, started, wait_for
from lamina.server.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from lamina.server.http2.hpack import encode

RESULTS = Path(__file__).parents[2] / "results" / "attacks" / "floods.json"
SECONDS = 3.0
EVERY_S = 0.01
CHUNK = 65_536
MOST_MS, CUT_OFF_S = 50.0, 1.0

STREAM_HEAD = encode(
    [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/inference.GRPCInferenceService/ModelStreamInfer"),
        (b"content-type", b"application/grpc"),
    ]
)
OPEN = frame(HEADERS, END_HEADERS, 1, STREAM_HEAD)
STREAMS = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, STREAM_HEAD) for number in range(256))


def _number(rest: int) -> bytes:
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def _huffman(number: int) -> bytes:
    """A request with a Huffman literal of 120 KB."""
    return frame(
        HEADERS,
        END_HEADERS | END_STREAM,
        2 * number + 1,
        STREAM_HEAD + b"\x00\x01x\xff" + _number(120_000 - 127) + b"\x1c" * 120_000,
    )


def _large_head(number: int) -> bytes:
    """As large as is decoded."""
    return frame(
        HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, STREAM_HEAD + b"\x00\x01x\xff" + _number(7_800 - 127) + b"\x1c" * 7_800
    )


def _repeated(data: bytes) -> Callable[[int], bytes]:
    many = data * max(1, CHUNK // len(data))
    return lambda number: many


Flood = tuple[bytes, Callable[[int], bytes]]
"""What comes first, and what is sent again and again, by its number."""

HTTP2_FLOODS: dict[str, Flood] = {
    "43,600 settings in a frame, 256 streams": (STREAMS, _repeated(frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff\xff" * 43_600))),
    "settings, 256 streams": (STREAMS, _repeated(frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff\xfe\x00\x04\x00\x00\xff\xff"))),
    "window updates of 1, 256 streams": (STREAMS, _repeated(frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01"))),
    "empty messages": (OPEN, _repeated(frame(DATA, 0, 1, bytes(16_380)))),
    "small messages": (OPEN, _repeated(frame(DATA, 0, 1, b"\x00\x00\x00\x00\x03\x0a\x01x" * 2_000))),
    "Huffman literals of 120 KB": (b"", _huffman),
    "heads of 8 KB": (b"", _large_head),
    "padding-only DATA": (OPEN, _repeated(frame(DATA, PADDED, 1, b"\xff" + bytes(255)))),
    "DATA of a closed stream": (OPEN + frame(RST_STREAM, 0, 1, bytes(4)), _repeated(frame(DATA, 0, 1, bytes(100)))),
    "DATA in drops": (OPEN, _repeated(frame(DATA, 0, 1, b"\x00"))),
    "unknown frames": (b"", _repeated(frame(0x16, 0, 0, b"anything"))),
    "pings": (b"", _repeated(frame(PING, 0, 0, bytes(8)))),
    "rapid reset": (
        b"",
        lambda number: b"".join(
            frame(HEADERS, END_HEADERS, 2 * one + 1, STREAM_HEAD) + frame(RST_STREAM, 0, 2 * one + 1, bytes(4))
            for one in range(500 * number, 500 * number + 500)
        ),
    ),
    "empty CONTINUATION": (frame(HEADERS, 0, 1, STREAM_HEAD), _repeated(frame(CONTINUATION, 0, 1))),
}


def _get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


CHUNKED = (
    b"POST /v1/functions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
UPGRADE = _get(
    *("/v1/functions/echo/ws", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
MASK = bytes(4)
HTTP1_FLOODS: dict[str, Flood] = {
    "pipelined requests": (b"", _repeated(_get("/nothing"))),
    "pipelined requests for metrics": (b"", _repeated(_get("/metrics"))),
    "pipelined headers that there are not": (b"", _repeated(_get("/healthz", "Lamina-Nothing: 1"))),
    "endless extension of a chunk": (CHUNKED + b"1;", _repeated(b"a" * 1_000)),
    "small chunks": (CHUNKED, _repeated(b"40\r\n" + b"x" * 64 + b"\r\n")),
    "empty lines": (b"", _repeated(b"\r\n")),
    "pings of a WebSocket": (UPGRADE, _repeated(b"\x89\x80" + MASK)),
    "empty fragments of a WebSocket": (UPGRADE + b"\x01\x80" + MASK, _repeated(b"\x00\x80" + MASK)),
    "messages behind the close of a WebSocket": (UPGRADE, _repeated(b"\x81\x81" + MASK + b"1")),
}
FLOODS = HTTP2_FLOODS | HTTP1_FLOODS
CUT_OFF = {*HTTP2_FLOODS, *(name for name in HTTP1_FLOODS if "WebSocket" in name)}
"""Floods of what brings nothing."""


class Cut(Exception):
    """The server has closed the connection."""


def _rounds(name: str, port: int, until_s: float) -> Iterator[tuple[float, bool, int]]:
    """For each connection: how long it lasted, whether a GOAWAY came, and what it sent."""
    first, more = FLOODS[name]
    greeting = b"" if name in HTTP1_FLOODS else PREFACE + frame(SETTINGS, 0, 0)
    while time.monotonic() < until_s:
        began_s, sent, told = time.monotonic(), 0, b""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setblocking(False)
            try:
                for number in itertools.count(-1):
                    data = memoryview(greeting + first if number < 0 else more(number))
                    while data:
                        readable, writable, _ = select.select(
                            [connection], [connection], [], max(0.0, until_s - time.monotonic())
                        )
                        if readable:
                            piece = connection.recv(CHUNK)
                            if not piece:
                                raise Cut
                            told = (told + piece)[-CHUNK:]
                        if writable:
                            count = connection.send(data)
                            sent += count
                            data = data[count:]
                        if time.monotonic() >= until_s:
                            break
                    if time.monotonic() >= until_s:
                        break
            except (Cut, ConnectionError):
                yield time.monotonic() - began_s, bytes([GOAWAY]) in told, sent
                continue
        yield time.monotonic() - began_s, False, sent


def _flooder(name: str, port: int, seconds: float, ready: Any, go: Any, out: Any) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    ready.release()
    go.wait()
    end_s = time.monotonic() + seconds
    rounds = list(_rounds(name, port, end_s))
    cut = [one for one in rounds[:-1] or rounds if one[0] < seconds - 0.05]
    out.put((len(rounds), max((one[0] for one in cut), default=seconds), sum(one[2] for one in rounds), len(cut)))


def _echo(port: int, seconds: float, function: str = "echo") -> list[float]:
    """Latencies of a client that calls every ten milliseconds, in milliseconds; a failure counts as ten seconds."""
    found: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    end_s = next_s = time.monotonic()
    end_s += seconds
    while next_s < end_s:
        time.sleep(max(0.0, next_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            connection.request("POST", f"/v1/functions/{function}", b"1", {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            found.append((time.monotonic() - began_s) * 1_000 if answer.status == 200 else 10_000.0)
        except OSError:
            found.append(10_000.0)
            connection.close()
        next_s = max(next_s + EVERY_S, time.monotonic())
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flooded(name: str, port: int, grpc_port: int, pid: int, connections: int, seconds: float) -> dict[str, float]:
    """One flood, and what came of it."""
    ready, go = multiprocessing.Semaphore(0), multiprocessing.Event()
    out: Any = multiprocessing.Queue()
    made = [
        multiprocessing.Process(
            target=_flooder, args=(name, port if name in HTTP1_FLOODS else grpc_port, seconds, ready, go, out)
        )
        for _ in range(connections)
    ]
    for process in made:
        process.start()
    for _ in made:
        ready.acquire()
    before_s = _cpu_s(pid)
    go.set()
    latencies = sorted(_echo(port, seconds))
    spent_s = _cpu_s(pid) - before_s
    told = [out.get(timeout=30) for _ in made]
    for process in made:
        process.join()
    after = sorted(_echo(port, 0.5))
    return {
        "p99_ms": latencies[int(0.99 * len(latencies))],
        "worst_ms": latencies[-1],
        "p50_ms": latencies[len(latencies) // 2],
        "calls": len(latencies),
        "cut_off_s": max(one[1] for one in told),
        "rounds": sum(one[0] for one in told),
        "sent_mb": sum(one[2] for one in told) / 1e6,
        "gateway_cpu_s": spent_s,
        "worst_after_ms": after[-1],
    }


def campaign(
    report: Report, seconds: float = SECONDS, floods: list[str] | None = None, counts: tuple[int, ...] = (1, 20)
) -> None:
    port, grpc_port = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "lamina",
        "serve",
        str(APPS / "echo.py"),
        "--port",
        str(port),
        "--grpc-port",
        str(grpc_port),
        "--json",
    ]
    with started(command) as server:
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        wait_for(f"http://127.0.0.1:{port}/v1/functions/echo", b"1")
        quiet = sorted(_echo(port, seconds))
        report.add("no flood: echo p99", quiet[int(0.99 * len(quiet))], "ms", worst_ms=quiet[-1])
        for name in floods or list(FLOODS):
            for connections in counts:
                found = flooded(name, port, grpc_port, server.pid, connections, seconds)
                where = f"{name}, {connections} connection{'s' if connections > 1 else ''}"
                report.add(
                    f"{where}: echo p99", found.pop("p99_ms"), "ms", most=MOST_MS, **{k: round(v, 3) for k, v in found.items()}
                )
                if name in CUT_OFF:
                    report.add(f"{where}: cut off within", found["cut_off_s"], "s", most=CUT_OFF_S)


def main() -> None:
    report = Report()
    campaign(report, float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS, sys.argv[2:] or None)
    report.write(RESULTS)


if __name__ == "__main__":
    main()
