"""Memory traffic of a GPU: bandwidth utilisation by the management library (NVML), which counts it in hardware from Hopper on.

A thread of its own asks once a second, because the answer may take milliseconds; readers take `share`. The layouts are
those of nvml.h.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_MEMORY_BANDWIDTH = 10  # NVML_GPM_METRIC_DRAM_BW_UTIL, in percent of the peak
_VERSION = 1
EVERY_S = 1.0

_one_at_a_time = threading.Lock()
"""The library is said to be safe in threads; four that asked at once ended in a segmentation fault (driver 580)."""


class _Metric(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_double),
        ("names", ctypes.c_void_p * 3),
    )


class _Question(ctypes.Structure):
    """nvmlGpmMetricsGet_t, with more room than any version of it asks for."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("metrics", _Metric * 512),
    )


class _Support(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("is_supported", ctypes.c_uint))


class BandwidthUnavailable(Exception):
    """Neither this device nor its driver counts memory traffic."""


class BandwidthCounter:
    """Bandwidth counter of one device, by its UUID as NVML writes it: "GPU-..."."""

    def __init__(self, uuid: str) -> None:
        try:
            self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise BandwidthUnavailable(str(error)) from error
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        support = _Support(_VERSION, 0)
        self._call("nvmlGpmQueryDeviceSupport", self._device, ctypes.byref(support))
        if not support.is_supported:
            raise BandwidthUnavailable(f"{uuid} does not count")
        self._before, self._after = ctypes.c_void_p(), ctypes.c_void_p()
        for sample in (self._before, self._after):
            self._call("nvmlGpmSampleAlloc", ctypes.byref(sample))
        self._call("nvmlGpmSampleGet", self._device, self._before)

    def share(self) -> float:
        """Share of the peak since the last call."""
        self._call("nvmlGpmSampleGet", self._device, self._after)
        question = _Question(_VERSION, 1, self._before, self._after)
        question.metrics[0].id = _MEMORY_BANDWIDTH
        self._call("nvmlGpmMetricsGet", ctypes.byref(question))
        self._before, self._after = self._after, self._before
        if question.metrics[0].status:
            raise BandwidthUnavailable(f"nvmlGpmMetricsGet: {question.metrics[0].status}")
        return float(question.metrics[0].value) / 100

    def close(self) -> None:
        for sample in (self._before, self._after):
            self._call("nvmlGpmSampleFree", sample)

    def _call(self, call: str, *args: Any) -> None:
        function = getattr(self._lib, call, None)
        with _one_at_a_time:
            status = -1 if function is None else function(*args)
        if status:
            raise BandwidthUnavailable(f"{call}: {status}")


class MemoryTraffic:
    """Sampler of the bandwidth. `share` is that of the last second, of the memory's peak; below 0 where it is not counted."""

    def __init__(self, uuid: str) -> None:
        self.share = -1.0
        self._uuid = uuid
        self._is_over = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._count, daemon=True, name="traffic").start()

    def end(self) -> None:
        self._is_over.set()

    def _count(self) -> None:
        try:
            counter = BandwidthCounter(self._uuid)
            while not self._is_over.wait(EVERY_S):
                self.share = counter.share()
            counter.close()
        except BandwidthUnavailable:
            self.share = -1.0


def traffic_of(ordinal: int) -> MemoryTraffic:
    """Sampler of the device torch knows by this number."""
    import torch

    cuda: Any = torch.cuda
    return MemoryTraffic(f"GPU-{cuda.get_device_properties(ordinal).uuid}")
