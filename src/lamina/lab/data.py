"""Data files that experiments read: in `$LAMINA_DATA`, else in the folder `data` of the repository."""

from __future__ import annotations

import os
import random
from pathlib import Path

from lamina.errors import BadValue
from lamina.sim.workload import replay_trace


def path(name: str) -> Path:
    """`path("has-gpu/standard.json")`: that file, or an error that says where it was looked for."""
    given = os.environ.get("LAMINA_DATA")
    home = Path(given) if given else repository() / "data"
    found = home / name
    if not found.exists():
        hint = "point LAMINA_DATA at the folder data of the repository; an installed package does not carry it"
        raise BadValue(f"data {name!r}: not in {home}", hint=hint)
    return found


def repository() -> Path:
    """Four folders up from here, which is right in a checkout and harmless elsewhere."""
    return Path(__file__).resolve().parents[3]


def recorded_arrivals(rate: float, span_us: int, dice: random.Random, service: str = "conv") -> tuple[int, ...]:
    """Recorded arrivals from a random place on, stretched so that the mean rate over the whole recording is `rate`."""
    times = list(replay_trace(path(f"traces/azure_llm_2023_{service}.csv.gz")))
    speed = rate * (times[-1] - times[0]) / 1e6 / len(times)
    begin = dice.randrange(len(times))
    found: list[int] = []
    offset_us = -times[begin]
    while True:
        for at_us in times[begin:]:
            scaled_us = int((at_us + offset_us) / speed)
            if scaled_us >= span_us:
                return tuple(found)
            found.append(scaled_us)
        offset_us += times[-1]
        begin = 0
