"""Takeovers under load: the leader is killed, frozen, cut off, stopped, or its lock goes back and forth; clients keep histories.

    python -m benchmarks.attacks.takeovers --takeovers 200 --out results/attacks/takeovers.json

A takeover counts when the other server leads. Its time is from the fault to the new leader's first answer to a write; where the
lead goes back and forth, the longest time without any.
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
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attacks.histories import Clients, Verdict, ask, judge
from benchmarks.attacks.pair import Pair, database, postgres_pair, sqlite_pair

KINDS = {"sqlite": ("kill", "freeze", "stop", "bounce"), "postgres": ("kill", "freeze", "cut", "hang", "stop", "bounce")}
PER_ROUND = 20
FROZEN_S = 8.0
"""How long a frozen or cut-off leader is left so at most."""


@dataclass(slots=True)
class Takeover:
    kind: str
    took_s: float  #: to the first answer to a write
    has_changed: bool  #: the other server leads


@dataclass(slots=True)
class Round:
    database: str
    seed: int
    takeovers: list[Takeover] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


async def _inflict(pair: Pair, leader: int, kind: str) -> None:
    """Do it to the leader, and undo it when the other leads, or after a while."""
    server = pair.servers[leader]
    if kind == "kill":
        server.kill()
    elif kind == "stop":
        server.signal(signal.SIGTERM)
    elif kind == "freeze":
        server.signal(signal.SIGSTOP)
    elif kind == "cut":
        pair.proxies[leader].cut()
    elif kind == "hang":
        pair.proxies[leader].hang()


async def _undo(pair: Pair, leader: int, kind: str) -> None:
    server = pair.servers[leader]
    if kind == "freeze":
        server.signal(signal.SIGCONT)
    elif kind in ("cut", "hang"):
        pair.proxies[leader].mend()
    elif kind in ("kill", "stop"):
        while server.process is not None and server.process.poll() is None:
            await asyncio.sleep(0.02)
        server.start()


async def take_over(pair: Pair, clients: Clients, kind: str) -> Takeover:
    leader = await pair.both_up()
    began_s = time.monotonic()
    if kind == "bounce":  # frozen for a moment, again and again: before, at and after the time it is waited for
        led = {leader}
        for pause_s in (0.3, 1.3, 1.7, 0.5):
            pair.servers[leader].signal(signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            pair.servers[leader].signal(signal.SIGCONT)
            await asyncio.sleep(0.1)
            leader = await pair.leader()
            led.add(leader)
        led.add(await pair.both_up())
        return Takeover(kind, _silence_s(clients, began_s), len(led) > 1)
    await _inflict(pair, leader, kind)
    other, until_s = pair.servers[1 - leader], time.monotonic() + FROZEN_S
    while not (has_changed := await other.is_ready()) and time.monotonic() < until_s:
        await asyncio.sleep(0.02)
    while has_changed and not (await ask(other.url, "PUT", "/v1/state/probe", time.time_ns())).is_ok:
        await asyncio.sleep(0.02)
    took_s = time.monotonic() - began_s
    await _undo(pair, leader, kind)
    return Takeover(kind, took_s, has_changed)


def _silence_s(clients: Clients, began_s: float) -> float:
    """How long clients had no answer: the longest gap since then."""
    times = sorted([began_s, *(at_s for at_s in clients.answered_s if at_s > began_s)])
    return max((after - before for before, after in itertools.pairwise(times)), default=float("inf"))


@contextlib.asynccontextmanager
async def opened(name: str, url: str) -> AsyncIterator[Pair]:
    async with sqlite_pair() if name == "sqlite" else postgres_pair(url) as pair:
        yield pair


async def play(name: str, url: str, takeovers: int, seed: int, kinds: tuple[str, ...] = ()) -> Round:
    """Some takeovers with one pair and one store, and the verdict about them."""
    random_ = random.Random(seed)
    found = Round(name, seed)
    choice = [*(kinds or KINDS[name])]
    async with opened(name, url) as pair:
        clients = Clients(pair.urls)
        clients.start()
        try:
            for number in range(takeovers):
                kind = choice[number % len(choice)] if number < len(choice) else random_.choice(choice)
                await asyncio.sleep(random_.uniform(0.2, 0.8))
                found.takeovers.append(await take_over(pair, clients, kind))
            await pair.both_up()
        finally:
            history = await clients.stop()
        found.verdict = await judge(history, pair.urls)
        if not found.verdict.is_good:
            for server in range(2):
                print((pair.folder / f"server-{server}.log").read_text()[-4_000:])
    return found


def summary(rounds: list[Round]) -> dict[str, Any]:
    verdict = Verdict()
    for one in rounds:
        verdict.add(one.verdict)
    by_kind: dict[str, list[float]] = {}
    for one in rounds:
        for takeover in one.takeovers:
            if takeover.has_changed:
                by_kind.setdefault(f"{one.database}/{takeover.kind}", []).append(takeover.took_s)
    return {
        "takeovers": sum(len(times) for times in by_kind.values()),
        "faults": sum(len(one.takeovers) for one in rounds),
        "verdict": verdict.summary(),
        "examples": (verdict.lost + verdict.doubled + verdict.stale + verdict.odd)[:20],
        "first_answer_s": {
            kind: {"median": round(sorted(times)[len(times) // 2], 2), "worst": round(max(times), 2), "count": len(times)}
            for kind, times in sorted(by_kind.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--takeovers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds: list[Round] = []
    names = options.databases.split(",")
    with database() if "postgres" in names else contextlib.nullcontext("") as url:
        seed = options.seed
        while (done := sum(t.has_changed for one in rounds for t in one.takeovers)) < options.takeovers:
            name = names[seed % len(names)]
            count = min(PER_ROUND, options.takeovers - done)
            kinds = tuple(kind for kind in options.kinds.split(",") if kind)
            rounds.append(asyncio.run(play(name, url, count, seed, kinds)))
            told = [
                f"{takeover.kind} {takeover.took_s:.1f}{'' if takeover.has_changed else ' (kept)'}"
                for takeover in rounds[-1].takeovers
            ]
            print(f"round {seed} {name}: {rounds[-1].verdict.summary()}\n  {', '.join(told)}", flush=True)
            seed += 1
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                setup = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg(), "seed": options.seed}
                found = {"label": "measured", "setup": setup} | summary(rounds)
                found["rounds"] = [
                    {"database": one.database, "seed": one.seed, "takeovers": [asdict(t) for t in one.takeovers]}
                    for one in rounds
                ]
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(rounds), indent=1))


if __name__ == "__main__":
    main()
