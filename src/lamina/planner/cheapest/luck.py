"""Does company come when it is waited for? Owner of that record, per function.

The pace of arrivals promises company; clients who call again only when they are answered do not keep the promise: the longer
they are made to wait, the later the next one comes. Nobody tells the two apart but the outcome, so that is what counts:
every wait that ends as it began halves the trust, every one that was joined restores some of it, and so does every batch of
several that nobody waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEAST = 0.2
"""Trust below which nobody is waited for."""


@dataclass(slots=True)
class Luck:
    _trust: dict[str, float] = field(default_factory=dict)
    _hoped: dict[str, int] = field(default_factory=dict)  #: how many there were when the wait began

    def trusts(self, function: str) -> bool:
        return self._trust.get(function, 1.0) >= LEAST

    def hope(self, function: str, count: int) -> None:
        """So many wait for more."""
        self._hoped.setdefault(function, count)

    def start(self, function: str, count: int) -> None:
        """A batch of so many starts."""
        trust = self._trust.get(function, 1.0)
        hoped = self._hoped.pop(function, 0)
        if hoped:
            trust = min(1.0, trust + 0.25) if count > hoped else 0.5 * trust
        elif count > 1:
            trust = min(1.0, trust + 0.1)
        self._trust[function] = trust
