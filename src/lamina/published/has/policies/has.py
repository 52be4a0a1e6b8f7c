"""HAS-GPU: hybrid autoscaling. First more time for the pods that stand (a change of quota, at once), then more pods.

Every two seconds, per function: the rate of calls goes through a Kalman filter; if what it predicts is above 90 % of what the
pods can do, pods get more quota in their rows, and if that is not enough, new pods come, in rows that have time left or in
new ones, least occupied device first; if it is below 30 %, quota is taken away, then pods, not more often than every ten
seconds. What a pod can do comes from the predictor: batches that are in time, one every G / quota.

Source: HAS-GPU, Euro-Par 2025 (arXiv 2505.01968) and its code. Repaired here, and as published with `compat`
(`published_autoscaler.py`): the latency goal is compared; one filter per function, without a constant five calls a second on
top; occupancy is computed in fractions, so its order and limit bind; every device can be reached; rows must fit on a device;
the smallest sufficient quota is taken, not the largest there is; scaling down stops before it goes too far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, LoadInstance, ResizeInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.has.kalman_filter import KalmanFilter
from lamina.published.has.pods import (
    FULL_QUOTA,
    PodCapacity,
    PodShape,
    PodSite,
    WindowedRates,
    budgets_us,
    candidate_devices,
    device_rows,
    free_sizes,
    live_pods,
    load_fallback_pod,
    occupancy,
    pod_shape,
    row_of_pod,
    slice_sizes,
)
from lamina.published.has.published_autoscaler import PublishedAutoscaler
from lamina.published.reserved_slices import serve_on_slices


@dataclass(slots=True)
class Policy:
    """Load predicted per function; quota first, then pods."""

    up: float = 0.9  #: of what the pods can do: above this they get more
    down: float = 0.3  #: below this they get less
    step: int = 10  #: quota, in percent
    full: float = 0.95  #: a device occupied to this part gets no more pods
    cooldown_us: int = 10_000_000  #: between two reductions
    window_us: int = 2_000_000  #: over which the rate is measured: the filter smooths it, a longer one would be late twice
    first_per_s: float = 35.0  #: what the first pod can do: the load is not known yet
    wait: float = 1.0  #: times the average wait, counted against the latency goal
    compat: bool = False  #: as published, with its defects
    period_us: int = 2_000_000
    order: Order = "arrival"
    _rates: WindowedRates = field(init=False)
    _filters: dict[str, KalmanFilter] = field(default_factory=dict, init=False)
    _reduced_us: dict[str, int] = field(default_factory=dict, init=False)
    _next_us: int = field(default=0, init=False)
    _original: PublishedAutoscaler = field(init=False)

    def __post_init__(self) -> None:
        self._rates = WindowedRates(self.window_us)
        self._original = PublishedAutoscaler(self.cooldown_us)

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from serve_on_slices(view)

    def scale(self, view: View) -> Iterator[Decision]:
        turn = view.now_us >= self._next_us
        if turn:
            self._next_us = view.now_us + self.period_us
        if self.compat:
            yield from self._original.scale(view, turn)
            return
        budget_us = budgets_us(view)
        for function in view.functions.values():
            able = self._capability(view, function, budget_us)
            if not live_pods(function):
                yield from self._first_pod(view, function, able)
            elif turn:
                yield from self._adjust(view, function, able)

    def _capability(self, view: View, function: FunctionState, budget_us: dict[str, int]) -> PodCapacity:
        """Without a goal if no device could ever meet it."""
        able = PodCapacity(view, budget_us, self.wait)
        met = any(able.meets_goal(function, d, PodShape(d.spec.units, FULL_QUOTA)) for d in _capable_devices(view, function))
        return able if met else PodCapacity(view)

    # ------------------------------------------------------------------- demand

    def _demand(self, view: View, function: FunctionState) -> float:
        """Calls a second to be ready for: what the filter predicts, and what has piled up beyond a batch."""
        kalman = self._filters.setdefault(function.spec.name, KalmanFilter())
        piled_up = max(0, len(function.queue) - function.spec.max_batch)
        return kalman.provisioned_rate(self._rates.per_s(view.now_us, function)) + piled_up * 1e6 / self.period_us

    def _first_pod(self, view: View, function: FunctionState, able: PodCapacity) -> Iterator[Decision]:
        """The first pod of a function that is called, or is to be there always."""
        wanted = function.spec.scale.min or len(function.queue)
        if wanted and view.now_us >= function.load_not_before_us:
            self._reduced_us[function.spec.name] = view.now_us + self.cooldown_us
            site = self._site(view, function, able, max(self.first_per_s, self._demand(view, function)))
            if site is not None:
                yield _load(function, site)
            else:
                yield from load_fallback_pod(view, function)

    def _adjust(self, view: View, function: FunctionState, able: PodCapacity) -> Iterator[Decision]:
        name, spec, idle_us = function.spec.name, function.spec, view.now_us - function.arrivals.last_us
        demand = self._demand(view, function)
        capacity = _total_rate(view, function, able)
        if not spec.scale.min and idle_us >= spec.scale.idle_us and not len(function.queue):
            yield from [UnloadInstance(pod.id) for pod in live_pods(function)]
        elif demand > self.up * capacity:
            for pod in sorted(live_pods(function), key=lambda pod: (-pod.units, pod.created_us, pod.id)):
                lacking = demand / self.up - _total_rate(view, function, able)
                if lacking > 0:
                    yield from self._raise_quota(view, function, able, pod, lacking)
            yield from self._scale_out(view, function, able, demand / self.up)
        elif demand < self.down * capacity and view.now_us >= self._reduced_us.get(name, 0):
            self._reduced_us[name] = view.now_us + self.cooldown_us
            yield from self._reduce(view, function, able, demand / self.up)

    # ----------------------------------------------------------------- vertical

    def _raise_quota(
        self, view: View, function: FunctionState, able: PodCapacity, pod: Instance, lacking: float
    ) -> Iterator[Decision]:
        """The smallest quota that is enough, else the best its row has left."""
        device, now = view.devices[pod.device], pod_shape(pod)
        before = able.per_s(function, device, now)
        best, best_gain = now.quota, 0.0
        for quota in range(now.quota + self.step, now.quota + row_of_pod(view, pod).quota_left + 1, self.step):
            gain = able.per_s(function, device, PodShape(now.units, quota)) - before
            if gain > best_gain:
                best, best_gain = quota, gain
            if gain >= lacking:
                break
        if best > now.quota:
            yield ResizeInstance(pod.id, now.units, best / FULL_QUOTA)

    def _reduce(self, view: View, function: FunctionState, able: PodCapacity, needed: float) -> Iterator[Decision]:
        """Less time for the small ones first, as long as what is left is enough; then whole pods that are not needed."""
        for pod in sorted(live_pods(function), key=lambda pod: (pod.units, pod.created_us, pod.id)):
            device, now = view.devices[pod.device], pod_shape(pod)
            others = _total_rate(view, function, able) - able.per_s(function, device, now)
            for quota in range(self.step, now.quota, self.step):
                reduced = able.per_s(function, device, PodShape(now.units, quota))
                if reduced > 0 and others + reduced >= needed:
                    yield ResizeInstance(pod.id, now.units, quota / FULL_QUOTA)
                    break
        for pod in sorted(live_pods(function), key=lambda pod: (pod.units, pod.quota, pod.id)):
            left = _total_rate(view, function, able) - able.per_s(function, view.devices[pod.device], pod_shape(pod))
            if len(live_pods(function)) > max(1, function.spec.scale.min) and left >= needed:
                yield UnloadInstance(pod.id)

    # --------------------------------------------------------------- horizontal

    def _scale_out(self, view: View, function: FunctionState, able: PodCapacity, needed: float) -> Iterator[Decision]:
        """New pods until it is enough, or no place is left."""
        while len(live_pods(function)) < max(1, function.spec.scale.max):
            lacking = needed - _total_rate(view, function, able)
            site = self._site(view, function, able, lacking) if lacking > 0 else None
            if site is None:
                return
            yield _load(function, site)

    def _site(self, view: View, function: FunctionState, able: PodCapacity, lacking: float) -> PodSite | None:
        """On the least occupied device in use that has a place, else on an unused one: the cheapest shape that is enough,
        or, where none is, the one that does most for what it takes."""
        occupied = [(occupancy(view, device), device.spec.id, device) for device in candidate_devices(view, function)]
        used = [(share, name, device) for share, name, device in occupied if device.homes and share < self.full]
        unused = [(share, name, device) for share, name, device in occupied if not device.homes]
        for _, _, device in (*sorted(used, key=lambda one: one[:2]), *sorted(unused, key=lambda one: one[:2])):
            sites = [(able.per_s(function, device, shape), device, shape, beside) for shape, beside in self._shapes(view, device)]
            sites = [site for site in sites if site[0] > 0]
            enough = [site for site in sites if site[0] >= lacking]
            if enough:
                _, device, shape, beside = min(enough, key=lambda site: (site[2].area, -site[0], site[3] != "", site[2]))
                return device, shape, beside
            if sites:
                _, device, shape, beside = max(sites, key=lambda site: (site[0] / site[2].area, site[0], site[2]))
                return device, shape, beside
        return None

    def _shapes(self, view: View, device: Device) -> Iterator[tuple[PodShape, str]]:
        """All that has a place on this device: time left in a row, or a row of its own."""
        for row in device_rows(view, device):
            for quota in range(self.step, row.quota_left + 1, self.step):
                yield PodShape(row.units, quota), row.pods[0].id
        for units in free_sizes(device, slice_sizes(device)):
            for quota in range(self.step, FULL_QUOTA + 1, self.step):
                yield PodShape(units, quota), ""


def _load(function: FunctionState, site: PodSite) -> LoadInstance:
    device, shape, beside = site
    return LoadInstance(function.spec.name, device.spec.id, shape.units, shape.quota / FULL_QUOTA, beside)


def _total_rate(view: View, function: FunctionState, able: PodCapacity) -> float:
    """Calls a second that its pods can do together."""
    return sum(able.per_s(function, view.devices[pod.device], pod_shape(pod)) for pod in live_pods(function))


def _capable_devices(view: View, function: FunctionState) -> list[Device]:
    return [device for device in view.devices.values() if function.spec.fits_family(device.spec.family)]
