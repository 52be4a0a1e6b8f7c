"""`python -m tests.mutants [NAME ...]`: apply each mutant in a copy of the source and run the tests that must notice it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import ROOT, SOURCE, Mutant, read_mutants

LIMIT_S = 600.0
"""A mutant that makes its tests hang is noticed as well."""


class SourceCopy:
    """Copy of the package to break, in a checkout with the data it reads. Tests import it instead of the real one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "src"
        shutil.copytree(SOURCE, self.path / "lamina", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("data", "profiles", "scenarios", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def write(self, file: str, text: str) -> None:
        target = self.path / "lamina" / file
        target.write_text(text)
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            compiled.unlink()  # the same size in the same second would pass for the same file

    def run(self, tests: list[str]) -> tuple[int, str]:
        """Exit code of pytest, and the last lines it said."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.path), "HYPOTHESIS_STORAGE_DIRECTORY": str(self.path / "hypothesis")}
        try:
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return 1, "it hung"
        return done.returncode, done.stdout[-2_000:]


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    options.add_argument("names", nargs="*", help="mutants to try; default: all")
    options.add_argument("-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at once; default: one per core")
    options.add_argument("--no-baseline", action="store_true", help="do not check first that the tests pass without a mutant")
    given = options.parse_args()
    known = {mutant.name: mutant for mutant in read_mutants()}
    if unknown := [name for name in given.names if name not in known]:
        options.error(f"no mutants {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in given.names or known]
    with tempfile.TemporaryDirectory(prefix="lamina-mutants-") as folder:
        free: SimpleQueue[SourceCopy] = SimpleQueue()
        for number in range(given.jobs):
            free.put(SourceCopy(Path(folder) / str(number)))
        if not given.no_baseline and not passes_unbroken(free, chosen, given.jobs):
            return 2
        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = list(pool.map(lambda mutant: attempt(free, mutant), chosen))
    survivors = [mutant for mutant, outcome in zip(chosen, outcomes, strict=True) if outcome == "SURVIVED"]
    broken = [mutant for mutant, outcome in zip(chosen, outcomes, strict=True) if outcome.startswith("error")]
    print(f"\n{len(chosen)} mutants: {len(chosen) - len(survivors) - len(broken)} killed, {len(survivors)} survived")
    for mutant in survivors:
        print(f"  {mutant.name}: {mutant.breaks} ({mutant.file}); not noticed by {', '.join(mutant.tests)}")
    for mutant in broken:
        print(f"  {mutant.name}: its tests could not be run")
    return 1 if survivors or broken else 0


def passes_unbroken(free: SimpleQueue[SourceCopy], mutants: list[Mutant], jobs: int) -> bool:
    """Without a mutant all of these tests pass: else a failure says nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    parts = [part for part in (tests[number::jobs] for number in range(jobs)) if part]

    def run(part: list[str]) -> tuple[int, str]:
        copy = free.get()
        try:
            return copy.run(part)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        failed = [said for code, said in pool.map(run, parts) if code]
    for said in failed:
        print(f"the tests fail without any mutant:\n{said}")
    return not failed


def attempt(free: SimpleQueue[SourceCopy], mutant: Mutant) -> str:
    copy, began_s = free.get(), time.monotonic()
    whole = (SOURCE / mutant.file).read_text()
    code, said = 2, ""
    try:
        copy.write(mutant.file, mutant.applied(whole))
        code, said = copy.run(mutant.tests)
    except ValueError as error:
        said = str(error)
    finally:
        copy.write(mutant.file, whole)
        free.put(copy)
    outcome = {0: "SURVIVED", 1: "killed"}.get(code, f"error {code}")
    print(f"{outcome:9} {time.monotonic() - began_s:6.1f} s  {mutant.name}", flush=True)
    if outcome.startswith("error"):
        print(said)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
