"""Keep-alive and pre-warming, as serverless platforms have them: what stands, what goes, what comes back early.

An instance stays for as long as its function allows after its last batch. With pre-warming one that has gone is loaded
again in time for the next call, if calls come at intervals: last arrival + usual gap - time to load.
"""

from __future__ import annotations

from collections.abc import Iterator

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.state import FunctionState
from lamina.published.esg.config_tables import sample_device
from lamina.published.esg.invokers import can_run, device_to_load, home_device, home_units, make_room
from lamina.types import NEVER_US


def keep_alive(view: View, period_us: int, prewarm: bool) -> Iterator[Decision]:
    """Decisions to unload and to load; asked every `period_us`."""
    for function in view.functions.values():
        scale = function.spec.scale
        for instance in list(function.instances.values()):
            if not can_run(view.devices[instance.device], instance):
                yield UnloadInstance(instance.id)  # it only seems to stand
        standing = [one for one in function.instances.values() if one.phase in (InstancePhase.LOADING, InstancePhase.WARM)]
        idle = [
            one
            for one in standing
            if one.phase is InstancePhase.WARM
            and not one.batches
            and view.now_us - max(one.last_used_us, one.created_us) >= scale.idle_us
        ]
        for instance in idle[: max(0, len(standing) - scale.min)]:
            if not len(function.queue):
                yield UnloadInstance(instance.id)
        missing = scale.min - len(standing)
        if not standing and not missing and prewarm and _is_due(view, function, period_us):
            missing = 1
        starved = not standing and function.spec.name in view.deferred
        for _ in range(max(missing, int(starved))):
            yield from load_instance(view, function, function.queue.head().input_device if starved else "")


def load_instance(view: View, function: FunctionState, first: str = "") -> Iterator[Decision]:
    """One instance more, at its home if nothing else is said; nothing if there is no place for it now."""
    example = sample_device(view, function.spec)
    if example is None or view.now_us < function.load_not_before_us:
        return
    kind = example.spec.kind
    first = first or home_device(view, function.spec.name, kind)
    device = device_to_load(view, function, first, kind, None)
    if device is None and not function.instances:
        device = device_to_load(view, function, first, "", None)  # the wrong kind of machine is better than none
    if device is not None:
        yield from make_room(view, function, device)
        yield LoadInstance(function.spec.name, device.spec.id, home_units(function, device))


def _is_due(view: View, function: FunctionState, period_us: int) -> bool:
    """Is the next call expected before a load that is started the next time we look would be over?"""
    meter = function.arrivals
    if meter.last_us < 0 or meter.interarrival_us >= NEVER_US:
        return False
    example = sample_device(view, function.spec)
    load_us = view.predictor.load_us(function.spec.name, example.spec.kind) if example is not None else 0
    next_us = meter.last_us + int(meter.interarrival_us)
    return next_us - load_us - period_us <= view.now_us <= next_us + function.spec.scale.idle_us
