"""How well promises were kept: how much later calls came than their admission expected. Owner of that record.

A prediction can be wrong for reasons no predictor of batches sees: hand-overs, a busy machine, a queue somewhere else.
Whatever it is, it shows in the time between what was promised and what came, and the next promise is made with that in
mind. It is a time and not a ratio: a lone call of 2 ms that takes 3 says nothing about one that waits for 40.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.run import Run

STEP = 0.05
WIDEN = 2.0


@dataclass(slots=True)
class _Record:
    mean_us: float = 0.0
    deviation_us: float = 0.0

    def add(self, late_us: float) -> None:
        self.deviation_us += STEP * (abs(late_us - self.mean_us) - self.deviation_us)
        self.mean_us += STEP * (late_us - self.mean_us)


@dataclass(slots=True)
class Promises:
    _records: dict[str, _Record] = field(default_factory=dict)  #: by target

    def late_us(self, target: str) -> int:
        """What to add to an expected time so that nearly all calls keep it."""
        record = self._records.get(target)
        return max(0, int(record.mean_us + WIDEN * record.deviation_us)) if record is not None else 0

    def kept(self, run: Run, took_us: int) -> None:
        """It ended after that time. Only those who had little time to spare count: the others were made to wait on purpose.
        No single call is believed to have taken more than three times what it was promised."""
        call = run.call
        if 2 * run.promised_us > call.expires_us - call.arrived_us:
            record = self._records.setdefault(run.call.target, _Record())
            record.add(min(took_us, 3 * run.promised_us) - run.promised_us)

    def relax(self, target: str) -> None:
        """Calls are turned away, and nothing runs that could show better times."""
        record = self._records.get(target)
        if record is not None:
            record.mean_us *= 0.7
            record.deviation_us *= 0.7
