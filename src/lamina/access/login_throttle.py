"""Login throttle: exponential backoff after wrong passwords, per user name."""

from __future__ import annotations

from lamina.errors import Refused

FREE_TRIES = 5
MAX_WAIT_S = 300
MAX_NAMES = 10_000


class LoginThrottle:
    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}  #: how often in a row, and when next

    def check(self, name: str, now_us: int) -> None:
        _, until_us = self._failed.get(name, (0, 0))
        if now_us < until_us:
            wait_s = (until_us - now_us) / 1e6
            raise Refused("too many wrong tries", reason="tries", retry_after_s=wait_s, hint=f"wait {wait_s:.0f} s")

    def failed(self, name: str, now_us: int) -> None:
        count = self._failed.get(name, (0, 0))[0] + 1
        wait_s = min(MAX_WAIT_S, 2 ** (count - FREE_TRIES)) if count >= FREE_TRIES else 0
        while len(self._failed) >= MAX_NAMES:
            del self._failed[next(iter(self._failed))]
        self._failed[name] = (count, now_us + wait_s * 1_000_000)

    def succeeded(self, name: str) -> None:
        self._failed.pop(name, None)
