"""Token bucket for work that errors of clients cause: name suggestions and log lines."""

from __future__ import annotations

import time

PER_S = 20
AT_ONCE = 200


class Sparing:
    """So many a second, with a burst."""

    def __init__(self, per_s: float = PER_S, at_once: int = AT_ONCE) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left: float = at_once
        self._seen_s = time.monotonic()
        self.left_out = 0  #: since the last one that was let through

    def may(self) -> bool:
        now_s = time.monotonic()
        self._left = min(self._at_once, self._left + self._per_s * (now_s - self._seen_s))
        self._seen_s = now_s
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True
