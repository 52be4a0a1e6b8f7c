"""CUDA runtime of the executor: graphs captured in the slice's own stream, pinned staging, and events instead of waiting.

Nothing here stops the device or waits for a stream. Graphs of one slice share a memory pool: they run one after the other, and
what they produce is copied away in the same stream before the next one starts. Graphs that are cut into segments have a pool of
their own, one per slice too, and those of functions with an SLO more, by how long it is: while one of them is paused, others may
run on its slice. What cuBLAS works in is part of these pools: it has 32 MiB for each thread and stream otherwise, which was 17 of
the 30 GB of forty small models, and a paused graph and the one that preempts it would have had the same.

Their inputs are in one place likewise, and what a batch leaves free of it is cleared. Pinned buffers are shared by all models
with inputs, or results, of the same shapes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from lamina.gpu.driver import CudaDriver
from lamina.gpu.runtime import CaptureLock, WarmupRun, Work
from lamina.gpu.segments import can_launch, cut_graph, group_pieces, is_long, piece_bounds
from lamina.gpu.slicers.green import GreenSlice
from lamina.gpu.weights import layerwise_wait

_ALIGN = 512

WHOLE, CUT = 0, 1
"""Kinds of graphs; those of functions with an SLO are further ones, by how long it is. Each has memory of its own on a slice: so
urgent work in segments can have units of a batch that is paused, and can wait for longer."""

READY_BUFFERS, READY_BYTES = (2, 16), 32 << 20
"""Pinned buffers that are made with the first graph of their shapes: two at least, for a batch that runs and one that is booked,
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


class PinnedBuffers:
    """Free pinned buffers of some shapes: each is a tuple with a tensor for each part of a batch. Pinning takes milliseconds, so
    a capture does it, not the first batch."""

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        self._make, self._free = make, list[tuple[Any, ...]]()
        self._is_filled = False

    def take(self) -> tuple[Any, ...]:
        return _taken(self._free) or self._make()

    def put(self, buffer: tuple[Any, ...]) -> None:
        self._free.append(buffer)

    def fill(self, count: int) -> None:
        """Make so many, once."""
        if not self._is_filled:
            self._is_filled = True
            self._free += [self._make() for _ in range(count)]


class CudaPlan:
    def __init__(
        self,
        work: Work,
        example: Sequence[Any],
        bucket: int,
        slice_: GreenSlice,
        inputs: tuple[Any, ...],
        staging: PinnedBuffers,
    ) -> None:
        self.pieces: list[int] = []  #: its graph, if that is cut
        self.segments: list[range] = []  #: pieces that are launched together
        self.segment_us: list[float] = []  #: what each takes; empty until its pieces have been timed
        self._destroy_piece: Callable[[int], None] = lambda piece: None
        self.work, self.slice, self.bucket = work, slice_, bucket
        self.staging = staging  #: for inputs
        self.landing: PinnedBuffers | None = None  #: for results, once their shapes are known
        self.example = example
        self.inputs = inputs
        self.rows = tuple(list(part.unbind(0)) for part in self.inputs)
        self.graph: Any = None
        self.outputs: Any = None  #: where the graph leaves its results
        self.is_captured = False
        self.waits_by_itself = False
        self.runs = 0

    @property
    def is_cut(self) -> bool:
        return bool(self.pieces)

    @property
    def longest_segment_us(self) -> int:
        """0: it runs in one go, or has not been timed."""
        return max(1, int(max(self.segment_us))) if self.segment_us else 0

    def set_pieces(self, pieces: list[int], destroy: Callable[[int], None]) -> None:
        self.pieces, self._destroy_piece = pieces, destroy
        self.segments = [range(len(pieces))]

    def set_piece_times(self, times_us: Sequence[float]) -> None:
        """Group the pieces into segments, by the time each of them took."""
        self.segments = group_pieces(times_us)
        self.segment_us = [sum(times_us[place] for place in group) for group in self.segments]

    def __del__(self) -> None:
        for piece in self.pieces:
            with contextlib.suppress(Exception):  # the interpreter, or the device, may be on its way out
                self._destroy_piece(piece)


