"""Fallback pod: a function with work and no pod gets the slice its author asked for, or what there is.

A planner finds nothing for a function without a profile, nor where every slice is taken or no device has the size it likes
best. None of these is a reason to let calls wait until they are late. Pods that are not needed are evicted for it, even
those that should always be there: they come back when there is room again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.has.pod_capacity import FULL_QUOTA, PodShape
from lamina.published.has.pod_rows import live_pods, pod_quota, slice_sizes

MIN_QUOTA = 10
"""Percent of the time on a row: with less of it, it would not count as served."""

PodSite = tuple[Device, PodShape, str]
"""Where a new pod could go: device, shape, and the pod whose row it shares ("" for a row of its own)."""


def load_fallback_pod(view: View, function: FunctionState) -> Iterator[Decision]:
    """One pod if it has none and has work, or must always be there; nothing if there is no place even without pods that are
    not needed, which are evicted for work alone."""
    wanted = function.spec.scale.min or len(function.queue)
    if not wanted or live_pods(function) or view.now_us < function.load_not_before_us:
        return
    site = _find_site(view, function)
    if site is None and len(function.queue):
        yield from _make_room(view, function)
        site = _find_site(view, function)
    if site is not None:
        device, shape, beside = site
        yield LoadInstance(function.spec.name, device.spec.id, shape.units, shape.quota / FULL_QUOTA, beside)


def _find_site(view: View, function: FunctionState) -> PodSite | None:
    """A row of its own, as large as it asks for, else nearly so; else the most time that any row has left."""
    found = [site for device in view.devices.values() if (site := _site_on(view, function, device, {}))]
    return min(
        found, key=lambda site: (site[2] != "", site[0].spec.family != "gpu", -site[1].area, site[0].spec.id), default=None
    )


def _site_on(view: View, function: FunctionState, device: Device, going: dict[str, int]) -> PodSite | None:
    """On this device, were the pods `going` (with their memory) gone."""
    spec = function.spec
    memory_mib = device.memory_used_mib - sum(going.values()) + spec.memory_mib
    if not spec.fits_family(device.spec.family) or memory_mib > device.spec.memory_mib:
        return None
    wish = spec.units_on(device.spec)
    own = [size for size in slice_sizes(device) if device.is_valid_slice(device.unreserved_block(size, going))]
    if own:
        return device, PodShape(min(own, key=lambda size: (size < wish, abs(size - wish))), FULL_QUOTA), ""
    left = _time_left(view, device, going)
    beside = max(left, key=lambda pod: (left[pod], pod), default="")
    return (device, PodShape(view.instances[beside].units, left[beside]), beside) if beside else None


def _time_left(view: View, device: Device, going: Container[str]) -> dict[str, int]:
    """Free quota by the first pod of each row, where it is worth having."""
    rows: dict[int, list[Instance]] = {}
    for name, mask in device.homes.items():
        if name not in going:
            rows.setdefault(mask, []).append(view.instances[name])
    left = {pods[0].id: FULL_QUOTA - sum(pod_quota(pod) for pod in pods) for pods in rows.values()}
    return {pod: quota for pod, quota in left.items() if quota >= MIN_QUOTA}


def _make_room(view: View, function: FunctionState) -> Iterator[Decision]:
    """Pods without work go, those above what is to stand always first, then the longest unused; no more than it takes."""

    def worth(pod: Instance) -> tuple[bool, int, str]:
        owner = view.functions[pod.function]
        return len(live_pods(owner)) <= owner.spec.scale.min, max(pod.last_used_us, pod.created_us), pod.id

    for device in view.devices.values():
        going: dict[str, int] = {}
        for pod in sorted((view.instances[name] for name in device.instances), key=worth):
            if pod.phase is InstancePhase.WARM and not pod.batches and not len(view.functions[pod.function].queue):
                going[pod.id] = pod.memory_mib
                if _site_on(view, function, device, going) is not None:
                    yield from [UnloadInstance(name) for name in going]
                    return
