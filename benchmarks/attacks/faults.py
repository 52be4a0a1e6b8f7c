"""Faults under load: processes killed and frozen, the database cut off and restarted, a full disk; clients keep histories.

    python -m benchmarks.attacks.faults --faults 200 --out results/attacks/faults.json

The time of a fault is how long no write was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.attacks.campaign import Round, judged, options_for, run_campaign, spread
from benchmarks.attacks.histories import Clients, judge
from benchmarks.attacks.pair import Pair
from benchmarks.attacks.takeovers import opened
from benchmarks.postgres import restart

KINDS = {
    "sqlite": ("kill", "kill-worker", "freeze", "freeze-worker", "kill-both", "disk-full"),
    "postgres": ("kill", "kill-worker", "freeze", "kill-both", "cut", "hang", "cut-both", "restart-database"),
}
PER_ROUND = 25


@dataclass(slots=True)
class Fault:
    kind: str
    silent_s: float


async def inflict(pair: Pair, url: str, kind: str, seconds: float) -> None:
    """Do it, and undo it after so long."""
    leader = await pair.leader()
    server = pair.servers[leader]
    if kind == "kill":
        server.kill()
    elif kind == "kill-both":
        for one in pair.servers:
            one.kill()
    elif kind in ("kill-worker", "freeze-worker"):
        for worker in server.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL if kind == "kill-worker" else signal.SIGSTOP)
    elif kind == "freeze":
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        server.signal(signal.SIGCONT)
    elif kind == "restart-database":
        await asyncio.to_thread(restart, url)
    elif kind == "disk-full":
        await _fill_disk(pair, seconds)
    else:
        ways = pair.proxies if kind == "cut-both" else (pair.proxies[leader],)
        for way in ways:
            way.hang() if kind == "hang" else way.cut()
        await asyncio.sleep(seconds)
        for way in ways:
            way.mend()


async def _fill_disk(pair: Pair, seconds: float) -> None:
    assert pair.disk is not None
    filler = pair.disk / "filler"
    file = os.open(filler, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(file, bytes(4096)):
            pass
    os.close(file)
    await asyncio.sleep(seconds)
    filler.unlink()


async def play(name: str, url: str, faults: int, seed: int) -> Round[Fault]:
    random_ = random.Random(seed)
    found, choice = Round[Fault](name, seed), list(KINDS[name])
    async with opened(name, url) as pair:
        if name == "sqlite" and not os.path.ismount(str(pair.disk)):
            choice.remove("disk-full")  # filling the machine's own disk is no test of this server
        clients = Clients(pair.urls)
        clients.start()
        try:
            for number in range(faults):
                kind = choice[number % len(choice)] if number < len(choice) else random_.choice(choice)
                await pair.both_up(120)
                await asyncio.sleep(random_.uniform(0.1, 0.6))
                began_s = time.monotonic()
                await inflict(pair, url, kind, random_.uniform(0.2, 3.0))
                await pair.both_up(120)
                undone_s = time.monotonic()
                while not any(at_s > undone_s for at_s in clients.answered_s[-50:]):
                    await asyncio.sleep(0.02)
                times = sorted([began_s, *(at_s for at_s in clients.answered_s if at_s > began_s)])
                found.events.append(Fault(kind, max(after - before for before, after in itertools.pairwise(times))))
        finally:
            history = await clients.stop()
        found.verdict = await judge(history, pair.urls)
        if not found.verdict.is_good:
            for server in range(2):
                print((pair.folder / f"server-{server}.log").read_text()[-4_000:])
    return found


def summary(rounds: Sequence[Round[Fault]]) -> dict[str, Any]:
    times = [(f"{one.database}/{fault.kind}", fault.silent_s) for one in rounds for fault in one.events]
    return {"faults": len(times), **judged(rounds), "silent_s": spread(times)}


def main() -> None:
    options = options_for("faults").parse_args()
    run_campaign(
        options,
        "faults",
        PER_ROUND,
        play,
        counted=lambda one: len(one.events),
        tell=lambda fault: f"{fault.kind} {fault.silent_s:.1f}",
        summary=summary,
        made=Fault,
    )


if __name__ == "__main__":
    main()
