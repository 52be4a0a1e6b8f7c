"""Load generators: closed loop (wrk, or where that is not installed our own, which takes a tenth off the rate), open loop in C.

Requests, connections and sums are those of `lamina load`. What that has not is a closed loop, which finds out how much a server
can do, and a generator that sends tens of thousands of calls a second without taking a core from the server it measures.
"""

from __future__ import annotations

import json
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from lamina.load import results
from lamina.load.generator import LoadConnection
from lamina.load.load_plan import LoadPlan
from lamina.sim.histogram import LatencyHistogram


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
    """What `lamina load` would say of it (times from the scheduled arrival), and of the generator."""

    seen: results.LoadResult
    generator_cores: float  #: what the generator itself took of the machine
    refused_sent_p99_ms: float  #: from the moment a refused call was sent: without what the generator was late


def open_loop(
    url: str, body: str, rate: float, seconds: float, slo_ms: float, *, connections: int = 500, seed: int = 1
) -> OpenResult:
    """Poisson."""
    plan = _plan(url, body, rate, seconds)
    host, port, _ = plan.endpoint()
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(plan.request_bytes())
        file.flush()
        command = [str(generator()), host, str(port), str(rate), str(seconds), str(connections), str(seed), file.name]
        *lines, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    _, offered, unanswered, cpu_us = last.split()
    tally, refused_sent = results.LoadTally(round(slo_ms * 1000)), LatencyHistogram()
    for _ in range(int(offered)):
        tally.call_due()
    for line in lines:
        _, status, due_us, sent_us, took_us = line.split()
        late_us = int(sent_us) - int(due_us)
        tally.call_sent(late_us)
        tally.call_ended(status, int(took_us))
        if status == "429":
            refused_sent.add(max(0, int(took_us) - late_us))
    seen = tally.result(url=url, shape="poisson", seed=seed, seconds=seconds, unanswered=int(unanswered))
    return OpenResult(seen, int(cpu_us) / 1e6 / seconds, refused_sent.quantile_us(0.99) / 1000)


def generator() -> Path:
    """Compiled when it is needed first: it shares its cores with the server, so it has to be lean."""
    source = Path(__file__).with_name("open_loop.c")
    program = source.parent.parent / "build" / "open_loop"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(program), str(source), "-lm"], check=True)
    return program


def _plan(url: str, body: str, rate: float, seconds: float) -> LoadPlan:
    return LoadPlan(url=url, body=body.encode(), headers=(("content-type", "application/json"),), stages=((seconds, rate),))


def _closed(url: str, body: str, connections: int, seconds: float) -> Result:
    plan = _plan(url, body, 0.0, seconds)
    host, port, _ = plan.endpoint()
    request, took, errors = plan.request_bytes(), LatencyHistogram(), 0
    poll, lines = select.epoll(), dict[int, LoadConnection]()
    for _ in range(connections):
        line = LoadConnection(host, port, None)
        lines[line.socket.fileno()] = line
        poll.register(line.socket.fileno(), select.EPOLLIN)

    def send(line: LoadConnection) -> None:
        line.due_us = time.perf_counter_ns() // 1000
        if not line.send(request):
            raise ValueError("the request is larger than a socket's buffer: use wrk")

    for line in lines.values():
        send(line)
    waiting, end_us = connections, time.perf_counter_ns() // 1000 + round(seconds * 1e6)
    while waiting and time.perf_counter_ns() // 1000 < end_us + 5_000_000:
        for number, _ in poll.poll(0.1):
            line = lines[number]
            if not (status := line.read_status()):
                continue
            now_us = time.perf_counter_ns() // 1000
            took.add(now_us - line.due_us)
            errors += status != "200"
            if now_us < end_us:
                send(line)
            else:
                waiting -= 1
    for line in lines.values():
        line.close()
    return Result(took.count / seconds, took.quantile_us(0.5) / 1000, took.quantile_us(0.99) / 1000, errors)


def main() -> None:
    url, body, connections, seconds = sys.argv[1:]
    print(json.dumps(asdict(_closed(url, body, int(connections), float(seconds)))))


if __name__ == "__main__":
    main()
