"""Warm-up probe: a first timing of a function without a profile, in its worker, after it has loaded and before it takes calls.

With sample inputs from the app's `examples()`, a batch of one and the largest batch are timed once each, after a run that does
not count: the first of all sets up threads and caches, and would look a hundred times slower than the next. That is little,
but the predictor starts from it instead of from nothing, and what is served refines it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lamina import encoding
from lamina.sdk.sample_inputs import samples_of
from lamina.values.references import ErrorInfo, ReleaseSlots, ShmRef
from lamina.worker.protocol import JobFrame, RunBatch

if TYPE_CHECKING:
    from lamina.sdk.function import Function
    from lamina.worker.main import FunctionWorker, WorkerSetup

log = logging.getLogger("lamina")

BUDGET_US = 50_000
"""A call may be waiting for this load: what takes longer is learnt from that call instead."""

LONG = 4
"""Times the budget from which one run is all there is."""


def probe(
    worker: FunctionWorker, function: Function[..., Any], setup: WorkerSetup, budget_us: int = BUDGET_US
) -> list[tuple[int, int, int]]:
    """Batch, units and microseconds of the runs that succeeded. Whatever goes wrong here is no reason not to serve."""
    try:
        samples = samples_of(function.app, setup.app).get(function.name)
        frames = [_job(inputs) for inputs in samples or ()]
    except Exception:
        return []
    if not frames:
        return []
    mask = setup.mask or (1 << function.spec.cores) - 1
    units = mask.bit_count()
    first_us = _timed(worker, mask, frames[:1])
    if not first_us:
        log.info("%s is not timed before its first call: its sample input does not fit", function.name)
        return []
    if first_us > LONG * budget_us:  # then setting up is the smaller part of it
        return [(1, units, first_us)]
    one_us = min(first_us, _timed(worker, mask, frames[:1]) or first_us)
    found = [(1, units, one_us)]
    most = function.spec.max_batch
    if most > 1 and most * one_us <= budget_us:
        most_us = _timed(worker, mask, [frames[place % len(frames)] for place in range(most)])
        if most_us:
            found.append((most, units, most_us))
    return found


def _job(inputs: dict[str, Any]) -> JobFrame:
    return JobFrame(0, "probe", None, [(("input", name), encoding.encode(value)) for name, value in inputs.items()])


def _timed(worker: FunctionWorker, mask: int, jobs: list[JobFrame]) -> int:
    """Microseconds of one run; 0 if any of it failed."""
    done = worker.run(RunBatch(0, mask, jobs))
    slots = [result.slot for result in done.results if isinstance(result, ShmRef)]
    if slots:
        worker.release(ReleaseSlots(slots))
    return 0 if any(isinstance(result, ErrorInfo) for result in done.results) else max(1, done.device_us)
