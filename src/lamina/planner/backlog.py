"""When would a job that arrives now be done? From the queue and the running batches alone, in constant time."""

from __future__ import annotations

from lamina.core.lifecycle import Phase
from lamina.core.policy import View
from lamina.core.state import FunctionState


def finish_in_us(view: View, function: FunctionState, count: int = 1) -> int:
    """Time until `count` jobs joining the queue now would be done; 0 if nobody knows yet how long they take."""
    spec = function.spec
    ahead = len(function.queue) + count
    lanes = 0
    batch_us = solo_us = 0
    free_in_us = -1
    for instance in function.instances.values():
        device = view.devices[instance.device]
        units = instance.units
        if not batch_us:
            batch_us = view.latency_us(spec.name, device, spec.max_batch, units)
            if not batch_us:
                return 0
            solo_us = view.latency_us(spec.name, device, min(ahead, spec.max_batch), units)
        if instance.phase is Phase.LOADING:
            load_us = view.predictor.load_us(spec.name, device.spec.kind)
            soonest = max(0, instance.since_us + load_us - view.now_us)
            lanes += 1
        elif instance.phase is Phase.WARM:
            limit = device.spec.limits.batches_per_instance
            lanes += min(limit, device.spec.units // units) if limit else device.spec.units // units
            soonest = _free_in_us(view, device.running, units, device.open_to(instance.id).bit_count())
            for batch in instance.batches.values():
                if limit:
                    soonest = max(soonest, batch.ends_us - view.now_us)
        else:
            continue
        free_in_us = soonest if free_in_us < 0 else min(free_in_us, soonest)
    if not lanes:
        kinds = {device.spec.kind for device in view.devices.values() if spec.fits_family(device.spec.family)}
        loads = [view.predictor.load_us(spec.name, kind) for kind in kinds]
        times = [
            view.latency_us(spec.name, device, min(ahead, spec.max_batch), spec.units_on(device.spec))
            for device in view.devices.values()
            if device.spec.kind in kinds
        ]
        if not times or not min(times):
            return 0
        return min(loads) + min(times) * -(-ahead // spec.max_batch)
    full_rounds, rest = divmod(ahead - 1, spec.max_batch * lanes)
    last_us = solo_us if full_rounds == 0 and rest < spec.max_batch else batch_us
    return max(0, free_in_us) + full_rounds * batch_us + last_us


def _free_in_us(view: View, running: dict[int, int], units: int, free_units: int) -> int:
    """Until enough units of the device are free, were nothing else to start on it."""
    if free_units >= units:
        return 0
    ends = sorted((view.batches[batch_id].ends_us, mask.bit_count()) for batch_id, mask in running.items())
    for ends_us, count in ends:
        free_units += count
        if free_units >= units:
            return max(0, ends_us - view.now_us)
    return 0