class CudaFlight:
    """A run in flight. That of a segmented graph goes on whenever it is looked at, unless it is paused."""

    __slots__ = (
        *("_begin", "_count", "_end", "_keep", "_keeps", "_landing", "_plan", "_runtime", "_single", "_staging"),
        *("_began_s", "_ended", "_is_paused", "_launched", "_marks", "_pauses", "_piece_marks", "_segments"),
    )

    def __init__(
        self, runtime: CudaRuntime, plan: CudaPlan, count: int, begin: Any, end: Any, keeps: bool, segments: Sequence[range]
    ) -> None:
        self._segments = segments  #: of pieces; none: it runs whole
        self._runtime, self._plan, self._count, self._begin, self._end = runtime, plan, count, begin, end
        self._staging: Any = None
        self._landing: Any = None
        self._keep: Any = None
        self._keeps = keeps
        self._single = True
        self._is_paused = False
        self._launched = self._ended = 0  #: segments
        self._began_s = 0.0  #: when the first of those in flight was seen to begin
        self._marks: list[Any] = []  #: an event after each segment
        self._pauses: list[tuple[Any, Any]] = []  #: events at begin and end
        self._piece_marks: list[Any] = []  #: events after each piece, where they are timed

    @property
    def is_launched(self) -> bool:
        """Whether all of it is in its stream, so that what comes there later runs after it."""
        return self._launched >= len(self._segments)

    @property
    def remaining_segments(self) -> int:
        return len(self._segments) - self._launched

    @property
    def remaining_us(self) -> int:
        return int(sum(self._plan.segment_us[self._launched :]))

    @property
    def device_us(self) -> int:
        """Time on the device without pauses, once it is done and before `free`."""
        paused_ms = sum(begin.elapsed_time(end) for begin, end in self._pauses)
        return int((self._begin.elapsed_time(self._end) - paused_ms) * 1000)

    @property
    def is_quiet(self) -> bool:
        """Whether it is paused, and nothing of it runs any more: another may have its slice."""
        self._look()
        return self._is_paused and not self.is_launched and self._ended == self._launched

    def pause(self) -> None:
        """Launch no more of it. What is in its stream by now still runs: two segments, or all of it."""
        self._is_paused = True

    def resume(self) -> None:
        if self._is_paused and self._marks and not self.is_launched:
            self._pauses.append((self._marks[-1], self._runtime.mark(self._plan)))
        self._is_paused = False

    def is_done(self) -> bool:
        self.advance()
        return self.is_launched and bool(self._end.query())

    def advance(self) -> None:
        """Launch the next segments, ahead of the one that runs, so that the device does not wait for us."""
        segments, times_us = self._segments, self._plan.segment_us or [0.0]
        while self._launched < len(segments) and not self._is_paused:
            self._look()
            in_flight_us = times_us[self._ended : self._launched]
            if not can_launch(in_flight_us, (time.perf_counter() - self._began_s) * 1e6, times_us[self._launched]):
                return
            if not in_flight_us:
                self._began_s = time.perf_counter()
            self._runtime.launch_segment(self, segments[self._launched])
            self._launched += 1
            self._marks.append(self._runtime.mark(self._plan))
            if self._launched == len(segments):
                self._runtime.launch_end(self)

    def _look(self) -> None:
        """See which segments have ended."""
        while self._ended < self._launched and self._marks[self._ended].query():
            self._ended += 1
            self._began_s = time.perf_counter()

    def wait(self) -> None:
        """Block until it has ended, for threads that have nothing else to do."""
        while not self.is_launched:
            self._marks[-1].synchronize()  # the host has time
            self.advance()
        self._end.synchronize()

    def result(self) -> tuple[int, list[Any]]:
        device_us = self.device_us
        if self._keep is not None:
            columns: Any = [[DeviceTensor(row, self._end, self._runtime) for row in part.unbind(0)] for part in self._keep]
        else:
            copies = [self._runtime.to_numpy(part[: self._count]) for part in self._landing]
            columns = [list(copy) for copy in copies]
        self.free()
        return device_us, columns[0] if self._single else list(zip(*columns, strict=True))

    def free(self) -> None:
        if self._piece_marks:
            marks = [self._begin, *self._piece_marks]
            self._plan.set_piece_times([1000 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)])
            self._runtime.events += self._piece_marks
            self._piece_marks = []
        self._runtime.events += [*self._marks, *(end for _, end in self._pauses)]
        self._marks, self._pauses = [], []
        self._runtime.events += [self._begin, self._end] if self._keep is None else [self._begin]
        if self._staging is not None:
            self._plan.staging.put(self._staging)
        if self._landing is not None and self._plan.landing is not None:
            self._plan.landing.put(self._landing)


