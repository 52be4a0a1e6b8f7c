"""CUDA runtime of the executor: graphs captured in the slice's own stream, pinned staging, and events instead of waiting.

Nothing here stops the device or waits for a stream. Graphs of one slice share a memory pool: they run one after the other, and
what they produce is copied away in the same stream before the next one starts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from lamina.gpu.runtime import CaptureLock, PinnedBuffers, Work
from lamina.gpu.slicers.green import GreenSlice
from lamina.gpu.weights import layerwise_wait

READY_BUFFERS, READY_BYTES = (2, 16), 32 << 20
"""Pinned buffers of a batch size that are made with its first graph: two at least, for a batch that runs and one that is booked,
and as many more as so many bytes hold. The rest is made when so many batches of that size are on their way."""


class DeviceTensor:
    """A result that stays on the device, for a step that runs there too. `ready` orders the two, whatever their slices."""

    __slots__ = ("_runtime", "ready", "tensor")

    def __init__(self, tensor: Any, ready: Any, runtime: CudaRuntime) -> None:
        self.tensor = tensor
        self.ready = ready
        self._runtime = runtime

    def on_host(self) -> Any:
        return self._runtime.to_host(self.tensor, self.ready)


class CudaPlan:
    def __init__(
        self, torch: Any, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice, buffers: PinnedBuffers
    ) -> None:
        self.work, self.slice, self.bucket, self.buffers = work, slice_, bucket, buffers
        self.example = example
        self.inputs = tuple(_like(torch, part, bucket, device="cuda") for part in example)
        self.rows = tuple(list(part.unbind(0)) for part in self.inputs)
        self.graph: Any = None
        self.outputs: Any = None  #: where the graph leaves its results
        self.is_captured = False
        self.waits_by_itself = False
        self.runs = 0


class CudaFlight:
    __slots__ = ("_begin", "_count", "_end", "_keep", "_landing", "_plan", "_runtime", "_single", "_staging")

    def __init__(self, runtime: CudaRuntime, plan: CudaPlan, count: int, begin: Any, end: Any) -> None:
        self._runtime, self._plan, self._count, self._begin, self._end = runtime, plan, count, begin, end
        self._staging: Any = None
        self._landing: Any = None
        self._keep: Any = None
        self._single = True

    def is_done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        """Block until it has ended, for threads that have nothing else to do."""
        self._end.synchronize()

    def result(self) -> tuple[int, list[Any]]:
        device_us = int(self._begin.elapsed_time(self._end) * 1000)
        if self._keep is not None:
            columns: Any = [[DeviceTensor(row, self._end, self._runtime) for row in part.unbind(0)] for part in self._keep]
        else:
            copies = [self._runtime.to_numpy(part[: self._count]) for part in self._landing]
            columns = [list(copy) for copy in copies]
        self.free()
        return device_us, columns[0] if self._single else list(zip(*columns, strict=True))

    def free(self) -> None:
        self._runtime.events += [self._begin, self._end] if self._keep is None else [self._begin]
        if self._staging is not None:
            self._plan.buffers.staging.append(self._staging)
        if self._landing is not None:
            self._plan.buffers.landing.append(self._landing)


class CudaRuntime:
    """Runtime on a GPU. It owns the thread it is used in: the current stream is left as the last batch needed it."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self.events: list[Any] = []  #: free ones
        self._host_copy_stream: Any = None  #: stream for what was kept, and is needed on the host
        self._pools: dict[int, tuple[Any, WeakSet[CudaPlan]]] = {}  #: by mask, with the plans that live in it
        self.captures = 0
        turns = CaptureLock()
        self.capturing, self.no_capture = turns.capturing, turns.no_capture
        self._for_runs: dict[int, list[Any]] = {}  #: by mask: streams that are free at this moment
        self._for_captures: dict[int, list[Any]] = {}
        self._raw_stream = torch._C._cuda_getCurrentRawStream

    def plan(self, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice, buffers: PinnedBuffers) -> CudaPlan:
        self._use(slice_)  # its buffers are cleared there, before anything reads them
        return CudaPlan(self._torch, work, example, bucket, slice_, buffers)

    def launch(self, plan: CudaPlan, items: list[Any], *, after: Any = None, keep: bool = False) -> CudaFlight:
        stream, count = plan.slice.torch_stream, len(items)
        self._use(plan.slice)
        begin, end = self._event(), self._event()
        flight = CudaFlight(self, plan, count, begin, end)
        if after is not None and not plan.waits_by_itself:
            stream.wait_event(after)
        begin.record(stream)
        if items and items[0] is not None:
            self._fill(plan, items, flight, stream)
        if plan.graph is not None:
            plan.graph.replay()
            output = plan.outputs
        else:
            with self._torch.inference_mode():
                output = plan.work(*plan.inputs)
        plan.runs += 1
        parts = output if isinstance(output, tuple | list) else (output,)
        flight._single = parts is not output
        if keep:
            flight._keep = [part[:count].clone() for part in parts]
        else:
            flight._landing = _taken(plan.buffers.landing) or self._landing(plan, parts)
            for landing, part in zip(flight._landing, parts, strict=True):
                if count == plan.bucket:
                    landing.copy_(part, non_blocking=True)
                else:
                    landing[:count].copy_(part[:count], non_blocking=True)
        end.record(stream)
        return flight

    def _use(self, slice_: GreenSlice) -> None:
        """Make the slice's stream current, unless it is: looking is ten times cheaper than setting."""
        if self._raw_stream(slice_.torch_stream.device_index) != slice_.stream:
            self._torch.cuda.set_stream(slice_.torch_stream)

    def _capture(self, plan: CudaPlan, block: Any, stream: Any) -> None:
        """Capture on `stream`, which is current. The driver is asked which slice that is: a graph stays where it was captured.

        With the block its weights are in, the graph itself waits for them, layer by layer."""
        torch = self._torch
        assert plan.slice.owns(torch.cuda.current_stream().cuda_stream), "a graph would be captured outside its slice"
        pool, users = self._pool(plan.slice.mask)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), _no_collection(), layerwise_wait(plan.work, block, stream) as waiting:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                plan.outputs = plan.work(*plan.inputs)
            finally:
                graph.capture_end()
        users.add(plan)
        plan.waits_by_itself = waiting.is_complete
        plan.graph = graph
        plan.is_captured = True
        self.captures += 1

    def _pool(self, mask: int) -> tuple[Any, WeakSet[CudaPlan]]:
        """Memory pool of the graphs of one slice. With its last graph it is gone for good: then there is a new one."""
        found = self._pools.get(mask)
        if found is None or not found[1]:
            found = self._pools[mask] = (self._torch.cuda.graph_pool_handle(), WeakSet())
        return found

    def trim(self) -> None:
        """Return cached memory to the device: that of graphs that are no more, say, 200 to 500 MiB a function.

        Waits for the device; not while serving."""
        self._torch.cuda.empty_cache()

    def warmup_run(self, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice, after: Any = None) -> int:
        """Run once on a stream of the slice without other users, and wait for it. Returns the MiB it took."""
        torch = self._torch
        before = int(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode(), self._own_stream(self._for_runs, slice_) as stream:
            if after is not None:
                stream.wait_event(after)
            try:
                work(*(_like(torch, part, bucket, device="cuda") for part in example))
            except torch.OutOfMemoryError:
                return 0  # then a batch that large is halved when it comes
            stream.synchronize()
        return (int(torch.cuda.max_memory_allocated()) - before) >> 20

    def capture(
        self, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice, buffers: PinnedBuffers, block: Any = None
    ) -> CudaPlan:
        """Capture a graph on a stream of the slice without other users; one at a time, inside `capturing`."""
        with self._own_stream(self._for_captures, slice_) as stream:
            plan = CudaPlan(self._torch, work, example, bucket, slice_, buffers)
            stream.synchronize()
            self._capture(plan, block, stream)
        if not buffers.is_ready:
            buffers.is_ready = True
            parts = plan.outputs if isinstance(plan.outputs, tuple | list) else (plan.outputs,)
            first = self._staging(plan)
            count = READY_BYTES // max(1, sum(int(pinned.nbytes) for pinned, _ in first))
            more = max(READY_BUFFERS[0], min(READY_BUFFERS[1], count)) - 1
            buffers.staging += [first, *(self._staging(plan) for _ in range(more))]
            buffers.landing += [self._landing(plan, parts) for _ in range(more + 1)]
        return plan

    @contextmanager
    def _own_stream(self, free: dict[int, list[Any]], slice_: GreenSlice) -> Iterator[Any]:
        """A stream of the slice without other users, current inside.

        They are used again and again, for streams are not destroyed, nor what libraries keep for each of them: cuBLAS has 32
        MiB to work in. A graph has the memory of the stream it was captured on; no warm-up run may write to it while the graph
        serves, so these have streams of their own."""
        cuda, device = self._torch.cuda, slice_.torch_stream.device
        cuda.set_device(device)  # a fresh thread has none
        streams = free.setdefault(slice_.mask, [])
        stream = _taken(streams) or cuda.ExternalStream(slice_.extra_stream(), device=device)
        try:
            with cuda.stream(stream):
                yield stream
        finally:
            streams.append(stream)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, self._torch.OutOfMemoryError)

    def is_broken(self, error: BaseException) -> bool:
        """Is it the device and not this batch? After an illegal address every call fails, so one that does nothing is tried."""
        if isinstance(error, self._torch.OutOfMemoryError) or "CUDA" not in str(error):
            return False
        try:
            self._torch.cuda.default_stream().query()
        except RuntimeError:
            return True
        return False

    def _fill(self, plan: CudaPlan, items: list[Any], flight: CudaFlight, stream: Any) -> None:
        torch, count = self._torch, len(items)
        for index, rows in enumerate(plan.rows):
            parts = [item[index] if isinstance(item, tuple | list) else item for item in items]
            here = []  #: rows whose values are on the device already
            for row, part in enumerate(parts):
                if isinstance(part, DeviceTensor):
                    stream.wait_event(part.ready)
                    part.tensor.record_stream(stream)
                    here.append((rows[row], part.tensor))
                elif isinstance(part, torch.Tensor) and part.is_cuda:
                    here.append((rows[row], part))
            if here:
                torch._foreach_copy_(*map(list, zip(*here, strict=True)), non_blocking=True)
                if len(here) == count:
                    continue
            if flight._staging is None:
                flight._staging = _taken(plan.buffers.staging) or self._staging(plan)
            pinned, view = flight._staging[index]
            for row, part in enumerate(parts):
                if here and (isinstance(part, DeviceTensor) or (isinstance(part, torch.Tensor) and part.is_cuda)):
                    continue
                if view is None:
                    pinned[row].copy_(torch.as_tensor(part))
                else:
                    view[row] = part
                if here:  # some of either kind
                    rows[row].copy_(pinned[row], non_blocking=True)
            if here:
                continue
            if count == plan.bucket:
                plan.inputs[index].copy_(pinned, non_blocking=True)
            else:
                plan.inputs[index][:count].copy_(pinned[:count], non_blocking=True)

    def _staging(self, plan: CudaPlan) -> tuple[Any, ...]:
        made = [_like(self._torch, part, plan.bucket, device="cpu", pin_memory=True) for part in plan.example]
        return tuple((pinned, None if pinned.dtype is self._torch.bfloat16 else pinned.numpy()) for pinned in made)

    def _landing(self, plan: CudaPlan, parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            self._torch.empty((plan.bucket, *part.shape[1:]), dtype=part.dtype, device="cpu", pin_memory=True) for part in parts
        )

    def to_host(self, tensor: Any, ready: Any) -> Any:
        """Copy to the host, on a stream of its own: the current one may have a batch to run first."""
        if self._host_copy_stream is None:
            self._host_copy_stream = self._torch.cuda.Stream()
        with self._torch.cuda.stream(self._host_copy_stream):
            self._host_copy_stream.wait_event(ready)
            found = tensor.cpu()
        return found.float().numpy() if found.dtype is self._torch.bfloat16 else found.numpy()

    def to_numpy(self, part: Any) -> Any:
        """Copy out of the buffer, as numpy has it; bfloat16, which it does not have, as float32."""
        return part.float().numpy() if part.dtype is self._torch.bfloat16 else part.numpy().copy()

    def _event(self) -> Any:
        return _taken(self.events) or self._torch.cuda.Event(enable_timing=True)


def _taken(free: list[Any]) -> Any:
    """Pop the last, if there is one. Capture threads pop too: between looking and popping it may be gone."""
    try:
        return free.pop()
    except IndexError:
        return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection off: destroying a graph in a thread that captures another spoils the capture.

    The collector might do it. Captures take milliseconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _like(torch: Any, example: Any, bucket: int, **options: Any) -> Any:
    """A buffer for `bucket` rows in the layout of the example, which is a batch of one."""
    last = example.dim() == 4 and not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty((bucket, *example.shape[1:]), dtype=example.dtype, memory_format=layout, **options).zero_()
