"""Calls on the clock on the wall, and measurements of the functions on the very engine that serves them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.fidelity.cases import moved, told
from lamina import values
from lamina.core.actions import Action, StartBatch
from lamina.core.events import BatchFinished, Event
from lamina.core.lifecycle import Phase
from lamina.live.aside import Aside, Leaves, Took
from lamina.live.loop import Ending, LiveLoop
from lamina.live.timer import Timer, clock_us
from lamina.predict import online
from lamina.predict.profile import Handover, Profile
from lamina.predict.table import Table
from lamina.profiler.make import to_points, to_spread
from lamina.types import Call

Runs = dict[tuple[int, int], list[Took]]
"""By batch and units."""


class Batch(NamedTuple):
    """One batch of a live run; times on the loop's clock."""

    function: str
    size: int
    begun_us: int
    ended_us: int
    device_us: int
    booked: bool


class Found(NamedTuple):
    told: dict[str, Any]
    ends: list[Ending]
    batches: list[Batch]


async def served(loop: LiveLoop, calls: list[Call], inputs: Mapping[str, dict[str, bytes]]) -> Found:
    """All of them to their end; the loop has started."""
    ends: list[Ending] = []
    done, late_us = asyncio.Event(), list[int]()
    open_: dict[int, tuple[int, StartBatch]] = {}
    batches: list[Batch] = []
    held_us: list[int] = []

    def on_end(end: Ending) -> None:
        ends.append(end)
        if len(ends) == len(calls):
            done.set()

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        held_us.append(loop.decided_us)
        if isinstance(event, BatchFinished) and event.batch_id in open_:
            begun_us, start = open_.pop(event.batch_id)
            batches.append(Batch(start.function, len(start.jobs), begun_us, now_us, event.device_us, bool(start.after)))
        for action in actions:
            if isinstance(action, StartBatch):
                open_[action.batch_id] = (now_us, action)

    loop.watch = watch
    timer = Timer(asyncio.get_running_loop())
    begin_us, offset_us = clock_us() + 10_000, loop.now_us() + 10_000

    def submit(call: Call) -> None:
        late_us.append(clock_us() - begin_us - call.arrived_us)
        loop.submit(moved(call, call.id, offset_us), inputs.get(call.target, {}), on_end)

    for call in calls:
        timer.at(begin_us + call.arrived_us, lambda call=call: submit(call))  # type: ignore[misc]
    await asyncio.wait_for(done.wait(), 90)
    timer.close()
    loop.watch = None
    about = {
        "timers_late_p99_ms": sorted(late_us)[int(0.99 * len(late_us))] / 1000,
        "decisions_mean_us": round(statistics.mean(held_us)),
        "decisions_p99_us": sorted(held_us)[int(0.99 * len(held_us))],
        "mean_batch": round(statistics.mean(batch.size for batch in batches), 2),
    }
    return Found(told(calls, ends) | about, ends, batches)


async def measured(loop: LiveLoop, samples: Mapping[str, dict[str, Any]], largest: int, seconds: float) -> dict[str, Runs]:
    """Every batch size of every function that stands, in turns, so that a slow moment is not one size's alone."""
    aside = loop.aside
    assert isinstance(aside, Aside)
    state = loop.controller.state
    found: dict[str, Runs] = {}
    for instance in state.instances.values():
        if instance.phase is not Phase.WARM or instance.function not in samples:
            continue
        runs = found.setdefault(instance.function, {})
        mask = state.devices[instance.device].homes.get(instance.id) or (1 << instance.units) - 1
        leaves: Leaves = [(("input", name), values.encode(value)) for name, value in samples[instance.function].items()]
        ends_us = 0
        while not ends_us or clock_us() < ends_us or len(runs) < largest:
            for size in range(1, largest + 1):
                took = await aside.run(instance.id, instance.function, instance.device, mask, [leaves] * size)
                if ends_us:  # the first time round, buffers are made
                    runs.setdefault((size, mask.bit_count()), []).append(took)
            ends_us = ends_us or clock_us() + int(seconds * 1e6)
    return found


def known(loop: LiveLoop, profiles: list[Profile]) -> None:
    """The server begins anew: it believes these, and has learnt nothing yet."""
    predictor = loop.controller.predictor
    assert isinstance(predictor, online.Predictor)
    predictor.base = Table(profiles)
    predictor.forget()


def profile_of(function: str, kind: str, runs: list[Runs]) -> Profile:
    """Of several rounds together."""
    together: Runs = {}
    for one in runs:
        for place, took in one.items():
            together.setdefault(place, []).extend(took)
    times = {place: [float(one.device_us) for one in took] for place, took in together.items()}
    return Profile(function=function, device=kind, points=to_points(times), handover=_handover(together), spread=to_spread(times))


def _handover(runs: Runs) -> Handover:
    """A straight line in the batch size, through the medians of the smaller and the larger half."""
    beside = sorted((batch, statistics.median(one.wall_us - one.device_us for one in took)) for (batch, _), took in runs.items())
    if len(beside) < 2:
        return Handover(beside[0][1])
    line = statistics.linear_regression([batch for batch, _ in beside], [us for _, us in beside])
    return Handover(round(max(0.0, line.intercept), 1), round(max(0.0, line.slope), 2))
