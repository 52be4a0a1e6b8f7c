"""Takeovers under load: the leader is killed, frozen, cut off, stopped, or its lock goes back and forth; clients keep histories.

    python -m benchmarks.attacks.takeovers --takeovers 200 --out results/attacks/takeovers.json

A takeover counts when the other server leads. Its time is from the fault to the new leader's first answer to a write; where the
lead goes back and forth, the longest time without any.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.attacks.campaign import Round, judged, options_for, run_campaign, spread
from benchmarks.attacks.histories import Clients, ask, judge
from benchmarks.attacks.pair import Pair, postgres_pair, sqlite_pair

KINDS = {"sqlite": ("kill", "freeze", "stop", "bounce"), "postgres": ("kill", "freeze", "cut", "hang", "stop", "bounce")}
PER_ROUND = 20
FROZEN_S = 8.0
"""How long a frozen or cut-off leader is left so at most."""


@dataclass(slots=True)
class Takeover:
    kind: str
    took_s: float  #: to the first answer to a write
    has_changed: bool  #: the other server leads


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


async def play(name: str, url: str, takeovers: int, seed: int, kinds: tuple[str, ...] = ()) -> Round[Takeover]:
    """Some takeovers with one pair and one store, and the verdict about them."""
    random_ = random.Random(seed)
    found = Round[Takeover](name, seed)
    choice = [*(kinds or KINDS[name])]
    async with opened(name, url) as pair:
        clients = Clients(pair.urls)
        clients.start()
        try:
            for number in range(takeovers):
                kind = choice[number % len(choice)] if number < len(choice) else random_.choice(choice)
                await asyncio.sleep(random_.uniform(0.2, 0.8))
                found.events.append(await take_over(pair, clients, kind))
            await pair.both_up()
        finally:
            history = await clients.stop()
        found.verdict = await judge(history, pair.urls)
        if not found.verdict.is_good:
            for server in range(2):
                print((pair.folder / f"server-{server}.log").read_text()[-4_000:])
    return found


def summary(rounds: Sequence[Round[Takeover]]) -> dict[str, Any]:
    times = [(f"{one.database}/{event.kind}", event.took_s) for one in rounds for event in one.events if event.has_changed]
    return {
        "takeovers": len(times),
        "faults": sum(len(one.events) for one in rounds),
        **judged(rounds),
        "first_answer_s": spread(times),
    }


def main() -> None:
    parser = options_for("takeovers")
    parser.add_argument("--kinds", default="")
    options = parser.parse_args()
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    run_campaign(
        options,
        "takeovers",
        PER_ROUND,
        partial(play, kinds=kinds),
        counted=lambda one: sum(event.has_changed for event in one.events),
        tell=lambda event: f"{event.kind} {event.took_s:.1f}{'' if event.has_changed else ' (kept)'}",
        summary=summary,
        made=Takeover,
    )


if __name__ == "__main__":
    main()
