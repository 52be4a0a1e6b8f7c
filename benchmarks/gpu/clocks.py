"""Where do shared slices lose time: to a lower clock, or to the shared cache and memory? The same cases, with clocks read."""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import capture, median, replay_us, together_us

SPEND_MS = 700.0


class Clocks:
    """SM clock and power, every two milliseconds, through NVML."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        self._lib.nvmlInit_v2()
        self._handle = ctypes.c_void_p()
        self._lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle))

    def __enter__(self) -> Clocks:
        self.mhz: list[int] = []
        self.watts: list[float] = []
        self.reasons = 0
        self._on = True
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._on = False
        self._thread.join()

    def _read(self) -> None:
        clock, power, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        while self._on:
            self._lib.nvmlDeviceGetClockInfo(self._handle, 1, ctypes.byref(clock))
            self._lib.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(power))
            self._lib.nvmlDeviceGetCurrentClocksEventReasons(self._handle, ctypes.byref(reasons))
            self.mhz.append(clock.value)
            self.watts.append(power.value / 1e3)
            self.reasons |= reasons.value
            time.sleep(0.002)

    def busy_mhz(self) -> float:
        """The median of the middle: the ends show the time before and after."""
        return median(self.mhz[len(self.mhz) // 3 : -len(self.mhz) // 4])


def run(bench: Bench) -> None:
    import torch

    with torch.inference_mode(False):
        left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        products = [torch.empty_like(left) for _ in range(15)]

    def product(index: int, stream: Any) -> Any:
        return capture(lambda: torch.mm(left, left, out=products[index]), stream, warm=2)[0]

    def measured(lanes: list[tuple[Any, Any]], first: int) -> tuple[float, float, float, Clocks]:
        """Time of lane 0 (or mean rate of all) alone and together, and the clocks of both."""
        alone, slow = Clocks(), Clocks()
        solo = [median(replay_us(graph, stream, spend_ms=15, most=10)) for graph, stream in lanes]
        with alone:
            first_us = together_us(lanes[:1], solo[:1], SPEND_MS)[0]
        with slow:
            shared = together_us(lanes, solo, SPEND_MS)
        return first_us, median(shared[:first]), alone.busy_mhz(), slow

    def report(what: str, solo: float, shared: float, alone_mhz: float, slow: Clocks) -> None:
        clock = alone_mhz / slow.busy_mhz()
        bench.report.add(
            f"{what}: slower by the clock / by the rest",
            shared / solo,
            "x",
            by_clock=clock,
            by_the_rest=shared / solo / clock,
            alone_mhz=alone_mhz,
            together_mhz=slow.busy_mhz(),
            watts=median(slow.watts[len(slow.watts) // 2 :]),
            reasons=hex(slow.reasons),
        )

    for count in (2, 6, 15):
        units = 15 // count
        streams = [bench.slicer.slice(((1 << units) - 1) << units * place).torch_stream for place in range(count)]
        report(f"{count} slices with a product each", *measured([(product(i, s), s) for i, s in enumerate(streams)], count))
    for name, batch in (("resnet50", 1), ("resnet50", 8), ("bert_base", 8)):
        for others, units in ((1, 12), (7, 1)):
            streams = [bench.slicer.slice(0b111).torch_stream]
            streams += [bench.slicer.slice(((1 << units) - 1) << 3 + units * place).torch_stream for place in range(others)]
            victim, _kept = bench.graph(name, batch, streams[0])
            lanes = [(victim, streams[0]), *((product(i, s), s) for i, s in enumerate(streams[1:]))]
            report(f"{name} b{batch} beside {others} products on {others * units * 8} SMs", *measured(lanes, 1))
    streams = [bench.slicer.slice(1 << unit).torch_stream for unit in range(15)]
    lanes = [(*bench.graph("resnet50", 8, stream), stream) for stream in streams]
    report("15 slices with resnet50 b8 each", *measured([(graph, stream) for graph, _, stream in lanes], 15))
