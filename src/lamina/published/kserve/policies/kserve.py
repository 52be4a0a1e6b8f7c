"""KServe on Knative: a target of requests in flight per pod, whole GPUs, nothing shared.

Every two seconds the mean number of requests in flight over the last minute, divided by the target, gives the number of
pods. If the last six seconds alone would ask for twice as many as are ready, it panics: for a minute it follows the short
window and takes nothing away. After a minute without a request, and some grace, the last pod goes. It knows neither how
long a request takes nor how long it may take.

Source: the Knative Pod Autoscaler as its documentation describes it, with its default constants.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, RequestDevice, ReturnDevice, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.reserved_slices import serve_on_slices
from lamina.types import NEVER_US

RETRY_US = 60_000_000
"""A device that was asked for and has not come by then will not come."""


MIN_WINDOW_US = 50_000
"""Between two samples: it is asked more often than it need look."""


@dataclass(slots=True)
class _InFlightWindow:
    """Requests in flight of one function over the last minute."""

    panic_until_us: int = 0
    most: int = 0  #: pods asked for during this panic
    zero_since_us: int = NEVER_US
    _at_us: list[int] = field(default_factory=list)
    _sums: list[int] = field(default_factory=lambda: [0])  #: of all samples before each, so that a mean is two look-ups

    def add(self, now_us: int, in_flight: int, window_us: int) -> None:
        if self._at_us and now_us - self._at_us[-1] < MIN_WINDOW_US:
            return
        self._at_us.append(now_us)
        self._sums.append(self._sums[-1] + in_flight)
        if len(self._at_us) > 4_096:
            old = bisect_right(self._at_us, now_us - window_us)
            del self._at_us[:old], self._sums[:old]

    def mean(self, since_us: int) -> float:
        first = bisect_right(self._at_us, since_us)
        count = len(self._at_us) - first
        return (self._sums[-1] - self._sums[first]) / count if count else 0.0


@dataclass(slots=True)
class Policy:
    """Pods on whole GPUs, as many as there are requests in flight for."""

    concurrency: float = 0.0  #: requests in flight that one pod is to have; 0: as many as go into a batch
    utilisation: float = 0.7  #: part of that to aim for
    stable_us: int = 60_000_000
    panic_us: int = 6_000_000
    panic_at: float = 2.0  #: times the pods that are ready
    grace_us: int = 30_000_000  #: from nothing in flight for a whole window to no pod
    tick_us: int = 2_000_000
    period_us: int = 97_000  #: of looking; not a round number, as loads often are, or it would always see the same moment
    order: Order = "arrival"
    _windows: dict[str, _InFlightWindow] = field(default_factory=dict, init=False)
    _known: set[str] = field(default_factory=set, init=False)  #: devices seen
    _requested: set[str] = field(default_factory=set, init=False)  #: of these, those that came because they were asked for
    _next_us: int = field(default=0, init=False)
    _asked_us: list[int] = field(default_factory=list, init=False)  #: for devices that have not come yet

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from serve_on_slices(view)

    def scale(self, view: View) -> Iterator[Decision]:
        now_us = view.now_us
        self._can_add(view)
        for name, function in view.functions.items():
            watch = self._windows.setdefault(name, _InFlightWindow())
            watch.add(now_us, in_flight(function), self.stable_us)
        turn = now_us >= self._next_us
        if turn:
            self._next_us = now_us + self.tick_us
        missing = 0
        for function in view.functions.values():
            pods = [i for i in function.instances.values() if i.phase in (InstancePhase.LOADING, InstancePhase.WARM)]
            short = len(pods) < max(function.spec.scale.min, len(function.queue) > 0)
            if turn or short:
                missing += yield from self._adjust(view, function, pods)
        if turn:
            yield from self._devices(view, missing)

    def _adjust(self, view: View, function: FunctionState, pods: list[Instance]) -> Generator[Decision, None, int]:
        """As many pods as are wanted; returns how many found no place."""
        want = self._wanted(view.now_us, function, pods)
        for pod in sorted(pods, key=lambda pod: (len(pod.batches), -pod.created_us))[: max(0, len(pods) - want)]:
            yield UnloadInstance(pod.id)
        lacking = want - len(pods)
        while lacking > 0 and view.now_us >= function.load_not_before_us:
            place = _find_device(view, function)
            if place is None:
                break
            yield LoadInstance(function.spec.name, place.spec.id, _all_units(function, place))
            lacking -= 1
        return max(0, lacking)

    def _wanted(self, now_us: int, function: FunctionState, pods: list[Instance]) -> int:
        scale, watch = function.spec.scale, self._windows[function.spec.name]
        target = (self.concurrency or function.spec.max_batch) * self.utilisation
        ready = sum(pod.phase is InstancePhase.WARM for pod in pods)
        stable = math.ceil(watch.mean(now_us - self.stable_us) / target)
        panic = math.ceil(watch.mean(now_us - self.panic_us) / target)
        if panic >= self.panic_at * max(1, ready):
            if now_us >= watch.panic_until_us:
                watch.most = 0
            watch.panic_until_us = now_us + self.stable_us
        want = max(stable, len(pods) // 2)  # half of them go at a time, no more
        if now_us < watch.panic_until_us:
            want = watch.most = max(watch.most, panic, ready)
        watch.zero_since_us = NEVER_US if stable or len(function.queue) else min(watch.zero_since_us, now_us)
        if not want and (pods or len(function.queue)) and now_us - watch.zero_since_us < self.grace_us:
            want = 1
        return max(scale.min, min(scale.max, want))

    def _can_add(self, view: View) -> None:
        for device in sorted(view.devices.keys() - self._known):
            self._known.add(device)
            if self._asked_us:
                self._asked_us.pop(0)
                self._requested.add(device)

    def _devices(self, view: View, missing: int) -> Iterator[Decision]:
        """Ask for what is missing, once each; give back what was asked for and stands empty."""
        self._asked_us = [at_us for at_us in self._asked_us if view.now_us - at_us < RETRY_US]
        kinds = sorted({device.spec.kind for device in view.devices.values() if device.spec.family == "gpu"})
        for _ in range(missing - len(self._asked_us) if kinds else 0):
            self._asked_us.append(view.now_us)
            yield RequestDevice(kinds[0])
        if not missing:
            for name in sorted(self._requested & view.devices.keys()):
                if not view.devices[name].instances:
                    self._requested.discard(name)
                    self._known.discard(name)
                    yield ReturnDevice(name)


def in_flight(function: FunctionState) -> int:
    """Requests that wait or run."""
    running = sum(len(batch.jobs) for instance in function.instances.values() for batch in instance.batches.values())
    return len(function.queue) + running


def _find_device(view: View, function: FunctionState) -> Device | None:
    """A free GPU; for a function without one, a CPU with cores left."""
    spec = function.spec
    devices = [d for d in view.devices.values() if spec.fits_family(d.spec.family)]
    for device in sorted(devices, key=lambda d: d.spec.family != "gpu"):
        enough = device.memory_used_mib + spec.memory_mib <= device.spec.memory_mib
        if enough and device.unreserved_block(_all_units(function, device)):
            return device
    return None


def _all_units(function: FunctionState, device: Device) -> int:
    limits = device.spec.limits
    if device.spec.family == "cpu":
        return function.spec.units_on(device.spec)
    return max((size for size in limits.sizes if size <= device.spec.units), default=device.spec.units)
