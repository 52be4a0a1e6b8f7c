"""Telemetry of a GPU by the management library (NVML): memory bandwidth, counted in hardware from Hopper on, clocks and power.

A thread of its own asks once a second, because the answers may take milliseconds; readers take `bandwidth` and `clocks`. The
layouts are those of nvml.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from lamina.gpu.protocol import GpuClocks

_MEMORY_BANDWIDTH = 10  # NVML_GPM_METRIC_DRAM_BW_UTIL, in percent of the peak
_VERSION = 1
EVERY_S = 1.0
_SM_CLOCK, _MEMORY_CLOCK, _CORE_TEMPERATURE = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU

SLOWED_BY = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "power brake",
}
"""Reasons why clocks are below their highest, by bit of `nvmlClocksEventReasons`; those that an idle device has are left out."""

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


class TelemetryUnavailable(Exception):
    """This device or its driver does not say that."""


class NvmlDevice:
    """One device, by its UUID as NVML writes it: "GPU-..."."""

    def __init__(self, uuid: str) -> None:
        try:
            self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise TelemetryUnavailable(str(error)) from error
        self.call("nvmlInit_v2")
        self.handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.handle))

    def call(self, call: str, *args: Any) -> None:
        function = getattr(self._lib, call, None)
        with _one_at_a_time:
            status = -1 if function is None else function(*args)
        if status:
            raise TelemetryUnavailable(f"{call}: {status}")

    def clocks(self) -> GpuClocks:
        """Clocks, power and temperature now."""
        reasons = ctypes.c_ulonglong()
        try:
            self.call("nvmlDeviceGetCurrentClocksEventReasons", self.handle, ctypes.byref(reasons))
        except TelemetryUnavailable:  # older drivers have it under its old name
            self.call("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle, ctypes.byref(reasons))
        return GpuClocks(
            sm_mhz=self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            max_sm_mhz=self._number("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
            memory_mhz=self._number("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            power_w=self._number("nvmlDeviceGetPowerUsage") / 1000,
            max_power_w=self._number("nvmlDeviceGetEnforcedPowerLimit") / 1000,
            temperature_c=self._number("nvmlDeviceGetTemperature", _CORE_TEMPERATURE),
            slowed_by=list(dict.fromkeys(text for bit, text in SLOWED_BY.items() if reasons.value & bit)),
        )

    def _number(self, call: str, *which: int) -> int:
        found = ctypes.c_uint()
        self.call(call, self.handle, *which, ctypes.byref(found))
        return found.value


class BandwidthCounter:
    """Counter of the memory bandwidth of one device."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        support = _Support(_VERSION, 0)
        device.call("nvmlGpmQueryDeviceSupport", device.handle, ctypes.byref(support))
        if not support.is_supported:
            raise TelemetryUnavailable("the device does not count its memory traffic")
        self._before, self._after = ctypes.c_void_p(), ctypes.c_void_p()
        for sample in (self._before, self._after):
            device.call("nvmlGpmSampleAlloc", ctypes.byref(sample))
        device.call("nvmlGpmSampleGet", device.handle, self._before)

    def share(self) -> float:
        """Share of the peak since the last call."""
        self._device.call("nvmlGpmSampleGet", self._device.handle, self._after)
        question = _Question(_VERSION, 1, self._before, self._after)
        question.metrics[0].id = _MEMORY_BANDWIDTH
        self._device.call("nvmlGpmMetricsGet", ctypes.byref(question))
        self._before, self._after = self._after, self._before
        if question.metrics[0].status:
            raise TelemetryUnavailable(f"nvmlGpmMetricsGet: {question.metrics[0].status}")
        return float(question.metrics[0].value) / 100

    def close(self) -> None:
        for sample in (self._before, self._after):
            self._device.call("nvmlGpmSampleFree", sample)


class DeviceTelemetry:
    """Sampler of one device. `bandwidth` is that of the last second, of the memory's peak, below 0 where it is not counted;
    `clocks` are None where they are not told."""

    def __init__(self, uuid: str) -> None:
        self.bandwidth = -1.0
        self.clocks: GpuClocks | None = None
        self._uuid = uuid
        self._is_over = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._sample, daemon=True, name="telemetry").start()

    def end(self) -> None:
        self._is_over.set()

    def _sample(self) -> None:
        try:
            device = NvmlDevice(self._uuid)
        except TelemetryUnavailable:
            return
        has_clocks, counter = True, None
        with contextlib.suppress(TelemetryUnavailable):
            counter = BandwidthCounter(device)
        while (has_clocks or counter is not None) and not self._is_over.wait(EVERY_S):
            try:
                if counter is not None:
                    self.bandwidth = counter.share()
            except TelemetryUnavailable:
                self.bandwidth, counter = -1.0, None
            try:
                if has_clocks:
                    self.clocks = device.clocks()
            except TelemetryUnavailable:
                self.clocks, has_clocks = None, False
        if counter is not None:
            counter.close()


def telemetry_of(ordinal: int) -> DeviceTelemetry:
    """Sampler of the device torch knows by this number."""
    import torch

    cuda: Any = torch.cuda
    return DeviceTelemetry(f"GPU-{cuda.get_device_properties(ordinal).uuid}")
