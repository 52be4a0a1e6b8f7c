"""Worlds by their seeds: `python -m tests.soak KIND SEED[:END]`, on all cores with `--jobs N`. Exit 1: one is wrong.

`core` plays the controller alone, `preempting` too, with batches that give way to others, `adopting` with instances that were at
work under another controller, and `server` whole servers
(`tests/world`). A seed is a world: played again, it is the same.
`--record FILE` adds what was played, with the commit and what was wrong, to a JSON file; `results/attacks/soak.json` is made of
such. What is in that file already is not played again, and with `--for SECONDS` no more is begun after that time: a campaign can
be gone on with.
"""

from __future__ import annotations

import sys

from tests.world.machine import CLOCK

if __name__ == "__main__" or "tests.soak" in sys.argv:
    CLOCK.install()  # before anything of the product is imported, which may keep the clocks it finds

import argparse
import fcntl
import gc
import json
import math
import subprocess
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def wrongs_of(kind: str, seed: int, quiet: bool) -> list[str]:
    try:
        if kind != "server":
            from tests.core import chaos

            worlds = {"core": chaos.world_of, "preempting": chaos.preempting_world_of, "adopting": chaos.adopting_world_of}
            chaos.ends_in_quiet_with_one_ending_for_each_call(seed, worlds[kind])
            return []
        from tests.world.play import play

        return play(seed, quiet).history.wrong
    except Exception:
        return [traceback.format_exc(limit=-4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("core", "preempting", "adopting", "server"))
    parser.add_argument("seeds", help="17, or 0:1000")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--loud", action="store_true", help="with the server's log")
    parser.add_argument("--trace", action="store_true", help="with a digest of everything that clients were answered")
    parser.add_argument("--record", help="a JSON file that what was played is added to")
    parser.add_argument("--for", dest="seconds", type=float, default=math.inf, help="begin no more after this time")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if given.jobs > 1 or given.seconds < math.inf:
        sys.exit(play_in_parallel(given.kind, seeds, given.jobs, given.record, given.seconds))
    gc.set_threshold(100_000, 20, 20)  # worlds are cycles that are dropped whole
    bad: dict[int, list[str]] = {}
    begin_s = time.perf_counter()
    for seed in seeds:
        if given.trace:
            from tests.world.play import play

            print(f"digest {play(seed).history.digest()}")
            continue
        wrongs = wrongs_of(given.kind, seed, not given.loud)
        bad |= {seed: wrongs} if wrongs else {}
        for wrong in wrongs:
            print(f"{given.kind} {seed}: {wrong}", flush=True)
    took_s = time.perf_counter() - begin_s
    took = "" if given.trace else f", {took_s:.0f} s"
    print(f"{given.kind} {given.seeds}: {len(bad)} of {len(seeds)} worlds wrong{took}", flush=True)
    if given.record:
        record(Path(given.record), given.kind, seeds, bad, took_s)
    sys.exit(1 if bad else 0)


def record(file: Path, kind: str, seeds: range, bad: dict[int, list[str]], took_s: float) -> None:
    """Add what was played to a file; what directly follows the last entry of its kind and commit becomes part of that."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False).stdout.strip()
    file.touch()
    with file.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        recorded = json.loads(opened.read() or '{"played": []}')
        played = recorded["played"]
        fresh = {
            "kind": kind,
            "commit": commit,
            "first": seeds.start,
            "last": seeds.stop - 1,
            "wrong": list(bad),
            "said": {seed: wrongs[0][-600:] for seed, wrongs in bad.items()},
            "took_s": round(took_s),
        }
        last = next((one for one in reversed(played) if (one["kind"], one["commit"]) == (kind, commit)), None)
        if last is not None and last["last"] + 1 == seeds.start:
            last |= {name: last[name] + fresh[name] for name in ("wrong", "took_s")} | {"last": fresh["last"]}
            last["said"] |= fresh["said"]
        else:
            played.append(fresh)
        opened.seek(0)
        opened.truncate()
        opened.write(json.dumps(recorded, indent=1) + "\n")


def play_in_parallel(kind: str, seeds: range, jobs: int, file: str | None, seconds: float) -> int:
    """Play those seeds that the file does not have, in processes of their own."""
    size = max(1, min(250, len(seeds) // jobs))
    played = json.loads(Path(file).read_text())["played"] if file and Path(file).exists() else []
    done = {seed for one in played if one["kind"] == kind for seed in range(one["first"], one["last"] + 1)}
    parts = [part for at in range(0, len(seeds), size) if not done.issuperset(part := seeds[at : at + size])]
    options = ["--record", file] if file else []
    until_s = time.perf_counter() + seconds

    def play_part(part: range) -> int:
        if time.perf_counter() > until_s:
            return 0
        return subprocess.run(
            [sys.executable, "-m", "tests.soak", kind, f"{part.start}:{part.stop}", *options], check=False
        ).returncode

    with ThreadPoolExecutor(jobs) as pool:
        return max(pool.map(play_part, parts), default=0)


if __name__ == "__main__":
    main()
