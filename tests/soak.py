"""Worlds by their seeds: `python -m tests.soak core|server SEED[:END]`, on all cores with `--jobs N`. Exit 1: one is wrong.

`core` plays the controller alone, `server` whole servers (`tests/world`). A seed is a world: played again, it is the same.
"""

from __future__ import annotations

import sys

from tests.world.machine import CLOCK

if __name__ == "__main__" or "tests.soak" in sys.argv:
    CLOCK.install()  # before anything of the product is imported, which may keep the clocks it finds

import argparse
import subprocess
import time
import traceback
from concurrent.futures import ThreadPoolExecutor


def wrongs_of(kind: str, seed: int, quiet: bool) -> list[str]:
    try:
        if kind == "core":
            from tests.core.chaos import ends_in_quiet_with_one_ending_for_each_call

            ends_in_quiet_with_one_ending_for_each_call(seed)
            return []
        from tests.world.play import play

        return play(seed, quiet).history.wrong
    except Exception:
        return [traceback.format_exc(limit=-4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("core", "server"))
    parser.add_argument("seeds", help="17, or 0:1000")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--loud", action="store_true", help="with the server's log")
    parser.add_argument("--trace", action="store_true", help="with a digest of everything that clients were answered")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if given.jobs > 1:
        sys.exit(play_in_parallel(given.kind, seeds, given.jobs))
    bad = 0
    begin_s = time.perf_counter()
    for seed in seeds:
        if given.trace:
            from tests.world.play import play

            print(f"digest {play(seed).history.digest()}")
            continue
        wrongs = wrongs_of(given.kind, seed, not given.loud)
        bad += bool(wrongs)
        for wrong in wrongs:
            print(f"{given.kind} {seed}: {wrong}", flush=True)
    took = "" if given.trace else f", {time.perf_counter() - begin_s:.0f} s"
    print(f"{given.kind} {given.seeds}: {bad} of {len(seeds)} worlds wrong{took}", flush=True)
    sys.exit(1 if bad else 0)


def play_in_parallel(kind: str, seeds: range, jobs: int) -> int:
    size = max(1, min(500, len(seeds) // jobs))
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]

    def play_part(part: range) -> int:
        return subprocess.run([sys.executable, "-m", "tests.soak", kind, f"{part.start}:{part.stop}"], check=False).returncode

    with ThreadPoolExecutor(jobs) as pool:
        return max(pool.map(play_part, parts))


if __name__ == "__main__":
    main()
