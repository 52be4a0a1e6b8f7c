"""When a running batch is given up: its instance is killed then, and replaced.

- A batch hangs after five times its predicted time, at least five seconds, without a sign of life. On cores, where it holds up no
  other function's process, not while a client waits and may wait longer: inputs differ, and so do first calls.
- One that was abandoned, because its controller is gone, has a result that nothing wants. It is in the way when calls have waited
  for its instance or its units for as long as a load takes, and its end is not expected within another such time; or as soon as
  calls wait, if it is late by that time already. Then its process is ended: a wait for it is at most about twice what the better
  choice would have cost. What must not run twice is let come to its end, and so is a batch on a GPU, where all functions have one
  process: they end, or hang.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from lamina.core.lifecycle import WARM

if TYPE_CHECKING:
    from lamina.core.policy import View
    from lamina.core.scheduling.state import Batch, FunctionState

HANG_TIMES = 5
MAX_FUNCTIONS = 8
"""Of those that wait, so many are looked at."""

UNPREDICTED_US = 60_000_000
"""Longest time of a batch of which nothing is known, and of the first of an instance: what a function imports, downloads or
compiles in its first call, it does again in every instance."""


def is_to_be_ended(view: View, batch: Batch, floor_us: int) -> bool:
    """Whether a batch hangs, or is in the way. `floor_us`: no shorter batch hangs."""
    if batch.started_us < 0 or batch.pauses.resumes_us >= 0:
        return False  # it is booked, or paused
    silent_us = view.now_us - max(batch.started_us, batch.heartbeat_us)
    timeout_us = hang_timeout_us(batch, max(floor_us, _allowed_us(view, batch)))
    return silent_us >= timeout_us or (not batch.jobs and _is_in_the_way(view, batch, floor_us))


def hang_timeout_us(batch: Batch, floor_us: int) -> int:
    least_us = max(floor_us, UNPREDICTED_US) if not batch.predicted_us or _is_first(batch) else floor_us
    return max(HANG_TIMES * batch.predicted_us, least_us) + batch.device.way_us + max(0, batch.pauses.us)


def _allowed_us(view: View, batch: Batch) -> int:
    """How long a batch on cores may take because a client waits for it: as long as a call of its function."""
    if batch.device.spec.family != "cpu" or not any(job.id in job.run.jobs for job in batch.jobs):
        return 0
    slo = view.functions[batch.instance.function].spec.slo
    return slo.latency_us if slo.latency_us and slo.on_miss == "shed" else slo.timeout_us


def _is_first(batch: Batch) -> bool:
    """Whether its instance may set itself up in it: it has been loaded here, and none of its batches has ended. On a GPU that is
    done while it is loaded, and others need its process."""
    return batch.device.spec.family == "cpu" and not batch.instance.last_used_us and not batch.instance.is_adopted


def _is_in_the_way(view: View, batch: Batch, floor_us: int) -> bool:
    """Whether an abandoned batch keeps calls waiting, or its instance from leaving, for longer than a load would."""
    function, device = view.functions[batch.instance.function], batch.device.spec
    if not function.spec.idempotent or device.family != "cpu":
        return False
    load_us = view.predictor.load_us(function.spec.name, device.kind) or floor_us
    left_us = batch.expected_end_us - view.now_us
    if abs(left_us) <= load_us:
        return False  # it will be over soon, as far as is known
    return batch.instance.phase is not WARM or _waited_us(view, function, batch) >= (load_us if left_us > 0 else 1)


def _waited_us(view: View, function: FunctionState, batch: Batch) -> int:
    """How long calls have waited for an abandoned batch: those of its function, and where nothing is free beside it, others too.
    Calls that are rejected wait since it was adopted."""
    is_full = batch.device.busy == batch.device.all_units
    waiting = view.backlogged.get(batch.device.spec.id, {}).values() if is_full else (function,)
    heads_us = [one.queue.head().enqueued_us for one in islice(waiting, MAX_FUNCTIONS) if len(one.queue)]
    if function.rejections:
        heads_us.append(batch.instance.created_us)
    return view.now_us - min(heads_us, default=view.now_us)
