"""How well promises were kept: the time a call really took over the time its admission expected. Owner of that record.

A prediction can be wrong for reasons no predictor of batches sees: a busy machine, a neighbour, a queue somewhere else.
Whatever it is, it shows in the ratio of what came to what was promised, and the next promise is made with that in mind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.run import Run

STEP = 0.05
MOST = 4.0


@dataclass(slots=True)
class _Record:
    mean: float = 1.0
    deviation: float = 0.05

    def add(self, ratio: float) -> None:
        self.deviation += STEP * (abs(ratio - self.mean) - self.deviation)
        self.mean += STEP * (ratio - self.mean)


@dataclass(slots=True)
class Promises:
    _records: dict[str, _Record] = field(default_factory=dict)  #: by target

    def stretch(self, target: str) -> float:
        """By how much to stretch an expected time so that most calls keep it; at least 1."""
        record = self._records.get(target)
        return min(MOST, max(1.0, record.mean + record.deviation)) if record is not None else 1.0

    def kept(self, run: Run, took_us: int) -> None:
        """It ended after that time; what ended by missing its deadline counts as late, however soon it was dropped."""
        if run.promised_us > 0:
            record = self._records.setdefault(run.call.target, _Record())
            record.add(min(MOST, took_us / run.promised_us))

    def relax(self, target: str) -> None:
        """Calls are turned away, and nothing runs that could show better times."""
        record = self._records.get(target)
        if record is not None:
            record.mean += 0.3 * (1.0 - record.mean)
            record.deviation *= 0.7
