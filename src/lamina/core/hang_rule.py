"""When a running batch is given up: its instance is killed then, and replaced.

- A batch hangs after five times its predicted time, at least five seconds, without a sign of life.
- One that was abandoned, because its controller is gone, is in the way: its result is wanted by nothing. When it has taken longer
  than predicted by as long as a load takes, a new instance would have been there sooner than the end of the batch, and calls are
  waiting, its process is ended. So a wait for it is at most twice what the better choice would have cost. What must not run twice
  is let come to its end, and so is a batch on a GPU, where all functions have one process: they end, or hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.core.lifecycle import WARM

if TYPE_CHECKING:
    from lamina.core.policy import View
    from lamina.core.scheduling.state import Batch

HANG_TIMES = 5
UNPREDICTED_US = 60_000_000
"""Longest time of a batch of which nothing is known."""


def is_to_be_ended(view: View, batch: Batch, floor_us: int) -> bool:
    """Whether a batch hangs, or is in the way. `floor_us`: no shorter batch hangs."""
    if batch.started_us < 0 or batch.pauses.resumes_us >= 0:
        return False  # it is booked, or paused
    silent_us = view.now_us - max(batch.started_us, batch.heartbeat_us)
    return silent_us >= hang_timeout_us(batch, floor_us) or (not batch.jobs and _is_in_the_way(view, batch, floor_us))


def hang_timeout_us(batch: Batch, floor_us: int) -> int:
    longest_us = max(HANG_TIMES * batch.predicted_us, floor_us) + batch.device.way_us if batch.predicted_us else UNPREDICTED_US
    return longest_us + max(0, batch.pauses.us)


def _is_in_the_way(view: View, batch: Batch, floor_us: int) -> bool:
    """Whether an abandoned batch keeps calls waiting, or its instance from leaving, for longer than a load would."""
    function, device = view.functions[batch.instance.function], batch.device.spec
    if not function.spec.idempotent or device.family != "cpu":
        return False
    is_wanted = len(function.queue) or function.rejections or batch.instance.phase is not WARM  # the last: it is to leave
    load_us = view.predictor.load_us(function.spec.name, device.kind) or floor_us
    return bool(is_wanted) and view.now_us - batch.expected_end_us >= load_us
