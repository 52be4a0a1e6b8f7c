"""Campaigns: rounds of faults on a pair of servers, in turns on both databases, until there were enough; judged as one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.attacks.histories import Verdict
from benchmarks.attacks.pair import database
from benchmarks.report import machine

T = TypeVar("T")


@dataclass(slots=True)
class Round(Generic[T]):
    """One pair of servers, and what was done to it."""

    database: str
    seed: int
    events: list[T] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


def judged(rounds: Iterable[Round[T]]) -> dict[str, Any]:
    """The verdict on all rounds, with examples of what is wrong."""
    verdict = Verdict()
    for one in rounds:
        verdict.add(one.verdict)
    return {
        "verdict": verdict.summary(),
        "examples": (verdict.lost + verdict.doubled + verdict.stale + verdict.odd)[:20],
    }


def spread(times: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Median and worst time by kind."""
    by_kind: dict[str, list[float]] = {}
    for kind, took_s in times:
        by_kind.setdefault(kind, []).append(took_s)
    return {
        kind: {"median": round(sorted(found)[len(found) // 2], 2), "worst": round(max(found), 2), "count": len(found)}
        for kind, found in sorted(by_kind.items())
    }


def options_for(what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{what}", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on with the rounds that --out has")
    return parser


def _read(file: Path, what: str, made: Callable[..., T]) -> tuple[int, list[Round[T]]]:
    """First seed and rounds of a campaign that was interrupted."""
    known = json.loads(file.read_text())
    rounds = [
        Round(one["database"], one["seed"], [made(**event) for event in one[what]], Verdict(**one["verdict"]))
        for one in known["rounds"]
    ]
    return known["setup"]["seed"], rounds


def run_campaign(
    options: argparse.Namespace,
    what: str,
    per_round: int,
    play: Callable[[str, str, int, int], Coroutine[Any, Any, Round[T]]],
    counted: Callable[[Round[T]], int],
    tell: Callable[[T], str],
    summary: Callable[[Sequence[Round[T]]], dict[str, Any]],
    made: Callable[..., T],
) -> None:
    """Play rounds until as many events as the option `what` says have `counted`. The file is renewed after each round;
    `made` makes an event of what it has of one."""
    wanted: int = getattr(options, what)
    rounds: list[Round[T]] = []
    first = options.seed
    if options.resume and options.out.exists():
        first, rounds = _read(options.out, what, made)
    names = options.databases.split(",")
    with database() if "postgres" in names else contextlib.nullcontext("") as url:
        seed = rounds[-1].seed + 1 if rounds else first
        while (done := sum(map(counted, rounds))) < wanted:
            name = names[seed % len(names)]
            rounds.append(asyncio.run(play(name, url, min(per_round, wanted - done), seed)))
            told = ", ".join(map(tell, rounds[-1].events))
            print(f"round {seed} {name}: {rounds[-1].verdict.summary()}\n  {told}", flush=True)
            seed += 1
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                setup = {**machine(), "load_average": os.getloadavg(), "seed": first}
                found = {"label": "measured", "setup": setup} | summary(rounds)
                found["rounds"] = [
                    {
                        "database": one.database,
                        "seed": one.seed,
                        "verdict": asdict(one.verdict),
                        what: [asdict(event) for event in one.events],  # type: ignore[call-overload]
                    }
                    for one in rounds
                ]
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(rounds), indent=1))
