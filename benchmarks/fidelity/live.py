"""Calls on the clock on the wall, and measurements of the functions on the very engine that serves them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.fidelity.cases import moved, told
from benchmarks.fidelity.host import Beat, Host
from lamina import encoding
from lamina.bootstrap import ServingRuntime
from lamina.core.actions import Action, StartBatch
from lamina.core.events import BatchFinished, Event
from lamina.core.lifecycle import InstancePhase
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.shadow_batches import BatchTiming, Leaves
from lamina.ipc.event_loop import Timer, clock_us
from lamina.predict import online
from lamina.predict.profile import Handover, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.build_profile import fit_handover, to_points, to_spread
from lamina.types import Call

Runs = dict[tuple[int, int], list[BatchTiming]]
"""By batch and units."""


class Batch(NamedTuple):
    """One batch of a live run; times on the clock of the calls."""

    function: str
    size: int
    begun_us: int
    ended_us: int
    device_us: int
    booked: bool


class Found(NamedTuple):
    told: dict[str, Any]
    calls: list[Call]  #: when they really came: how late the generator was is no matter of the server's
    ends: list[Ending]
    batches: list[Batch]
    host: Host


async def served(loop: RealtimeDriver, calls: list[Call], inputs: Mapping[str, dict[str, bytes]]) -> Found:
    """All of them to their end; the loop has started."""
    ends: list[Ending] = []
    done, late_us = asyncio.Event(), list[int]()
    open_: dict[int, tuple[int, StartBatch]] = {}
    batches: list[Batch] = []
    held_us: list[int] = []
    came: list[Call] = []

    def on_end(end: Ending) -> None:
        ends.append(end)
        if len(ends) == len(calls):
            done.set()

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        held_us.append(loop.decision_us)
        if isinstance(event, BatchFinished) and event.batch_id in open_:
            begun_us, start = open_.pop(event.batch_id)
            begun_us, ended_us = begun_us - offset_us, now_us - offset_us
            batches.append(Batch(start.function, len(start.jobs), begun_us, ended_us, event.device_us, bool(start.behind)))
        for action in actions:
            if isinstance(action, StartBatch):
                open_[action.batch_id] = (now_us, action)

    loop.add_observer(watch)
    timer = Timer(asyncio.get_running_loop())
    begin_us, offset_us = clock_us() + 10_000, loop.now_us() + 10_000

    def submit(call: Call) -> None:
        late_us.append(clock_us() - begin_us - call.arrived_us)
        came.append(moved(call, call.id, late_us[-1]))
        loop.submit(moved(came[-1], call.id, offset_us), inputs.get(call.target, {}), on_end)

    for call in calls:
        timer.call_at(begin_us + call.arrived_us, lambda call=call: submit(call))  # type: ignore[misc]
    beat = Beat(timer, begin_us)
    beat.start()
    await asyncio.wait_for(done.wait(), 90)
    timer.close()
    loop.remove_observer(watch)
    host = beat.host()
    about = {
        "timers_late_p99_ms": sorted(late_us)[int(0.99 * len(late_us))] / 1000,
        "away_ms": round(sum(until_us - since_us for since_us, until_us in host.away) / 1000, 1),
        "decisions_mean_us": round(statistics.mean(held_us)),
        "decisions_p99_us": sorted(held_us)[int(0.99 * len(held_us))],
        "mean_batch": round(statistics.mean(batch.size for batch in batches), 2),
    }
    return Found(told(came, ends) | about, came, ends, batches, host)


async def measured(live: ServingRuntime, samples: Mapping[str, dict[str, Any]], largest: int, seconds: float) -> dict[str, Runs]:
    """Every batch size of every function that stands, in turns, so that a slow moment is not one size's alone."""
    found: dict[str, Runs] = {}
    for name, body in samples.items():
        place, runs, ends_us = _Place(live, name, body), found.setdefault(name, {}), 0
        while not ends_us or clock_us() < ends_us or len(runs) < largest:
            for size in range(1, largest + 1):
                took = await place.run(size)
                if ends_us:  # the first time round, buffers are made
                    runs.setdefault((size, place.mask.bit_count()), []).append(took)
            ends_us = ends_us or clock_us() + int(seconds * 1e6)
    return found