class CudaRuntime:
    """Runtime on a GPU. It owns the thread it is used in: the current stream is left as the last batch needed it.

    With a `driver` long graphs are cut into segments."""

    def __init__(self, driver: CudaDriver | None = None) -> None:
        import torch

        self._torch: Any = torch
        self._driver = driver
        self.events: list[Any] = []  #: free ones
        self._host_copy_stream: Any = None  #: stream for what was kept, and is needed on the host
        self._pools: dict[tuple[int, int], tuple[Any, WeakSet[CudaPlan]]] = {}  #: by mask and kind of graphs; with plans
        self.captures = 0
        turns = CaptureLock()
        self.capturing, self.no_capture = turns.capturing, turns.no_capture
        self._for_runs: dict[int, list[Any]] = {}  #: by mask: streams that are free at this moment
        self._for_captures: dict[int, list[Any]] = {}
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._input_memory: dict[tuple[int, int], Any] = {}  #: by mask and kind of graphs
        self._pinned_lock = threading.Lock()
        self._pinned: WeakValueDictionary[Any, PinnedBuffers] = WeakValueDictionary()  #: by shapes; plans hold them

    def plan(self, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice) -> CudaPlan:
        self._use(slice_)  # its buffers are cleared there, before anything reads them
        inputs = tuple(_like(self._torch, part, bucket, device="cuda") for part in example)
        return CudaPlan(work, example, bucket, slice_, inputs, self._staging(example, bucket))

    def launch(
        self, plan: CudaPlan, items: list[Any], *, after: Any = None, keep: bool = False, in_segments: bool = True
    ) -> CudaFlight:
        stream, count = plan.slice.torch_stream, len(items)
        self._use(plan.slice)
        begin, end = self._event(), self._event()
        flight = CudaFlight(self, plan, count, begin, end, keep, plan.segments if in_segments else ())
        if after is not None and not plan.waits_by_itself:
            stream.wait_event(after)
        begin.record(stream)
        if plan.is_captured and (items[0] is None or count < plan.bucket):
            for part in plan.inputs:  # another model's inputs were there, which may be no values of this one's
                part[0 if items[0] is None else count :].zero_()
        if items[0] is not None:
            self._fill(plan, items, flight, stream)
        plan.runs += 1
        if flight._segments:
            flight.advance()
            return flight
        if plan.graph is not None:
            plan.graph.replay()
            output = plan.outputs
        else:
            with self._torch.inference_mode():
                output = plan.work(*plan.inputs)
        self._take_outputs(flight, output)
        return flight

    def mark(self, plan: CudaPlan) -> Any:
        """An event in the stream of a plan, here and now."""
        event = self._event()
        event.record(plan.slice.torch_stream)
        return event

    def launch_segment(self, flight: CudaFlight, pieces: range) -> None:
        plan = flight._plan
        assert self._driver is not None
        for piece in pieces:
            self._driver.launch_graph(plan.pieces[piece], plan.slice.stream)
            if not plan.segment_us:  # its first run: each piece is timed
                flight._piece_marks.append(self.mark(plan))

    def launch_end(self, flight: CudaFlight) -> None:
        """After the last segment: take the results out of the graph's memory."""
        self._use(flight._plan.slice)
        self._take_outputs(flight, flight._plan.outputs)

    def _take_outputs(self, flight: CudaFlight, output: Any) -> None:
        plan, count = flight._plan, flight._count
        parts = output if isinstance(output, tuple | list) else (output,)
        flight._single = parts is not output
        if flight._keeps:
            flight._keep = [part[:count].clone() for part in parts]
        else:
            if plan.landing is None:
                plan.landing = self._landing(parts, plan.bucket)
            flight._landing = plan.landing.take()
            for landing, part in zip(flight._landing, parts, strict=True):
                if count == plan.bucket:
                    landing.copy_(part, non_blocking=True)
                else:
                    landing[:count].copy_(part[:count], non_blocking=True)
        flight._end.record(plan.slice.torch_stream)

    def _use(self, slice_: GreenSlice) -> None:
        """Make the slice's stream current, unless it is: looking is ten times cheaper than setting."""
        if self._raw_stream(slice_.torch_stream.device_index) != slice_.stream:
            self._torch.cuda.set_stream(slice_.torch_stream)

    def _capture(self, plan: CudaPlan, block: Any, stream: Any, expected_us: int, kind: int) -> None:
        """Capture on `stream`, which is current. The driver is asked which slice that is: a graph stays where it was captured.

        With the block its weights are in, the graph itself waits for them, layer by layer. One that is expected to take long is
        cut."""
        torch = self._torch
        assert plan.slice.owns(torch.cuda.current_stream().cuda_stream), "a graph would be captured outside its slice"
        is_cut = kind != WHOLE
        pool, users = self._pool(plan.slice.mask, kind)
        graph = torch.cuda.CUDAGraph(keep_graph=True) if is_cut else torch.cuda.CUDAGraph()
        with torch.inference_mode(), _no_collection(), layerwise_wait(plan.work, block, stream) as waiting:
            torch._C._cuda_clearCublasWorkspaces()  # so that they are made inside, in the pool
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                plan.outputs = plan.work(*plan.inputs)
            finally:
                graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()  # and the next graph of the slice has the same
        users.add(plan)
        plan.waits_by_itself = waiting.is_complete
        if is_cut:
            graph.instantiate()  # the whole is kept: it runs where nothing could preempt it
            self._cut(plan, graph, expected_us)
        plan.graph = graph
        plan.is_captured = True
        self.captures += 1

    def wants_segments(self, took_us: int) -> bool:
        """Whether a graph whose replay took so long is to be captured again, in segments."""
        return self._driver is not None and is_long(took_us)

    def _cut(self, plan: CudaPlan, graph: Any, expected_us: int) -> None:
        """Cut a captured graph into pieces, unless it must stay whole."""
        driver = self._driver
        assert driver is not None
        raw = graph.raw_cuda_graph()
        nodes = driver.graph_nodes(raw)
        bounds = piece_bounds(len(nodes or ()), expected_us)
        if nodes is None or len(bounds) < 3:
            return
        plan.set_pieces(cut_graph(driver, raw, nodes, bounds), driver.destroy_graph)

    def _input_views(self, example: Sequence[Any], bucket: int, mask: int, kind: int) -> tuple[Any, ...]:
        """Memory of a graph's inputs. Graphs that share a pool share it too: one runs after the other, and after its inputs."""
        torch = self._torch
        sizes = [bucket * part[:1].numel() * part.element_size() for part in example]
        places = list(itertools.accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        memory = self._input_memory.get((mask, kind))
        if memory is None or memory.numel() < places[-1]:
            memory = torch.zeros(max(places[-1], _ALIGN), dtype=torch.uint8, device="cuda")
            self._input_memory[mask, kind] = memory
        views = []
        for part, place, size in zip(example, places, sizes, strict=False):
            flat = memory[place : place + size].view(part.dtype)
            if _is_channels_last(torch, part):
                channels, height, width = part.shape[1:]
                views.append(flat.view(bucket, height, width, channels).permute(0, 3, 1, 2))
            else:
                views.append(flat.view(bucket, *part.shape[1:]))
        return tuple(views)

    def _pool(self, mask: int, kind: int) -> tuple[Any, WeakSet[CudaPlan]]:
        """Memory pool of the graphs of one slice. With its last graph it is gone for good: then there is a new one."""
        found = self._pools.get((mask, kind))
        if found is None or not found[1]:
            found = self._pools[mask, kind] = (self._torch.cuda.graph_pool_handle(), WeakSet())
        return found

    def trim(self) -> None:
        """Return cached memory to the device: that of graphs that are no more, say, 200 to 500 MiB a function.

        Waits for the device; not while serving."""
        self._torch._C._cuda_clearCublasWorkspaces()
        self._torch.cuda.empty_cache()

    def warmup_run(self, work: Work, example: Sequence[Any], bucket: int, slice_: GreenSlice, after: Any = None) -> WarmupRun:
        """Run on a stream of the slice without other users, and wait for it: libraries choose and compile their kernels."""
        torch = self._torch
        before = int(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode(), self._own_stream(self._for_runs, slice_) as stream:
            if after is not None:
                stream.wait_event(after)
            inputs = tuple(_like(torch, part, bucket, device="cuda") for part in example)
            try:
                work(*inputs)
            except torch.OutOfMemoryError:
                return WarmupRun()  # then a batch that large is halved when it comes
            stream.synchronize()
        return WarmupRun((int(torch.cuda.max_memory_allocated()) - before) >> 20)

    def capture(
        self,
        work: Work,
        example: Sequence[Any],
        bucket: int,
        slice_: GreenSlice,
        block: Any = None,
        work_sm_us: int = 0,
        patience: int = 0,
    ) -> CudaPlan:
        """Capture a graph on a stream of the slice without other users; one at a time, inside `capturing`."""
        with self._own_stream(self._for_captures, slice_) as stream:
            expected_us = work_sm_us // slice_.sms
            is_cut = self._driver is not None and is_long(expected_us)
            kind = CUT + patience if is_cut else WHOLE
            inputs = self._input_views(example, bucket, slice_.mask, kind)
            plan = CudaPlan(work, example, bucket, slice_, inputs, self._staging(example, bucket))
            stream.synchronize()
            self._capture(plan, block, stream, expected_us, kind)
        parts = plan.outputs if isinstance(plan.outputs, tuple | list) else (plan.outputs,)
        plan.landing = self._landing(parts, bucket)

        batch_bytes = sum(int(part.nbytes) for part in plan.inputs)
        ready = max(READY_BUFFERS[0], min(READY_BUFFERS[1], READY_BYTES // max(1, batch_bytes)))
        plan.staging.fill(ready)
        plan.landing.fill(ready)
        return plan

    @contextmanager
    def _own_stream(self, free: dict[int, list[Any]], slice_: GreenSlice) -> Iterator[Any]:
        """A stream of the slice without other users, current inside.

        They are used again and again, for streams are not destroyed, nor what libraries keep for each of them. What a library
        keeps for the stream of a capture may be used by its graph; no warm-up run may write to it while the graph serves, so
        these have streams of their own."""
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
                flight._staging = plan.staging.take()
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

    def _staging(self, example: Sequence[Any], bucket: int) -> PinnedBuffers:
        """Buffers for batches of inputs like the example: pairs of a tensor and the same as numpy has it."""
        torch = self._torch
        key = ("in", bucket, *((part.dtype, tuple(part.shape[1:]), _is_channels_last(torch, part)) for part in example))

        def make() -> tuple[Any, ...]:
            made = [_like(torch, part, bucket, device="cpu", pin_memory=True) for part in example]
            return tuple((pinned, None if pinned.dtype is torch.bfloat16 else pinned.numpy()) for pinned in made)

        return self._buffers(key, make)

    def _landing(self, parts: Sequence[Any], bucket: int) -> PinnedBuffers:
        """Buffers for batches of results like these."""
        shapes = tuple((part.dtype, (bucket, *part.shape[1:])) for part in parts)

        def make() -> tuple[Any, ...]:
            return tuple(self._torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for dtype, shape in shapes)

        return self._buffers(("out", *shapes), make)

    def _buffers(self, key: Any, make: Callable[[], tuple[Any, ...]]) -> PinnedBuffers:
        with self._pinned_lock:
            found = self._pinned.get(key)
            if found is None:
                found = self._pinned[key] = PinnedBuffers(make)
            return found

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
    layout = torch.channels_last if _is_channels_last(torch, example) else torch.contiguous_format
    return torch.empty((bucket, *example.shape[1:]), dtype=example.dtype, memory_format=layout, **options).zero_()


def _is_channels_last(torch: Any, part: Any) -> bool:
    return bool(part.dim() == 4 and not part.is_contiguous() and part.is_contiguous(memory_format=torch.channels_last))
