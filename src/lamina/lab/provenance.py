"""Provenance of a figure: which code, when, on which machine. Written at the head of every file of results."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

import lamina
from lamina.lab.data import repository


class MachineInfo(Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    system: str


class Provenance(Struct, frozen=True, kw_only=True, tag="origin", tag_field="line"):
    """The first line of a file of results."""

    experiment: str
    seed: int
    quick: bool
    commit: str
    version: str
    python: str
    date: str
    machine: MachineInfo

    def is_same_work(self, other: Provenance) -> bool:
        """Would a row of the one be a row of the other? The machine and the day do not matter, the code does."""
        mine, theirs = ((o.experiment, o.seed, o.quick, o.commit, o.version) for o in (self, other))
        return bool(self.commit) and mine == theirs


def provenance(experiment: str, seed: int, quick: bool) -> Provenance:
    return Provenance(
        experiment=experiment,
        seed=seed,
        quick=quick,
        commit=commit(),
        version=lamina.__version__,
        python=platform.python_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_info(),
    )


def machine_info() -> MachineInfo:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineInfo(cpu=_cpu(), cores=cores, system=platform.platform(terse=True))


def commit() -> str:
    """The commit of the checkout; with changes that are in no commit, a digest of the code as it is. Without a checkout, what
    `$LAMINA_COMMIT` says, or nothing."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("LAMINA_COMMIT", "")
    changed = _git("status", "--porcelain", "--", "src", "data", "profiles")
    return f"{head}+{_digest()}" if changed else head


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(repository()), *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _digest() -> str:
    home = Path(lamina.__file__).parent
    total = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        total.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:8]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
