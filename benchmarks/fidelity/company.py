"""How much longer batches took beside others: as it was measured before a run, or as the batches of another run felt it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.fidelity.live import Batch, handovers
from benchmarks.fidelity.recorded import Recording
from lamina.planner.interference import ColocatedBatch
from lamina.predict.profile import Handover, Profile

Slowdowns = Mapping[str, Mapping[int, Sequence[float]]]
"""By function, by the largest batch they hold for, by number of neighbours from one on."""

SIZES = (1, 2, 4, 8)
"""There are graphs of: a batch of three runs as one of four."""
ENOUGH = 30
"""Batches of one size to say how they feel neighbours."""


@dataclass(frozen=True, slots=True)
class Company:
    """On soft slices smaller batches of neighbours are felt less, which was not measured; `weights` say by how much."""

    slowdowns: Slowdowns
    weights: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        sizes = self.slowdowns.get(function.function)
        if not neighbours or not sizes:
            return 1.0
        known = sizes[min((size for size in sizes if size >= function.batch), default=max(sizes))]
        felt = statistics.mean(self.weights.get(other.function, {}).get(other.batch, 1.0) for other in neighbours)
        return 1 + felt * max(0.0, known[min(len(neighbours), len(known)) - 1] - 1)


def weights(profile: Profile) -> dict[int, float]:
    """The square of its time over that of a full batch: read off a live run, where a neighbour's batch of 1, 2, 4 was felt 0.35,
    0.43 and 0.59 times as much as one of 8, for three models alike."""
    most_us = max(point.p50_us for point in profile.points)
    return {point.batch: (point.p50_us / most_us) ** 2 for point in profile.points}


def felt(recording: Recording, alone_us: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, list[float]]]:
    """From all batches of the run that had two neighbours around: of its pace, a batch lost so much while one of them was on, and
    so much while both were. Least squares, for each size there are graphs of; a size seldom seen is like the next larger."""
    import numpy as np

    seen: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for phase in recording.phases:
        if len(phase.who) != 3:
            continue
        for batch, one, both in _overlaps(phase.batches):
            size = next(size for size in SIZES if size >= batch.size)
            lost = 1 - alone_us[batch.function][batch.size] / batch.device_us
            seen.setdefault((batch.function, size), []).append((one, both, lost))
    made: dict[str, dict[int, list[float]]] = {}
    for (name, size), rows in sorted(seen.items()):
        if len(rows) < ENOUGH:
            continue
        table = np.array(rows)
        lost, *_ = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)
        made.setdefault(name, {})[size] = [round(float(1 / (1 - max(0.0, part))), 4) for part in lost]
    return made


def _overlaps(batches: Sequence[Batch]) -> list[tuple[Batch, float, float]]:
    """Each batch with the parts of its time in which one neighbour was on its slice, and in which both were."""
    back = handovers(list(batches))
    on: dict[str, list[tuple[float, float]]] = {}
    placed = []
    for batch in sorted(batches, key=lambda batch: batch.ended_us):
        until = batch.ended_us - back.get(batch.function, Handover(0.0)).time_us(batch.size) / 2
        on.setdefault(batch.function, []).append((until - batch.device_us, until))
        placed.append((batch, until - batch.device_us, until))
    first = dict.fromkeys(on, 0)
    found = []
    for batch, since, until in placed:
        cuts: list[tuple[float, int]] = []
        for name, spans in on.items():
            if name == batch.function:
                continue
            while first[name] < len(spans) and spans[first[name]][1] < since - 1e6:  # nobody takes a second
                first[name] += 1
            for begin, end in spans[first[name] :]:
                if begin >= until:
                    break
                if end > since:
                    cuts += [(max(begin, since), 1), (min(end, until), -1)]
        parts, count, at = [0.0, 0.0, 0.0], 0, since
        for when, step in sorted(cuts):
            parts[min(2, count)] += when - at
            count, at = count + step, when
        found.append((batch, parts[1] / (until - since), parts[2] / (until - since)))
    return found
