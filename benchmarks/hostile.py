"""Mutated requests at a server over raw sockets: nothing may crash, hang, leak, or slow down who behaves.

`python -m benchmarks.hostile [COUNT]`: 1,000,000 by default, about a quarter of an hour. The build sends 10,000 of the same
(`tests/gateway/test_fuzzed_requests.py`). Every request is drawn from a seed, so that any of them can be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report
from benchmarks.servers import free_port, started, wait_for

SEED = 20261115
ALLOWED = {100, 200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 503, 504, 505}
WAVE = 100
HANG_S = 1.0
"""A client that has nothing more to send is answered, or cut off, within this time."""

APP = """
from typing import Annotated

import numpy as np

import lamina
from lamina import Tensor

app = lamina.App("hostile")
ONE = lamina.Scale(min=1, max=1)
Row = Annotated[np.ndarray, Tensor("FP32", [4])]


@app.function(scale=ONE, batch=8)
def echo(x):
    return x


@app.function(scale=ONE)
def pair(a, b=10):
    return [a, b]


@app.function(scale=ONE, batch=8)
def double(x: list[Row]) -> list[Row]:
    with np.errstate(all="ignore"):
        return [2 * row for row in x]


@app.function(scale=ONE)
def count(n):
    for number in range(n % 10 if isinstance(n, int) else 1):
        yield number
"""


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def valid(rng: random.Random) -> bytes:
    form = b'--B\r\nContent-Disposition: form-data; name="x"\r\n\r\nhello\r\n--B--\r\n'
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    plain = json.dumps({"inputs": [{**tensor, "data": [rng.random() for _ in range(4)]}]}).encode()
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 16}}]}).encode()
    return rng.choice(
        [
            request("POST", "/v1/functions/echo", json.dumps({"k": [1, 2, {"d": "text"}], "n": rng.random()}).encode()),
            request("POST", "/v1/functions/pair", b'{"a": 1, "b": 2}', Lamina_Deadline_Ms="500"),
            request("POST", "/v1/functions/echo", form, "multipart/form-data; boundary=B"),
            request("POST", "/v1/functions/echo", b"\x81\xa1x\x93\x01\x02\x03", "application/vnd.lamina.value"),
            request("POST", "/v1/functions/count", b"3", Accept="text/event-stream"),
            request("POST", "/v2/models/double/infer", plain),
            request("POST", "/v2/models/double/infer", head + bytes(16), Inference_Header_Content_Length=str(len(head))),
            request("GET", "/v2/models/double"),
            request("GET", "/v1/status"),
            request("GET", "/metrics"),
            b"POST /v1/functions/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1]\r\n0\r\n\r\n",
        ]
    )


def mutated(rng: random.Random) -> bytes:
    """A valid one, damaged: as a whole, or its body alone, under a head that fits it, so that more than parsers are met."""
    plain = valid(rng)
    head, _, body = plain.partition(b"\r\n\r\n")
    if rng.random() < 0.5 or not body:
        return damaged(rng, plain)
    body = damaged(rng, body)
    head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head)
    return head + b"\r\n\r\n" + body


def damaged(rng: random.Random, plain: bytes) -> bytes:
    """One to four flips, cuts, splices, overwritten stretches, repeated lines or repeated stretches."""
    data = bytearray(plain)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(6)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            other = valid(rng)
            data[at:at] = other[rng.randrange(len(other)) :]
        elif kind == 3:
            data[at : at + rng.randint(1, 20)] = rng.randbytes(rng.randint(0, 20))
        elif kind == 4:
            lines = bytes(data).split(b"\r\n")
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            data = bytearray(b"\r\n".join(lines))
        else:
            data[at:at] = data[at : at + 50] * rng.randint(1, 30)
    return bytes(data)


@dataclass
class Seen:
    """What became of them."""

    statuses: Counter[int] = field(default_factory=Counter)  #: 0: cut off without an answer
    slow: list[bytes] = field(default_factory=list)  #: those that took more than a second, which may be the machine's doing
    repeated: int = 0  #: so many were sent again for that
    hangs: int = 0  #: and took ten times as long, alone
    valid_s: list[float] = field(default_factory=list)  #: of the valid request after each hundred
    again_s: list[float] = field(default_factory=list)  #: and of the same a moment later, while nobody attacks

    @property
    def strange(self) -> set[int]:
        return self.statuses.keys() - ALLOWED - {0}


async def attack(port: int, rng: random.Random, count: int, seen: Seen, patience_s: float = 0.02) -> None:
    """A hundred at a time; after each hundred a valid one must succeed, on a connection that is as old as a wave."""
    for _ in range(count // WAVE):
        honest = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(*(_one(port, mutated(rng), seen, patience_s) for _ in range(WAVE)))
        await _again(port, seen, patience_s)
        for times in (seen.valid_s, seen.again_s):
            await asyncio.sleep(0.005)  # not what this process still has to clear away
            begun = time.perf_counter()
            assert await _valid(*honest) == b"[1,2,3]"
            times.append(time.perf_counter() - begun)
        honest[1].close()


async def _again(port: int, seen: Seen, patience_s: float) -> None:
    """What took too long is sent again, alone and with more time: then it is known whose fault it was."""
    slow, seen.slow = seen.slow, []
    seen.repeated += len(slow)
    for data in slow:
        await _one(port, data, seen, patience_s, 10 * HANG_S)
    seen.hangs += len(seen.slow)
    seen.slow = []


async def _one(port: int, data: bytes, seen: Seen, patience_s: float, hang_s: float = HANG_S) -> None:
    """If no answer comes, the client says that it has no more to send; then it is answered or cut off within `hang_s`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        try:
            line = await asyncio.wait_for(reader.readline(), patience_s)
        except TimeoutError:
            with contextlib.suppress(OSError):  # cut off an instant ago
                writer.write_eof()
            line = await asyncio.wait_for(reader.readline(), hang_s)
        seen.statuses[int(line.split(b" ")[1]) if line else 0] += 1
    except TimeoutError:
        seen.slow.append(data)
    except ConnectionError:
        seen.statuses[0] += 1
    finally:
        writer.transport.abort()


