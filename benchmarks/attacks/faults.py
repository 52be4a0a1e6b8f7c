"""Faults under load: processes killed and frozen, the database cut off and restarted, a full disk; clients keep histories.

    python -m benchmarks.attacks.faults --faults 200 --out results/attacks/faults.json

The time of a fault is how long no write was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attacks.histories import Clients, Verdict, judge
from benchmarks.attacks.pair import Pair, database
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


@dataclass(slots=True)
class Round:
    database: str
    seed: int
    faults: list[Fault] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


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


async def play(name: str, url: str, faults: int, seed: int) -> Round:
    random_ = random.Random(seed)
    found, choice = Round(name, seed), list(KINDS[name])
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
                found.faults.append(Fault(kind, max(after - before for before, after in itertools.pairwise(times))))
        finally:
            history = await clients.stop()
        found.verdict = await judge(history, pair.urls)
        if not found.verdict.is_good:
            for server in range(2):
                print((pair.folder / f"server-{server}.log").read_text()[-4_000:])
    return found


def summary(rounds: list[Round]) -> dict[str, Any]:
    verdict = Verdict()
    by_kind: dict[str, list[float]] = {}
    for one in rounds:
        verdict.add(one.verdict)
        for fault in one.faults:
            by_kind.setdefault(f"{one.database}/{fault.kind}", []).append(fault.silent_s)
    return {
        "faults": sum(len(one.faults) for one in rounds),
        "verdict": verdict.summary(),
        "examples": (verdict.lost + verdict.doubled + verdict.stale + verdict.odd)[:20],
        "silent_s": {
            kind: {"median": round(sorted(times)[len(times) // 2], 2), "worst": round(max(times), 2), "count": len(times)}
            for kind, times in sorted(by_kind.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds: list[Round] = []
    names = options.databases.split(",")
    with database() if "postgres" in names else contextlib.nullcontext("") as url:
        seed = options.seed
        while (done := sum(len(one.faults) for one in rounds)) < options.faults:
            name = names[seed % len(names)]
            rounds.append(asyncio.run(play(name, url, min(PER_ROUND, options.faults - done), seed)))
            told = ", ".join(f"{fault.kind} {fault.silent_s:.1f}" for fault in rounds[-1].faults)
            print(f"round {seed} {name}: {rounds[-1].verdict.summary()}\n  {told}", flush=True)
            seed += 1
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                setup = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg(), "seed": options.seed}
                found = {"label": "measured", "setup": setup} | summary(rounds)
                found["rounds"] = [
                    {"database": one.database, "seed": one.seed, "faults": [asdict(fault) for fault in one.faults]}
                    for one in rounds
                ]
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(rounds), indent=1))


if __name__ == "__main__":
    main()
