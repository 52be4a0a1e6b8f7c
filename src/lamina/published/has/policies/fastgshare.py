"""FaST-GShare: pods of the most efficient shape, packed as rectangles of time x units.

Every ten seconds, per function: if the rate of calls is above what its pods can do, the gap is filled with as many pods of
the shape with most requests per resource (RPR = requests a second / (units x quota)) as go into it, and one more of the
smallest shape that does the rest; if it is a fifth below, pods that are not needed go. A pod keeps its shape for life. Each
goes where the maximal-rectangles packing finds the tightest place.

A workflow's latency goal is split among its functions once and for all, by their average service time; a shape counts only
if its latency is within that part. A pod may use time of its row that no other pod wants, beyond its quota (`elastic`): published
pods ask for a quota and have a limit of 1. Source: FaST-GShare, ICPP 2023, its slides and its public autoscaler; the split is how
ESG (HPDC 2024) runs it as a rival. Two pods on a common unit stand on the same units, as the device shares slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.has.pods import (
    FULL_QUOTA,
    PodCapacity,
    PodShape,
    WindowedRates,
    budgets_us,
    candidate_devices,
    device_rows,
    live_pods,
    load_fallback_pod,
    pod_shape,
    slice_sizes,
)
from lamina.published.has.rectangle_packing import Rectangle, RectanglePacking
from lamina.published.reserved_slices import serve_on_slices

SHARES = (0.06, 0.12, 0.24, 0.5, 0.6, 0.8, 1.0)
"""Of a GPU, as the published profiles have them."""

QUOTAS = (20, 40, 60, 80, 100)


@dataclass(slots=True)
class Policy:
    """Horizontal scaling with the most efficient pods, packed in two dimensions."""

    tolerance: float = 0.2  #: of what the pods can do: a smaller surplus is left alone
    elastic: bool = True  #: a pod may use idle time of its row beyond its quota, as published pods with quota_limit 1 do
    period_us: int = 10_000_000
    order: Order = "arrival"
    _rates: WindowedRates = field(init=False)
    _next_us: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._rates = WindowedRates(self.period_us)

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from serve_on_slices(view, self.elastic)

    def scale(self, view: View) -> Iterator[Decision]:
        turn = view.now_us >= self._next_us
        if turn:
            self._next_us = view.now_us + self.period_us
        budget_us = budgets_us(view)
        for function in view.functions.values():
            rate = self._rates.per_s(view.now_us, function)
            wanted = function.spec.scale.min or len(function.queue)
            if turn if live_pods(function) else wanted:
                yield from self._adjust(view, function, budget_us, rate)
                yield from load_fallback_pod(view, function)

    def _adjust(self, view: View, function: FunctionState, budget_us: dict[str, int], rate: float) -> Iterator[Decision]:
        able, menu = _shape_rates(view, function, budget_us)
        have = sum(able.per_s(function, view.devices[pod.device], pod_shape(pod)) for pod in live_pods(function))
        gap = rate - have
        if not live_pods(function) or gap > 0:
            yield from self._scale_up(view, function, menu, max(gap, 0.0))
        elif -gap > self.tolerance * have:
            yield from self._scale_down(view, function, able, -gap)

    def _scale_up(
        self, view: View, function: FunctionState, menu: list[tuple[float, PodShape]], gap: float
    ) -> Iterator[Decision]:
        """The best shape, once to begin with and as often as it goes into the gap; then the smallest that does the rest."""
        if not menu or view.now_us < function.load_not_before_us:
            return
        best_rate, best = max(menu, key=lambda entry: (entry[0] / entry[1].area, entry[0]))
        times = min(int(gap // best_rate), function.spec.scale.max)
        wanted = [best] * (times if live_pods(function) else max(1, times))
        rest = gap - len(wanted) * best_rate
        if rest > 0:
            enough = [entry for entry in menu if entry[0] >= rest]
            wanted.append(min(enough, key=lambda entry: (entry[0], entry[1].area))[1] if enough else best)
        for shape in wanted[: max(0, function.spec.scale.max - len(live_pods(function)))]:
            site = _site(view, function, shape)
            if site is None:
                return
            device, beside = site
            yield LoadInstance(function.spec.name, device.spec.id, shape.units, shape.quota / FULL_QUOTA, beside)

    def _scale_down(self, view: View, function: FunctionState, able: PodCapacity, surplus: float) -> Iterator[Decision]:
        """The least efficient pods first, as long as the rest is enough."""

        def rate(pod: Instance) -> float:
            return able.per_s(function, view.devices[pod.device], pod_shape(pod))

        for pod in sorted(live_pods(function), key=lambda pod: (rate(pod) / pod_shape(pod).area, pod.id)):
            idle = not function.spec.scale.min and view.now_us - function.arrivals.last_us >= function.spec.scale.idle_us
            least = 0 if idle and not len(function.queue) else max(1, function.spec.scale.min)
            if len(live_pods(function)) > least and rate(pod) <= surplus + 1e-9:
                surplus -= rate(pod)
                yield UnloadInstance(pod.id)


def _shape_rates(
    view: View, function: FunctionState, budget_us: dict[str, int]
) -> tuple[PodCapacity, list[tuple[float, PodShape]]]:
    """Requests a second of every shape that is in time; if none is, of all: a late answer is better than none."""
    spec = function.spec
    device = next((d for d in view.devices.values() if spec.fits_family(d.spec.family)), None)
    shapes = [PodShape(units, quota) for units in _sizes(device) for quota in QUOTAS] if device else []
    menu: list[tuple[float, PodShape]] = []
    for able in (PodCapacity(view, budget_us), PodCapacity(view)):
        rates = [(able.per_s(function, device, shape), shape) for shape in shapes if device]
        menu = [entry for entry in rates if entry[0] > 0]
        if menu:
            break
    return able, menu


def _sizes(device: Device) -> list[int]:
    sizes = slice_sizes(device)
    wishes = [max(1, round(share * device.spec.units)) for share in SHARES]
    return sorted({next((size for size in sizes if size >= wish), sizes[-1]) for wish in wishes})


def _site(view: View, function: FunctionState, shape: PodShape) -> tuple[Device, str] | None:
    """The device with the tightest packing for it, fullest first, and the pod that it shares units with there."""
    found: list[tuple[float, str, Device, Rectangle]] = []
    for device in candidate_devices(view, function):
        packing = current_packing(view, device)
        place = packing.fit(shape.quota, shape.units)
        if place is not None:
            found.append((-packing.utilisation, device.spec.id, device, place))
    for _, _, device, place in sorted(found, key=lambda entry: entry[:2]):
        beside = _neighbour(view, device, place)
        if beside or device.is_valid_slice(device.unreserved_block(shape.units)):
            return device, beside
    return None


def current_packing(view: View, device: Device) -> RectanglePacking:
    """What stands on it, as rectangles: a row per standing slice, its pods from left to right."""
    packing = RectanglePacking(FULL_QUOTA, device.spec.units, aligned=True)
    for row in device_rows(view, device):
        mask = device.homes[row.pods[0].id]
        low, x = (mask & -mask).bit_length() - 1, 0
        for pod in row.pods:
            quota = pod_shape(pod).quota
            packing.occupy(pod.id, Rectangle(x, low, quota, row.units))
            x += quota
    return packing


def _neighbour(view: View, device: Device, place: Rectangle) -> str:
    """A pod on these very units, if there is one."""
    for name, mask in device.homes.items():
        if mask == ((1 << place.height) - 1) << place.y:
            return name
    return ""