async def _valid(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(request("POST", "/v1/functions/echo", b"[1,2,3]"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


def rss_mib(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


async def _run(report: Report, port: int, pid: int, count: int) -> Seen:
    rng, seen = random.Random(SEED), Seen()
    await attack(port, rng, min(10_000, count // 10), seen)  # what it ever needs to hold it holds by now
    before_mib = rss_mib(pid)
    begun = time.monotonic()
    await attack(port, rng, count - min(10_000, count // 10), seen)
    rate = count / (time.monotonic() - begun)
    grown_mib = rss_mib(pid) - before_mib
    answered = sum(seen.statuses.values())
    by_status = {str(status): number for status, number in sorted(seen.statuses.items())}
    report.add("mutated requests", float(answered), "requests", seed=SEED, per_s=round(rate), **by_status)
    report.add("answers outside the contract", float(len(seen.strange)), "statuses", most=0)
    report.add("hangs of more than a second", float(seen.hangs), "requests", most=0, sent_again=seen.repeated)
    report.add("memory it grew by", grown_mib, "MiB", most=20, before_mib=round(before_mib, 1))
    ratio = statistics.median(seen.valid_s) / statistics.median(seen.again_s)
    tail = {"p50_ms": 1e3 * statistics.median(seen.valid_s), "p99_ms": 1e3 * statistics.quantiles(seen.valid_s, n=100)[98]}
    report.add("a valid request after each hundred, against a moment later", ratio, "times", most=2, **tail)
    return seen


def run(report: Report, count: int = 1_000_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "hostile_app.py"
        app.write_text(APP)
        port = free_port()
        serve = [sys.executable, "-m", "lamina", "serve", str(app), "--port", str(port), "--json", "--store", "none"]
        with (Path(folder) / "log").open("wb") as log, started(serve, log=log) as process:
            wait_for(f"http://127.0.0.1:{port}/readyz", None)
            seen = asyncio.run(_run(report, port, process.pid, count))
            report.add("processes that ended", float(process.poll() is not None), "of one", most=0)
        said = (Path(folder) / "log").read_text()
        report.add("tracebacks of ours in its log", float(said.count("Traceback")), "", most=0)
    assert not seen.strange and not seen.hangs, f"seed {SEED}: {seen.statuses}, {seen.hangs} hangs\n{said[-3000:]}"


def main() -> None:
    report = Report()
    run(report, int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
    report.write(Path("results") / "bench-hostile.json")
    sys.exit(any(row.met is False for row in report.rows))


if __name__ == "__main__":
    main()
