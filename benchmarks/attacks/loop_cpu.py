"""Longest turn of the gateway's loop under hostile bodies and floods, in processor time: other work on the machine changes
latencies, and this much less.

The gateway runs in this process, on the loop that `lamina serve` uses, and one callback in each turn reads the thread's clock: a
turn is all that is done between two looks for what can be read. Attackers have processes of their own. Bodies are those of
`loop_lag.py`, twice each, of which the second counts; floods those of `floods.py`, a second each, from 1 and 20
connections.

`python -m benchmarks.attacks.loop_cpu` writes `results/attacks/loop_cpu.json`.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.attacks import floods, loop_lag
from benchmarks.report import Report
from benchmarks.servers import APPS
from lamina import policies
from lamina.bootstrap import open_local
from lamina.cli._serve_command import GC_AT
from lamina.gateway.bootstrap import ListenConfig, open_gateway
from lamina.server.http_server import event_loop_factory
from lamina.server.process_status import return_free_memory
from lamina.store.open import open_store

RESULTS = Path(__file__).parents[2] / "results" / "attacks" / "loop_cpu.json"
FLOOD_S = 1.0
MOST_MS = 10.0
ROUNDS = 2


class Stopwatch:
    """Times every turn of the loop on this thread's processor clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s, self.longest_s, self.slow = 0.0, 0.0, 0
        self.reset()
        self._next_turn()

    def _next_turn(self) -> None:
        now_s = time.thread_time()
        took_s, self._began_s = now_s - self._began_s, now_s
        self.longest_s = max(self.longest_s, took_s)
        self.slow += took_s > 0.01
        self._loop.call_soon(self._next_turn)

    def reset(self) -> None:
        self._began_s = time.thread_time()
        self.longest_s = 0.0
        self.slow = 0  #: turns above ten milliseconds

    def add_to(self, report: Report, name: str, **details: Any) -> None:
        report.add(
            f"{name}: longest turn",
            1_000 * self.longest_s,
            "ms CPU",
            most=MOST_MS,
            slow=self.slow,
            **details,
        )


def _attack(name: str, port: int, grpc_port: int, out: Any) -> None:
    if name in loop_lag.GRPC:
        out.put(loop_lag._called(grpc_port, loop_lag.GRPC[name](), 0.0))
    else:
        attack = loop_lag.HTTP[name]
        out.put(loop_lag._sent(port, attack, attack[2](), 0.5 if "60 KiB" in name else 0.0))


def _flood(name: str, grpc_port: int, connections: int) -> None:
    until_s = time.monotonic() + FLOOD_S
    threads = [threading.Thread(target=lambda: list(floods._rounds(name, grpc_port, until_s))) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _until(processes: list[Any]) -> None:
    while any(process.is_alive() for process in processes):
        await asyncio.sleep(0.02)


async def campaign(report: Report, only: tuple[str, ...]) -> None:
    watch = Stopwatch()
    return_free_memory()  # this and the collector as `lamina serve` has them
    with tempfile.TemporaryDirectory() as folder:
        runtime = open_local(str(APPS / "two.py"), policy=policies.build("frontier"))
        gateway = await open_gateway(runtime, ListenConfig(grpc_port=0), store=open_store(f"{folder}/runs.db"))
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_AT)
        spawn = multiprocessing.get_context("spawn")
        for name in (*loop_lag.HTTP, *loop_lag.GRPC):
            if only and name not in only:
                continue
            for _ in range(ROUNDS):  # the first starts codec processes, and makes slots
                out: Any = spawn.Queue()
                process = spawn.Process(target=_attack, args=(name, gateway.port, gateway.grpc_port, out))
                process.start()
                watch.reset()
                await _until([process])
            watch.add_to(report, name, answers=out.get(timeout=1)[:1] if process.exitcode == 0 else ["failed"])
        for name in floods.FLOODS:
            for connections in (1, 20):
                if only and name not in only:
                    continue
                port = gateway.port if name in floods.HTTP1_FLOODS else gateway.grpc_port
                process = spawn.Process(target=_flood, args=(name, port, connections))
                process.start()
                watch.reset()
                await _until([process])
                watch.add_to(report, f"{name}, {connections} connection{'s' if connections > 1 else ''}")
        await gateway.stop(2.0)


def main() -> None:
    report = Report()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(campaign(report, tuple(sys.argv[1:])))
    if not sys.argv[1:]:
        report.write(RESULTS)


if __name__ == "__main__":
    main()
