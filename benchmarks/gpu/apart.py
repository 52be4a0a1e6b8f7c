"""The executor of `five.py` in a process of its own, as in the server: controller and executor have a core each.

    python -m benchmarks.gpu.apart FD     loads models as it is told, then runs batches of values that are on the device already

What goes to and fro is a few bytes a batch, by a socket that both ask all the time.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.zoo import FIVE
from lamina.types import DeviceSpec, SliceLimits

BUCKETS = (1, 2, 4, 8, 16)
ASK, ENDED = struct.Struct("<BHII"), struct.Struct("<II")  #: function, items, mask, ticket; ticket, microseconds
LOAD = 255  #: in place of a function: as many bytes of JSON follow
READY = FAILED = 0xFFFFFFFF  #: in place of a ticket: bytes of JSON follow; in place of a time


class PlainSlice:
    """A stream without a partition, where a slice is expected."""

    def __init__(self, mask: int) -> None:
        import torch

        self.mask, self.torch_stream = mask, torch.cuda.Stream()
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.stream = self.torch_stream.cuda_stream
        self._streams = [self.torch_stream]

    def extra_stream(self) -> int:
        import torch

        self._streams.append(torch.cuda.Stream())
        return self._streams[-1].cuda_stream

    def owns(self, stream: int) -> bool:
        return stream in [one.cuda_stream for one in self._streams]


class PlainSlicer:
    def __init__(self, device: DeviceSpec) -> None:
        self.device, self._made = device, {}  # type: ignore[var-annotated]

    def slice(self, mask: int) -> PlainSlice:
        if mask not in self._made:
            self._made[mask] = PlainSlice(mask)
        return self._made[mask]


def catalogue(units: int, *, soft: bool = False) -> SliceLimits:
    """Slices of one size, or of any."""
    return SliceLimits(sizes=(units,) if units else (), aligned=True, batches_per_instance=0, soft=soft)


class Apart:
    """What the loop takes for an executor."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.gpu.apart", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._numbers = {name: number for number, name in enumerate(FIVE)}
        self._tickets = 0
        self._rest = b""

    def use(self, kind: str, units: int) -> DeviceSpec:
        """From now on with slices like these; made when first asked for."""
        text = json.dumps([kind, units]).encode()
        self._socket.setblocking(True)
        self._socket.sendall(ASK.pack(LOAD, len(text), 0, 0) + text)
        ticket, length = ENDED.unpack(self._exactly(ENDED.size))
        assert ticket == READY, "batches are under way"
        device = DeviceSpec(**json.loads(self._exactly(length)), limits=catalogue(units, soft=kind == "soft"), owned=True)
        self._socket.setblocking(False)
        return device

    def submit(self, name: str, inputs: list[Any], mask: int) -> int:
        self._tickets += 1
        self._socket.send(ASK.pack(self._numbers[name], len(inputs), mask, self._tickets))
        return self._tickets

    def poll(self) -> list[Any]:
        try:
            said = self._rest + self._socket.recv(65536)
        except BlockingIOError:
            return []
        whole = len(said) // ENDED.size * ENDED.size
        self._rest = said[whole:]
        return [
            SimpleNamespace(ticket=ticket, device_us=0 if us == FAILED else us, error="failed" if us == FAILED else None)
            for ticket, us in ENDED.iter_unpack(said[:whole])
        ]

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)

    def _exactly(self, count: int) -> bytes:
        said = b""
        while len(said) < count:
            more = self._socket.recv(count - len(said))
            if not more:
                raise RuntimeError(f"the executor ended with status {self._process.wait()}")
            said += more
        return said


class Executors:
    """In the process apart: one for each way to cut the device, with graphs wherever a batch may run."""

    def __init__(self) -> None:
        from benchmarks.gpu import zoo
        from lamina.gpu.slicers.green import GreenSlicer

        self._hard = GreenSlicer()
        self._models = {name: zoo.build(name) for name in FIVE}
        self.items = {name: model.make_input(1)[0] for name, model in self._models.items()}
        self._made: dict[tuple[str, int], Any] = {}

    def use(self, kind: str, units: int) -> Any:
        if (kind, units) not in self._made:
            self._made[kind, units] = self._load(kind, units)
            gc.collect()
            gc.freeze()
        return self._made[kind, units]

    def _load(self, kind: str, units: int) -> Any:
        import msgspec

        from lamina.gpu.cuda_runtime import CudaRuntime
        from lamina.gpu.executor import SliceExecutor
        from lamina.gpu.slicer import all_masks
        from lamina.gpu.slicers.green import GreenSlicer

        limits = catalogue(units, soft=kind == "soft")
        device = msgspec.structs.replace(self._hard.device, limits=limits)
        slicer: Any = PlainSlicer(device) if kind == "streams" else GreenSlicer(driver=self._hard.driver, limits=limits)
        executor = SliceExecutor(slicer, CudaRuntime())
        for name, model in self._models.items():
            executor.load(name, model.module, model.make_input(1), buckets=BUCKETS)
            executor.prepare(name, [places()[name]] if kind == "streams" else all_masks(device))
        return executor


def places() -> dict[str, int]:
    """Where each has its stream, if it has one for itself."""
    return {name: 0b111 << 3 * number for number, name in enumerate(FIVE)}


def serve(ours: socket.socket) -> None:
    executors = Executors()
    executor, said, asked = None, b"", {}  # type: ignore[var-annotated]
    ours.setblocking(False)
    while True:
        try:
            more = ours.recv(65536)
            if not more:
                return
            said += more
        except BlockingIOError:
            pass
        while len(said) >= ASK.size:
            number, count, mask, ticket = ASK.unpack_from(said)
            said = said[ASK.size :]
            if number == LOAD:
                kind, units = json.loads(said[:count])
                said = said[count:]
                executor = executors.use(kind, units)
                device = executor.slicer.device
                text = json.dumps({key: getattr(device, key) for key in ("id", "kind", "units", "memory_mib")}).encode()
                ours.setblocking(True)
                ours.sendall(ENDED.pack(READY, len(text)) + text)
                ours.setblocking(False)
            else:
                name = FIVE[number]
                asked[executor.submit(name, [executors.items[name]] * count, mask)] = ticket
        if executor is not None:
            ended = [
                ENDED.pack(asked.pop(done.ticket), FAILED if done.error else done.device_us)
                for done in executor.poll()
                if done.ticket in asked
            ]
            if ended:
                ours.send(b"".join(ended))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before torch starts the driver
    serve(socket.socket(fileno=int(sys.argv[1])))
