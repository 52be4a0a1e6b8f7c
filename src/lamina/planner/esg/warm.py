"""Keep-alive and pre-warming, as serverless platforms have them: what stands, what goes, what comes back early.

An instance stays for as long as its function allows after its last batch. With pre-warming one that has gone is loaded
again in time for the next call, if calls come at intervals: last arrival + usual gap - time to load.
"""

from __future__ import annotations

from collections.abc import Iterator

from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, LoadOn, UnloadOf, View
from lamina.core.state import FunctionState
from lamina.planner.esg.invokers import can_run, home, home_units, loadable, make_room
from lamina.planner.esg.tables import machine
from lamina.types import NEVER_US


def keep_alive(view: View, period_us: int, prewarm: bool) -> Iterator[Decision]:
    """Decisions to unload and to load; asked every `period_us`."""
    for function in view.functions.values():
        scale = function.spec.scale
        for instance in list(function.instances.values()):
            if not can_run(view.devices[instance.device], instance):
                yield UnloadOf(instance.id)  # it only seems to stand
        standing = [one for one in function.instances.values() if one.phase in (Phase.LOADING, Phase.WARM)]
        idle = [
            one
            for one in standing
            if one.phase is Phase.WARM and not one.batches and view.now_us - max(one.used_us, one.since_us) >= scale.idle_us
        ]
        for instance in idle[: max(0, len(standing) - scale.min)]:
            if not len(function.queue):
                yield UnloadOf(instance.id)
        missing = scale.min - len(standing)
        if not standing and not missing and prewarm and _due(view, function, period_us):
            missing = 1
        starved = not standing and function.spec.name in view.held
        for _ in range(max(missing, int(starved))):
            yield from bring_up(view, function, function.queue.head().at if starved else "")


def bring_up(view: View, function: FunctionState, first: str = "") -> Iterator[Decision]:
    """One instance more, at its home if nothing else is said; nothing if there is no place for it now."""
    example = machine(view, function.spec)
    if example is None or view.now_us < function.not_before_us:
        return
    kind = example.spec.kind
    first = first or home(view, function.spec.name, kind)
    device = loadable(view, function, first, kind, None)
    if device is None and not function.instances:
        device = loadable(view, function, first, "", None)  # the wrong kind of machine is better than none
    if device is not None:
        yield from make_room(view, function, device)
        yield LoadOn(function.spec.name, device.spec.id, home_units(function, device))


def _due(view: View, function: FunctionState, period_us: int) -> bool:
    """Is the next call expected before a load that is started the next time we look would be over?"""
    meter = function.meter
    if meter.last_us < 0 or meter.gap_us >= NEVER_US:
        return False
    example = machine(view, function.spec)
    load_us = view.predictor.load_us(function.spec.name, example.spec.kind) if example is not None else 0
    next_us = meter.last_us + int(meter.gap_us)
    return next_us - load_us - period_us <= view.now_us <= next_us + function.spec.scale.idle_us
