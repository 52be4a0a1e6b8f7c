"""Pods: instances with a standing slice of `units` and a `quota` of its time; rows, capacity, SLO budgets, fallback.

Rows. All pods of a row stand on the same units (the published word is SM alignment), so a row is full when their quotas add up
to the whole time, and a device is full when its rows add up to all units. Read off the state each time it is asked for: there
is no second book to keep, so a lost pod or device cannot put it out of step. Quotas are whole percent points: they are counted
in steps, and sums of them must come out even.

Capacity. A batch of b runs for G(b, units); then its pod owes that time and earns it back at the rate of its quota. So batches
follow each other every L = G / quota, which is the time to plan a request with, and b / L is the throughput. A request also waits
for its turn: on average rho / (2 (1 - rho)) periods of a pod that is busy for a part rho of the time (random arrivals, equal
service times). To keep the goal, pods must be idle enough for that: with room for s periods between L and the goal, and a tail
`wait` times the average, rho may be 2 s / (wait + 2 s). Batches of several form only behind one that is running, and wait for it:
those need room for a whole period more. The capacity is b / L times rho, for the batch where it is largest.

Budgets. Autoscalers that know nothing of workflows serve them by a fixed split of the SLO, by how long steps take. A function in
several workflows gets the smallest of its parts. What is left over by one step is not given to the next: that is the weakness
of any fixed split.

Fallback. A planner finds nothing for a function without a profile, nor where every slice is taken or no device has the size it
likes best. None of these is a reason to let calls wait until they are late. Pods that are not needed are evicted for it, even
those that should always be there: they come back when there is room again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.workflow.flow import Flow


@dataclass(frozen=True, slots=True)
class PodRow:
    units: int
    pods: tuple[Instance, ...]

    @property
    def quota_left(self) -> int:
        return FULL_QUOTA - sum(pod_quota(pod) for pod in self.pods)


def pod_quota(pod: Instance) -> int:
    return round(pod.quota * FULL_QUOTA)


def pod_shape(pod: Instance) -> PodShape:
    return PodShape(pod.units, pod_quota(pod))


def live_pods(function: FunctionState) -> list[Instance]:
    """Pods that serve, or will."""
    return [pod for pod in function.instances.values() if pod.phase in (InstancePhase.LOADING, InstancePhase.WARM)]


def device_rows(view: View, device: Device) -> list[PodRow]:
    by_mask: dict[int, list[Instance]] = {}
    for instance, mask in device.homes.items():
        by_mask.setdefault(mask, []).append(view.instances[instance])
    return [PodRow(mask.bit_count(), tuple(pods)) for mask, pods in sorted(by_mask.items())]


def row_of_pod(view: View, pod: Instance) -> PodRow:
    """The row this pod stands in."""
    device = view.devices[pod.device]
    home = device.homes[pod.id]
    return PodRow(home.bit_count(), tuple(view.instances[name] for name, mask in device.homes.items() if mask == home))


def occupancy(view: View, device: Device) -> float:
    """Part of the device that is given away: units x time, summed over its pods."""
    area = sum(pod_shape(pod).area for row in device_rows(view, device) for pod in row.pods)
    return area / (device.spec.units * FULL_QUOTA)


def slice_sizes(device: Device) -> list[int]:
    """Unit counts a slice may have here."""
    return sorted(size for size in (device.spec.limits.sizes or range(1, device.spec.units + 1)) if size <= device.spec.units)


def has_memory(function: FunctionState, device: Device) -> bool:
    return device.memory_used_mib + function.spec.memory_mib <= device.spec.memory_mib


def candidate_devices(view: View, function: FunctionState) -> list[Device]:
    """Devices it may be loaded on as far as family and memory go."""
    spec = function.spec
    return [d for d in view.devices.values() if spec.fits_family(d.spec.family) and has_memory(function, d)]


def free_sizes(device: Device, sizes: Iterable[int]) -> list[int]:
    """Sizes for which there is a free block."""
    return [size for size in sizes if device.unreserved_block(size)]


@dataclass(slots=True)
class WindowedRates:
    """Calls a second per function, over a sliding window."""

    window_us: int
    _samples: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def per_s(self, now_us: int, function: FunctionState) -> float:
        marks = self._samples.setdefault(function.spec.name, deque([(now_us, function.arrivals.count)]))
        if marks[-1][0] < now_us:
            marks.append((now_us, function.arrivals.count))
        while len(marks) > 2 and marks[1][0] <= now_us - self.window_us:
            marks.popleft()
        since_us, count = marks[0]
        return (function.arrivals.count - count) * 1e6 / (now_us - since_us) if now_us > since_us else 0.0


# ------------------------------------------------------------------------------------------ capacity


FULL_QUOTA = 100

MIN_BUSY = 0.1
"""However tight the goal: no more pods than ten times the load are kept for it."""


@dataclass(frozen=True, slots=True, order=True)
class PodShape:
    """Shape of a pod: how many units, and which part of the time, in percent."""

    units: int
    quota: int

    @property
    def area(self) -> int:
        """What it costs to keep."""
        return self.units * self.quota


@dataclass(slots=True)
class PodCapacity:
    """Requests a second of a pod. `wait`: how far above the average wait to plan; 0 leaves waiting out."""

    view: View
    budget_us: dict[str, int] = field(default_factory=dict)  #: latency goal per function; 0 or missing: none
    wait: float = 0.0

    def per_s(self, function: FunctionState, device: Device, shape: PodShape) -> float:
        """Requests a second; 0 if the batch time is unknown, or if no batch is in time."""
        return self._best(function, device, shape)[0]

    def best_batch(self, function: FunctionState, device: Device, shape: PodShape) -> int:
        return self._best(function, device, shape)[1]

    def latency_us(self, function: FunctionState, device: Device, batch: int, shape: PodShape) -> float:
        """Of a batch of this size, at this part of the time."""
        alone_us = self.view.latency_us(function.spec.name, device, batch, shape.units)
        return alone_us * FULL_QUOTA / shape.quota

    def meets_goal(self, function: FunctionState, device: Device, shape: PodShape) -> bool:
        return self._best(function, device, shape)[1] > 0

    def _best(self, function: FunctionState, device: Device, shape: PodShape) -> tuple[float, int]:
        goal_us = self.budget_us.get(function.spec.name, 0)
        best, best_batch = 0.0, 0
        for batch in range(1, function.spec.max_batch + 1):
            period_us = self.latency_us(function, device, batch, shape)
            periods = 2 if batch > 1 and self.wait else 1
            if not period_us or (goal_us and periods * period_us > goal_us):
                break  # a larger batch is never faster
            per_us = batch / period_us * (self._busy(goal_us / period_us - 1) if goal_us else 1.0)
            if per_us > best:
                best, best_batch = per_us, batch
        return best * 1e6, best_batch

    def _busy(self, slack: float) -> float:
        """Part of the time a pod may be busy, with so many periods between one period and the goal."""
        return max(MIN_BUSY, 2 * slack / (self.wait + 2 * slack)) if self.wait else 1.0


# --------------------------------------------------------------------------------------- SLO budgets


def budgets_us(view: View) -> dict[str, int]:
    """Per function; those without any goal are left out."""
    parts: dict[str, int] = {}
    means: dict[str, float] = {}

    def mean_us(name: str) -> int:
        if name not in means:
            means[name] = average_latency_us(view, view.functions[name])
        return round(means[name])

    for flow in view.flows.values():
        if flow.slo.latency_us:
            for name, part_us in _split(flow, mean_us).items():
                parts[name] = min(parts.get(name, part_us), part_us)
    return parts


def _split(flow: Flow, mean_us: Callable[[str], int]) -> dict[str, int]:
    if flow.sole_task is not None:
        return {flow.sole_task.function: flow.slo.latency_us}
    path_us = max((flow.path_us(first, mean_us) for first in flow.start), default=0)
    return {name: int(flow.slo.latency_us * mean_us(name) / path_us) for name in flow.functions} if path_us else {}


def average_latency_us(view: View, function: FunctionState) -> float:
    """Of one request alone, over all sizes of slices there are for it."""
    times = [
        view.latency_us(function.spec.name, device, 1, units)
        for device in view.devices.values()
        if function.spec.fits_family(device.spec.family)
        for units in (device.spec.limits.sizes or range(1, device.spec.units + 1))
    ]
    return sum(times) / len(times) if times else 0.0


# -------------------------------------------------------------------------------------- fallback pod


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
