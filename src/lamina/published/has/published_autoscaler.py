"""HAS-GPU's autoscaler as published, defects included, for comparison only (`has` with `compat`).

What it does that `published/has/policies/has.py` does not:

- one Kalman filter for all functions, its margin fed back, and five calls a second on top of any load;
- what a pod can do is 1000 / (latency + 70 ms) x (batch + 1) / 2, whatever the host and the server are;
- no latency goal is ever looked at;
- occupancy is divided in whole numbers, so it is 0 unless a row has all SMs: neither its order nor its limit binds;
- all devices count as used from the start and a device without rows offers nothing, so only the first is ever reached;
- two rows per device, of SM shares from a table by the function's name, not checked to fit together;
- the largest quota a row has left is taken, not the smallest that is enough; reducing keeps the step that goes too far.

Where the original would promise more than a device has, this platform's controller would refuse, so it does nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, LoadInstance, ResizeInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.has.kalman_filter import KalmanFilter
from lamina.published.has.pods import (
    FULL_QUOTA,
    PodShape,
    WindowedRates,
    device_rows,
    has_memory,
    live_pods,
    pod_quota,
    pod_shape,
    row_of_pod,
)

UP, DOWN, STEP = 0.9, 0.3, 10
HOST_MS = 70.0  #: reckoned for pre-processing and HTTP
ROWS = 2
MIN_PER_S = 35.0  #: of the first pod's configuration, if any has as much
_SM = {"bert": (30, 70, 50), "resnet": (25, 50, 30), "convnext": (30, 70, 30), "mobilenet": (40, 70, 30), "gpt": (0, 80, 80)}
"""By a part of the function's name: above so many missing calls a second, that much of the SMs, else this much."""


@dataclass(slots=True)
class PublishedAutoscaler:
    cooldown_us: int = 10_000_000
    _rates: WindowedRates = field(default_factory=lambda: WindowedRates(10_000_000))
    _filter: KalmanFilter = field(default_factory=KalmanFilter)
    _reduced_us: dict[str, int] = field(default_factory=dict)

    def scale(self, view: View, turn: bool) -> Iterator[Decision]:
        for function in view.functions.values():
            if not live_pods(function):
                device = _only_device(view, function)
                if device is not None and view.now_us >= function.load_not_before_us:
                    yield from self._new(view, function, device, *_efficient(view, function, device))
            elif turn:
                yield from self._adjust(view, function)

    def _adjust(self, view: View, function: FunctionState) -> Iterator[Decision]:
        wanted = self._filter.update_as_published(self._rates.per_s(view.now_us, function))
        able = sum(_per_s(view, function, pod) for pod in live_pods(function))
        if wanted > UP * able:
            yield from self._scale_up(view, function, wanted - UP * able)
        elif wanted < DOWN * able and view.now_us >= self._reduced_us.get(function.spec.name, 0):
            self._reduced_us[function.spec.name] = view.now_us + self.cooldown_us
            yield from self._scale_down(view, function, UP * able - wanted)

    def _scale_up(self, view: View, function: FunctionState, lacking: float) -> Iterator[Decision]:
        for pod in sorted(live_pods(function), key=lambda pod: (-pod.units, pod.created_us, pod.id)):
            left, add, gain, quota = row_of_pod(view, pod).quota_left, STEP, 0.0, pod_quota(pod)
            while add <= left and gain < lacking:
                quota = pod_quota(pod) + add
                gain = _per_s(view, function, pod, quota) - _per_s(view, function, pod)
                add += STEP
            lacking -= gain
            yield ResizeInstance(pod.id, pod.units, quota / FULL_QUOTA)
        device = _only_device(view, function)
        while lacking > 0 and device is not None and has_memory(function, device):
            before = len(function.instances)
            yield from self._beside(view, function, device, lacking)
            if len(function.instances) == before:
                return
            lacking -= _per_s(view, function, live_pods(function)[-1])

    def _beside(self, view: View, function: FunctionState, device: Device, lacking: float) -> Iterator[Decision]:
        """A pod with all the time the emptiest row has; a row that is free gets its SMs from the table."""
        rows = device_rows(view, device)
        fullest = max(rows, key=lambda row: row.quota_left, default=None)
        units = _units(device, _optimal_sm(function.spec.name, lacking))
        if len(rows) < ROWS and device.unreserved_block(units):
            yield from self._new(view, function, device, units, FULL_QUOTA)
        elif fullest is not None and fullest.quota_left >= STEP:
            quota = fullest.quota_left // STEP * STEP
            yield LoadInstance(function.spec.name, device.spec.id, fullest.units, quota / FULL_QUOTA, fullest.pods[0].id)

    def _scale_down(self, view: View, function: FunctionState, surplus: float) -> Iterator[Decision]:
        for pod in sorted(live_pods(function), key=lambda pod: (pod.units, pod.created_us, pod.id)):
            less, loss, quota = STEP, 0.0, pod_quota(pod)
            while pod_quota(pod) - less > 0 and loss < surplus:
                quota = pod_quota(pod) - less
                loss = _per_s(view, function, pod) - _per_s(view, function, pod, quota)
                less += STEP
            if surplus > 0 and quota < pod_quota(pod):
                surplus -= loss
                yield ResizeInstance(pod.id, pod.units, quota / FULL_QUOTA)
        for pod in live_pods(function):
            able = _per_s(view, function, pod)
            if surplus > 0 and len(live_pods(function)) > 1 and 2 * pod.units <= _all_units(view, pod) and able <= surplus:
                surplus -= able
                yield UnloadInstance(pod.id)

    def _new(self, view: View, function: FunctionState, device: Device, units: int, quota: int) -> Iterator[Decision]:
        rows = device_rows(view, device)
        shared = next((row for row in rows if row.units == units and row.quota_left >= quota), None)
        if len(rows) < ROWS and device.unreserved_block(units):
            yield LoadInstance(function.spec.name, device.spec.id, units, quota / FULL_QUOTA)
        elif shared is not None:
            yield LoadInstance(function.spec.name, device.spec.id, units, quota / FULL_QUOTA, shared.pods[0].id)
        else:  # wherever there is any time left, ten percent of it
            row = next((row for row in rows if row.quota_left >= STEP), None)
            if row is not None:
                yield LoadInstance(function.spec.name, device.spec.id, row.units, STEP / FULL_QUOTA, row.pods[0].id)


