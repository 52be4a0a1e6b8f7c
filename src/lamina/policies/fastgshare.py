"""FaST-GShare: pods of the most efficient shape, packed as rectangles of time x units.

Every ten seconds, per function: if the rate of calls is above what its pods can do, the gap is filled with as many pods of
the shape with most requests per resource (RPR = requests a second / (units x quota)) as go into it, and one more of the
smallest shape that does the rest; if it is a fifth below, pods that are not needed go. A pod keeps its shape for life. Each
goes where the maximal-rectangles packing finds the tightest place.

A workflow's latency goal is split among its functions once and for all, by their average service time; a shape counts only
if its latency is within that part. Source: FaST-GShare, ICPP 2023, its slides and its public autoscaler; the split is how
ESG (HPDC 2024) runs it as a rival. Two pods on a common unit stand on the same units, as the device shares slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.lease import Device
from lamina.core.policy import Decision, LoadOn, UnloadOf, View
from lamina.core.queue import Order
from lamina.core.state import FunctionState, Instance
from lamina.planner.has.budgets import budgets_us
from lamina.planner.has.capability import WHOLE, Capability, Shape
from lamina.planner.has.rectangles import Packing, Rect
from lamina.planner.has.refuge import take_refuge
from lamina.planner.has.rows import Rates, hosts, pods_of, rows_of, shape_of, sizes_of
from lamina.planner.pods import serve

SHARES = (0.06, 0.12, 0.24, 0.5, 0.6, 0.8, 1.0)
"""Of a GPU, as the published profiles have them."""

QUOTAS = (20, 40, 60, 80, 100)


@dataclass(slots=True)
class Policy:
    """Horizontal scaling with the most efficient pods, packed in two dimensions."""

    tolerance: float = 0.2  #: of what the pods can do: a smaller surplus is left alone
    period_us: int = 10_000_000
    order: Order = "arrival"
    _rates: Rates = field(init=False)
    _next_us: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._rates = Rates(self.period_us)

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from serve(view)

    def scale(self, view: View) -> Iterator[Decision]:
        turn = view.now_us >= self._next_us
        if turn:
            self._next_us = view.now_us + self.period_us
        budget_us = budgets_us(view)
        for function in view.functions.values():
            rate = self._rates.per_s(view.now_us, function)
            wanted = function.spec.scale.min or len(function.queue)
            if turn if pods_of(function) else wanted:
                yield from self._adjust(view, function, budget_us, rate)
                yield from take_refuge(view, function)

    def _adjust(self, view: View, function: FunctionState, budget_us: dict[str, int], rate: float) -> Iterator[Decision]:
        able, menu = _menu(view, function, budget_us)
        have = sum(able.per_s(function, view.devices[pod.device], shape_of(pod)) for pod in pods_of(function))
        gap = rate - have
        if not pods_of(function) or gap > 0:
            yield from self._more(view, function, menu, max(gap, 0.0))
        elif -gap > self.tolerance * have:
            yield from self._less(view, function, able, -gap)

    def _more(self, view: View, function: FunctionState, menu: list[tuple[float, Shape]], gap: float) -> Iterator[Decision]:
        """The best shape, once to begin with and as often as it goes into the gap; then the smallest that does the rest."""
        if not menu or view.now_us < function.not_before_us:
            return
        best_rate, best = max(menu, key=lambda entry: (entry[0] / entry[1].area, entry[0]))
        times = min(int(gap // best_rate), function.spec.scale.max)
        wanted = [best] * (times if pods_of(function) else max(1, times))
        rest = gap - len(wanted) * best_rate
        if rest > 0:
            enough = [entry for entry in menu if entry[0] >= rest]
            wanted.append(min(enough, key=lambda entry: (entry[0], entry[1].area))[1] if enough else best)
        for shape in wanted[: max(0, function.spec.scale.max - len(pods_of(function)))]:
            site = _site(view, function, shape)
            if site is None:
                return
            device, beside = site
            yield LoadOn(function.spec.name, device.spec.id, shape.units, shape.quota / WHOLE, beside)

    def _less(self, view: View, function: FunctionState, able: Capability, surplus: float) -> Iterator[Decision]:
        """The least efficient pods first, as long as the rest is enough."""

        def rate(pod: Instance) -> float:
            return able.per_s(function, view.devices[pod.device], shape_of(pod))

        for pod in sorted(pods_of(function), key=lambda pod: (rate(pod) / shape_of(pod).area, pod.id)):
            idle = not function.spec.scale.min and view.now_us - function.meter.last_us >= function.spec.scale.idle_us
            least = 0 if idle and not len(function.queue) else max(1, function.spec.scale.min)
            if len(pods_of(function)) > least and rate(pod) <= surplus + 1e-9:
                surplus -= rate(pod)
                yield UnloadOf(pod.id)


def _menu(view: View, function: FunctionState, budget_us: dict[str, int]) -> tuple[Capability, list[tuple[float, Shape]]]:
    """Requests a second of every shape that is in time; if none is, of all: a late answer is better than none."""
    spec = function.spec
    device = next((d for d in view.devices.values() if spec.fits_family(d.spec.family)), None)
    shapes = [Shape(units, quota) for units in _sizes(device) for quota in QUOTAS] if device else []
    menu: list[tuple[float, Shape]] = []
    for able in (Capability(view, budget_us), Capability(view)):
        rates = [(able.per_s(function, device, shape), shape) for shape in shapes if device]
        menu = [entry for entry in rates if entry[0] > 0]
        if menu:
            break
    return able, menu


def _sizes(device: Device) -> list[int]:
    sizes = sizes_of(device)
    wishes = [max(1, round(share * device.spec.units)) for share in SHARES]
    return sorted({next((size for size in sizes if size >= wish), sizes[-1]) for wish in wishes})


def _site(view: View, function: FunctionState, shape: Shape) -> tuple[Device, str] | None:
    """The device with the tightest packing for it, fullest first, and the pod that it shares units with there."""
    found: list[tuple[float, str, Device, Rect]] = []
    for device in hosts(view, function):
        packing = packed(view, device)
        place = packing.fit(shape.quota, shape.units)
        if place is not None:
            found.append((-packing.used, device.spec.id, device, place))
    for _, _, device, place in sorted(found, key=lambda entry: entry[:2]):
        beside = _neighbour(view, device, place)
        if beside or device.allows(device.spare(shape.units)):
            return device, beside
    return None


def packed(view: View, device: Device) -> Packing:
    """What stands on it, as rectangles: a row per standing slice, its pods from left to right."""
    packing = Packing(WHOLE, device.spec.units, aligned=True)
    for row in rows_of(view, device):
        mask = device.homes[row.pods[0].id]
        low, x = (mask & -mask).bit_length() - 1, 0
        for pod in row.pods:
            quota = shape_of(pod).quota
            packing.take(pod.id, Rect(x, low, quota, row.units))
            x += quota
    return packing


def _neighbour(view: View, device: Device, place: Rect) -> str:
    """A pod on these very units, if there is one."""
    for name, mask in device.homes.items():
        if mask == ((1 << place.height) - 1) << place.y:
            return name
    return ""
