"""CPU affinity: which cores this process may use, and how a batch is kept to its own.

Bit i of a mask is the i-th core the process was allowed at its start, so a container's cpuset, a `taskset` and a laptop
all count from 0. Affinity is what holds a batch to its slice; thread counts follow so that a library does not start more
threads than it has cores and let them fight.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from lamina.errors import BadValue
from lamina.types import DeviceSpec, SliceLimits
from lamina.units import MIB

CORE_PRICE_PER_S = 1e-5
"""A core for a second, in the unit of all prices: about 0.036 an hour, what a rented core costs in dollars."""

MEMORY_SHARE = 0.8
"""Of the memory that is free at the start: the rest is for the gateway, values on their way, and mistakes."""

_BLAS_USERS = ("numpy", "scipy", "torch", "sklearn", "onnxruntime")
_CGROUP = "/sys/fs/cgroup"


class WorkerAffinity:
    """Affinity of a worker: keeps the whole process, all its threads, on the cores of the lease."""

    def __init__(self) -> None:
        self.allowed = allowed_cores()  #: as it was before anything here moved the process
        self._count = len(self.allowed)
        self._applied: tuple[int, int] = (0, 0)  #: the mask, and how many modules there were: new ones bring new threads
        self._pools: Any = None
        self._pools_seen = 0

    def apply(self, mask: int) -> int:
        """Move to the cores of a mask and return their number. A mask of none of them moves nothing."""
        if (mask, len(sys.modules)) == self._applied:
            return self._count
        cores = tuple(core for index, core in enumerate(self.allowed) if mask >> index & 1)
        if not cores:
            return self._count
        if mask != self._applied[0]:
            _bind_all_threads(cores)
        self._limit_threads(len(cores))
        self._count = len(cores)
        self._applied = (mask, len(sys.modules))
        return self._count

    def _limit_threads(self, count: int) -> None:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(count)
        if any(name in sys.modules for name in _BLAS_USERS):
            import threadpoolctl

            if self._pools is None or self._pools_seen != len(sys.modules):
                self._pools = threadpoolctl.ThreadpoolController()
                self._pools_seen = len(sys.modules)
            self._pools.limit(limits=count)


class GatewayAffinity:
    """Affinity of the gateway's thread: off the cores that are leased, as long as there are others.

    A lease is for a batch alone. The kernel knows nothing of that: now and then it wakes the gateway on the core of a running
    batch, and lets it wait there for milliseconds while another core is idle."""

    def __init__(self) -> None:
        self.allowed = allowed_cores()
        self._leased = 0

    def avoid(self, leased: int) -> None:
        if leased != self._leased:
            self._leased = leased
            others = [core for index, core in enumerate(self.allowed) if not leased >> index & 1]
            os.sched_setaffinity(0, others or self.allowed)


def allowed_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _bind_all_threads(cores: tuple[int, ...]) -> None:
    """Bind every thread. A thread inherits its cores at its start and keeps them: existing pools are bound one by one."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task), cores)


def available_mib() -> int:
    """Memory available now, by the machine's and the container's accounts."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max": no limit
            free = min(free, _number(limit) - _number(used))
    return max(0, free) // MIB


def _number(name: str) -> int:
    with open(os.path.join(_CGROUP, name)) as file:
        return int(file.read())


def cores_for_gpus(count: int, each: int) -> list[tuple[int, ...]]:
    """Cores that go with the slices of each of some GPUs: the last ones of this machine. At least one is left for the rest."""
    cores = allowed_cores()
    if each and count * each >= len(cores):
        raise BadValue(
            f"--gpu-cores: {each} for each of {count} GPUs, and this machine has {len(cores)} cores",
            hint="functions on cores and the server need some too",
        )
    return (
        [cores[len(cores) - (number + 1) * each : len(cores) - number * each] for number in range(count)]
        if each
        else [()] * count
    )


def cpu_device(set_apart: int = 0) -> DeviceSpec:
    """This machine's cores as one device, but for those that are set apart."""
    units = len(allowed_cores()) - set_apart
    return DeviceSpec(
        id="cpu0",
        kind="cpu",
        family="cpu",
        units=units,
        memory_mib=int(available_mib() * MEMORY_SHARE),
        limits=SliceLimits(batches_per_instance=1),
        price_per_s=units * CORE_PRICE_PER_S,
        owned=True,
    )
