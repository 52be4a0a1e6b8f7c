"""How long functions have to wait for a slice of late: what to leave free of a deadline when the next one is waited for.

Forgotten by halves, in time and not only by newer figures: a long wait must not turn callers away for ever, and nothing newer
comes while they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HALF_US = 200_000
FADE = 0.9
"""What is left of it after a batch that did not have to wait."""


@dataclass(slots=True)
class Slots:
    _since_us: dict[str, int] = field(default_factory=dict)  #: since when a function wants a slice and has none
    _known: dict[str, tuple[float, int]] = field(default_factory=dict)  #: how long it took, and when that was

    def wants(self, function: str, now_us: int) -> None:
        self._since_us.setdefault(function, now_us)

    def rests(self, function: str) -> None:
        """It waits for something else now."""
        self._since_us.pop(function, None)

    def gets(self, function: str, now_us: int) -> None:
        waited_us = now_us - self._since_us.pop(function, now_us)
        known_us = self.wait_us(function, now_us)
        if waited_us or known_us:
            self._known[function] = (max(float(waited_us), FADE * known_us), now_us)

    def wait_us(self, function: str, now_us: int) -> float:
        known = self._known.get(function)
        if known is None:
            return 0.0
        us = known[0] * 0.5 ** ((now_us - known[1]) / HALF_US)
        return us if us >= 1.0 else 0.0
