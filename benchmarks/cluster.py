"""Overhead of an agent against the same functions in process, and values between machines over the data port.

Rates are taken in turns on the same machine. Processor time, summed over server, agent and worker, does not depend on what else
runs there: "rate per core" is its inverse.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.load import Result, closed
from benchmarks.report import Report
from benchmarks.servers import APPS, children_by_parent, cpu_s, free_port, started, wait_for
from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import DataClient, join_address, ref_for
from lamina.units import MIB
from lamina.values.references import ShmRef
from lamina.values.shm import ShmPool

BODY = '{"x": [1, 2, 3, 4]}'
TURNS, SECONDS = 5, 1.5
TOKEN = "a token of the benchmark alone"


@dataclass
class Served:
    url: str
    processes: list[subprocess.Popen[bytes]]

    def cpu_s(self) -> float:
        """Processor time of all its processes."""
        children, total = children_by_parent(), 0.0
        todo = [process.pid for process in self.processes]
        while todo:
            at = todo.pop()
            todo += children.get(at, [])
            with contextlib.suppress(OSError):
                total += cpu_s(at)
        return total


@contextlib.contextmanager
def served(with_agent: bool) -> Iterator[Served]:
    port, agents = free_port(), free_port(2)
    command = [sys.executable, "-m", "lamina", "serve", str(APPS / "echo.py"), "--port", str(port), "--json", "--store", "none"]
    command += ["--no-devices", "--agents", f"127.0.0.1:{agents}"] if with_agent else []
    env = {"LAMINA_JOIN_TOKEN": TOKEN}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(command, env))]
        if with_agent:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-"))
            join = ["--join", f"127.0.0.1:{agents}", "--name", "one", "--gpu", "no", "--folder", folder]
            processes.append(stack.enter_context(started([sys.executable, "-m", "lamina", "agent", *join], env)))
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/readyz", None)
        yield Served(f"{url}/v1/functions/echo", processes)


def turn(server: Served, connections: int) -> tuple[Result, float]:
    """One measurement, and the processor time of a call in it, in microseconds."""
    before = server.cpu_s()
    found = closed(server.url, BODY, connections, SECONDS)
    return found, (server.cpu_s() - before) / max(1.0, found.rate * SECONDS) * 1e6


def run(report: Report) -> None:
    with served(False) as here, served(True) as there:
        for server in (here, there):
            closed(server.url, BODY, 16, 1.0)
        for connections in (16, 1):
            pairs = [(turn(here, connections), turn(there, connections)) for _ in range(TURNS)]
            inside, outside = [one for one, _ in pairs], [other for _, other in pairs]
            cpu = median(us for _, us in inside), median(us for _, us in outside)
            if connections > 1:
                rates = {"in process": median(r.rate for r, _ in inside), "agent": median(r.rate for r, _ in outside)}
                details: dict[str, Any] = {"cpu_us in process": cpu[0], "cpu_us agent": cpu[1], **rates}
                what = f"echo through an agent, {connections} connections, of the rate per core in process"
                report.add(what, cpu[0] / cpu[1], "x", least=0.7, **details)
            else:
                p50 = median(r.p50_ms for r, _ in inside), median(r.p50_ms for r, _ in outside)
                details = {"in process": p50[0], "agent": p50[1], "cpu_us in process": cpu[0], "cpu_us agent": cpu[1]}
                report.add(
                    "echo through an agent, 1 connection, added to the median", p50[1] - p50[0], "ms", most=0.25, **details
                )
    values(report)


_SERVER = """
import sys, time
from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import DataPort
port = DataPort(sys.argv[1], "127.0.0.1", 0)
port.set_keys(TicketKey(b"token", "cell", 1))
print(port.port, flush=True)
time.sleep(600)
"""


def values(report: Report) -> None:
    """Values from the slots of one process into those of another, over loopback."""
    with (
        tempfile.TemporaryDirectory(prefix="values-", dir="/dev/shm") as theirs,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ours,
    ):
        source, target = ShmPool(theirs, "gateway", 512 * MIB), ShmPool(ours, "gateway", 512 * MIB)
        process = subprocess.Popen([sys.executable, "-c", _SERVER, theirs], stdout=subprocess.PIPE, env=dict(os.environ))
        try:
            assert process.stdout is not None
            address = join_address("127.0.0.1", int(process.stdout.readline()))
            client, key = DataClient(), TicketKey(b"token", "cell", 1)
            for size in (MIB, 8 * MIB, 64 * MIB):
                ref = source.put(os.urandom(size))
                assert isinstance(ref, ShmRef)
                asked, took = ref_for(key, address, ref), []
                for _ in range(30):
                    room = target.reserve(size)
                    assert room is not None
                    began = time.perf_counter()
                    client.fetch(asked, room[1])
                    took.append(time.perf_counter() - began)
                    room[1].release()
                    target.free(room[0].slot)
                least = 1.5 if size == 8 * MIB else None
                report.add(f"a value of {size // MIB} MiB", size / median(took) / 1e9, "GB/s", least=least, ms=median(took) * 1e3)
            client.close()
        finally:
            process.kill()
            process.wait()
            source.close()
            target.close()
