"""Error policy of a step: retry, catch or fail; and the names of failures.

The core sees the *name* of an error and where it happened; its text stays outside, with the values.
Names that begin with `States.` are those of the Amazon States Language, so that one table serves every way of writing
workflows.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec import Struct

ALL = "States.ALL"
TASK_FAILED = "States.TaskFailed"
TIMEOUT = "States.Timeout"
HEARTBEAT_TIMEOUT = "States.HeartbeatTimeout"
BRANCH_FAILED = "States.BranchFailed"
TOO_MANY_FAILED = "States.ExceedToleratedFailureThreshold"
RUNTIME = "States.Runtime"

FINAL = (RUNTIME, "States.DataLimitExceeded")
"""A document that does not fit its data: nothing was tried, so nothing is gained by trying again, and no catcher applies."""

MAX_DELAY_US = 31_622_400 * 1_000_000
"""A year and a day. Back-off grows without bound; a timer must not."""


class Fault(Struct, frozen=True, array_like=True):
    """A failure and where it began, by which its text can be found."""

    error: str  #: a stable word, for the caller of the run
    name: str  #: what retriers and catchers are matched against
    scope: int = 0
    node: str = ""
    job_id: int = 0


class Retrier(Struct, frozen=True):
    """Up to `attempts` more tries after failures of these names, each after a longer pause."""

    errors: tuple[str, ...]
    interval_us: int = 1_000_000
    attempts: int = 3
    backoff: float = 2.0
    max_delay_us: int = 0  #: 0: no limit of its own
    jitter: bool = False  #: anything from nothing to the pause, so that what failed together does not return together

    def delay_us(self, used: int, key: str) -> int:
        """Before try number `used` + 1. `key` stands for chance, which the core does not have."""
        ceiling_us = min(self.max_delay_us or MAX_DELAY_US, MAX_DELAY_US)
        try:
            delay_us = min(float(ceiling_us), self.interval_us * self.backoff**used)
        except OverflowError:
            delay_us = float(ceiling_us)
        if self.jitter:
            delay_us *= int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") / 2**64
        return round(delay_us)


class Catcher(Struct, frozen=True):
    """After failures of these names, go on there."""

    errors: tuple[str, ...]
    next: tuple[str, ...]


class ErrorPolicy(Struct, frozen=True):
    """Error policy of one step. The first retrier, then the first catcher, that knows the error decides."""

    retry: tuple[Retrier, ...] = ()
    catch: tuple[Catcher, ...] = ()
    timeout_us: int = 0  #: of one try; 0: none
    heartbeat_us: int = 0  #: longest silence of a job that runs; 0: none


def matches(errors: tuple[str, ...], name: str, alias: str = "") -> bool:
    """Whether one of these names stands for this failure. `alias` is what it is called where it arrives: a branch failed, say."""
    if name in FINAL:
        return False
    late = name in (TIMEOUT, HEARTBEAT_TIMEOUT)
    for wanted in errors:
        if wanted in (name, ALL) or (alias and wanted == alias):
            return True
        if (wanted == TASK_FAILED and not late) or (wanted == TIMEOUT and late):
            return True
    return False
