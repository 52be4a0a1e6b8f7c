"""Pod rows of a device: rows of units, and in each row pods that share its time.

All pods of a row stand on the same units (the published word is SM alignment), so a row is full when their quotas add up to
the whole time, and a device is full when its rows add up to all units. Read off the state each time it is asked for: there
is no second book to keep, so a lost pod or device cannot put it out of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.published.has.pod_capacity import FULL_QUOTA, PodShape


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