async def in_company(
    live: ServingRuntime, samples: Mapping[str, dict[str, Any]], sizes: Sequence[int], count: int
) -> dict[str, dict[int, list[float]]]:
    """How many times longer a batch takes beside one busy neighbour, beside two, and so on, by its size: medians over those
    alone. Neighbours are not felt while they hand over between their batches of the largest size; as if they never did.
    """
    stands = {name: _Place(live, name, body) for name, body in samples.items()}
    found: dict[str, dict[int, list[float]]] = {}
    for name, place in stands.items():
        others = [other for other in stands if other != name]
        alone_us = {size: await place.median_us(size, count) for size in sizes}
        for busy in range(1, len(others) + 1):
            over, duties = asyncio.Event(), list[float]()
            tasks = [asyncio.create_task(stands[other].keep_busy(max(sizes), over, duties)) for other in others[:busy]]
            slower = {size: await place.median_us(size, count) / alone_us[size] for size in sizes}
            over.set()
            await asyncio.gather(*tasks)
            duty = statistics.mean(duties)
            for size, ratio in slower.items():
                lost = min(0.9, max(0.0, 1 - 1 / ratio) / duty)  # of its pace, while they are on
                found.setdefault(name, {}).setdefault(size, []).append(round(1 / (1 - lost), 4))
    return found


class _Place:
    """An instance, where it stands."""

    def __init__(self, live: ServingRuntime, name: str, body: dict[str, Any]) -> None:
        assert live.shadow_runner is not None
        state = live.driver.controller.state
        self.shadow_runner = live.shadow_runner
        self.instance = next(one for one in state.instances.values() if one.function == name and one.phase is InstancePhase.WARM)
        self.mask = state.devices[self.instance.device].homes.get(self.instance.id) or (1 << self.instance.units) - 1
        self.leaves: Leaves = [(("input", key), encoding.encode(value)) for key, value in body.items()]

    async def run(self, size: int) -> BatchTiming:
        one = self.instance
        return await self.shadow_runner.run(one.id, one.function, one.device, self.mask, [self.leaves] * size)

    async def median_us(self, size: int, count: int) -> float:
        await self.run(size)
        return statistics.median([(await self.run(size)).device_us for _ in range(count)])

    async def keep_busy(self, size: int, over: asyncio.Event, duties: list[float]) -> None:
        """Says what part of the time it was on its slice."""
        begun_us, on_us = clock_us(), 0
        while not over.is_set():
            on_us += (await self.run(size)).device_us
        duties.append(on_us / (clock_us() - begun_us))


def known(loop: RealtimeDriver, profiles: list[Profile]) -> None:
    """The server begins anew: it believes these, and has learnt nothing yet."""
    predictor = loop.controller.predictor
    assert isinstance(predictor, online.OnlinePredictor)
    predictor.base = ProfileTable(profiles)
    predictor.reset()


def profile_of(function: str, kind: str, runs: list[Runs], seen: Handover | None = None) -> Profile:
    """Of several rounds together. `seen`: the way there and back in service, which has more to do than hand over."""
    together: Runs = {}
    for one in runs:
        for place, took in one.items():
            together.setdefault(place, []).extend(took)
    times = {place: [float(one.device_us) for one in took] for place, took in together.items()}
    return Profile(
        function=function,
        device=kind,
        points=to_points(times),
        handover=seen
        or fit_handover([(batch, one.wall_us - one.device_us) for (batch, _), took in together.items() for one in took]),
        spread=to_spread(times),
    )


def handovers(batches: list[Batch]) -> dict[str, Handover]:
    """By function: from the decision to start a batch until its results were back, less its time on the slice."""
    found: dict[str, list[tuple[int, float]]] = {}
    for one in batches:
        if not one.booked:
            found.setdefault(one.function, []).append((one.size, one.ended_us - one.begun_us - one.device_us))
    return {name: line for name, seen in found.items() if (line := fit_handover(seen)) is not None}