def _only_device(view: View, function: FunctionState) -> Device | None:
    """The first GPU, for ever."""
    gpus = (d for d in view.devices.values() if d.spec.family == "gpu" and function.spec.fits_family("gpu"))
    first = next(gpus, None)
    return first if first is not None and has_memory(function, first) else None


def _per_s(view: View, function: FunctionState, pod: Instance, quota: int = 0) -> float:
    shape = pod_shape(pod)
    return _capability(view, function, view.devices[pod.device], PodShape(shape.units, quota or shape.quota))


def _capability(view: View, function: FunctionState, device: Device, shape: PodShape) -> float:
    batch = 8 if "shufflenet" in function.spec.name else 4
    alone_us = view.latency_us(function.spec.name, device, batch, shape.units)
    return 1000 / (alone_us / 1000 * FULL_QUOTA / shape.quota + HOST_MS) * (batch + 1) / 2 if alone_us else 0.0


def _efficient(view: View, function: FunctionState, device: Device) -> tuple[int, int]:
    """Most calls for what it takes, of those that do enough; 30 % of the SMs for 30 % of the time if none does."""
    shapes = [PodShape(_units(device, sm), quota) for sm in range(10, 101, 10) for quota in range(STEP, FULL_QUOTA + 1, STEP)]
    able = [(_capability(view, function, device, shape), shape) for shape in shapes]
    best = max(((rate / shape.area, shape) for rate, shape in able if rate >= MIN_PER_S), default=None)
    return (best[1].units, best[1].quota) if best else (_units(device, 30), 30)


def _optimal_sm(name: str, lacking: float) -> int:
    for part, (above, large, small) in _SM.items():
        if part in name:
            return large if lacking > above else small
    return 50


def _units(device: Device, percent: int) -> int:
    wish = max(1, round(percent * device.spec.units / 100))
    sizes = device.spec.limits.sizes
    return min((size for size in sizes if size >= wish), default=max(sizes)) if sizes else wish


def _all_units(view: View, pod: Instance) -> int:
    return view.devices[pod.device].spec.units
