"""Loaded functions inside the executor of a GPU: how one is opened, and how its batches run.

Two kinds. A `TorchModel` is a module: its batches go to the slice executor, which replays graphs and never waits. Anything else
is a callable: it runs in a thread of its slice, with the slice's stream current, and may wait for the device as long as it
likes without holding up other functions.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lamina.gpu.function_threads import FunctionThreads
from lamina.gpu.kernel_module import NvrtcLauncher, device_module
from lamina.gpu.slicer import DeviceSlice, Slicer, all_masks
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.function import Function
from lamina.sdk.loaded_kernel_graph import LoadedKernelGraph
from lamina.sdk.runner import Runner
from lamina.sdk.torch_model import LoadedTorchModel, to_numpy
from lamina.worker.otel_context import attach_trace

PREPARED_BLOCKS = 16
"""Slices of its usual size for which graphs are captured in advance; further ones when they are used."""


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """A function that is loaded in this executor. Written by its own methods alone.

    What is known of its graphs, and of those still to be captured, is the capture queue's (`graph_capture.FunctionGraphs`)."""

    instance: str
    function: Function[..., Any]
    runner: Runner
    mask: int  #: a slice as it will usually get: its home, or the first of its size
    threads: FunctionThreads  #: its own, for users' code
    work: Any = None  #: of a model: what the executor runs, and an example for it
    example: Sequence[Any] = ()
    staged: Any = None  #: its weights in pinned memory, until they have a block
    shared: FunctionThreads | None = None  #: of its architecture, for first runs and graphs; None: its own
    took_us: dict[str, int] = field(default_factory=dict)  #: where the time of its load went
    was_standby: bool = False  #: it was opened in a standby, before it was needed
    warm_buckets: set[int] = field(default_factory=set)  #: sizes its primary thread has run
    row_bytes: int = 0  #: of one result, once one has been seen
    is_unloading: bool = False
    batches: set[int] = field(default_factory=set)  #: in flight
    eager_batches: int = 0  #: of these, those with its primary thread, for want of a graph
    reads_state: bool = False  #: in `pre` or `post` of a model, which have a thread then
    host_thread: ThreadPoolExecutor | None = None
    buckets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = buckets_for(self.function.spec.max_batch)

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def first_buckets(self) -> tuple[int, ...]:
        """The smallest and the largest batch size: enough to serve any batch, padded."""
        return tuple(dict.fromkeys((1, self.buckets[-1])))

    @property
    def model(self) -> LoadedTorchModel | LoadedKernelGraph | None:
        return self.runner.model

    @property
    def weights_bytes(self) -> int:
        return int(self.staged.size) if self.staged is not None else 0

    @property
    def takes_device_values(self) -> bool:
        """Can it read values on the device?"""
        return self.model is not None and self.model.takes_device_values

    # --------------------------------------------------------------------- its life

    def take_over(self, instance: str, mask: int) -> None:
        """It stood by: from now on it is this instance, with this usual slice."""
        self.instance, self.mask, self.was_standby = instance, mask, True
        self.took_us.clear()

    def move(self, mask: int) -> None:
        self.mask = mask

    @property
    def makers(self) -> FunctionThreads:
        """The threads that run it for the first time, capture its graphs, and run batches without one."""
        return self.shared or self.threads

    def leave_shared(self) -> FunctionThreads | None:
        """From now on its own threads do everything; returns those that it shared."""
        shared, self.shared = self.shared, None
        if shared is not None:
            self.warm_buckets.clear()
        return shared

    def on_weights_placed(self) -> None:
        """Its block has them; of equal ones there is one."""
        self.staged = None

    def begin_unload(self) -> None:
        self.is_unloading = True

    def on_state_read(self) -> None:
        self.reads_state = True

    def run_on_host(self, work: Callable[[], None]) -> None:
        """Run `pre` or `post` of a model in a thread, where it may wait."""
        if self.host_thread is None:
            self.host_thread = ThreadPoolExecutor(1, f"host-{self.name}")
        self.host_thread.submit(work)

    def close(self, then: Callable[[], None]) -> None:
        """Close its runner and retire its threads; `then` is called in its primary thread, when it has left."""
        if self.host_thread is not None:
            self.host_thread.shutdown(wait=False)
        self.threads.retire(lambda: close_runner(self.name, self.runner), then)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add_time(part, (time.monotonic_ns() - begin_ns) // 1000)

    def add_time(self, part: str, took_us: int) -> None:
        self.took_us[part] = self.took_us.get(part, 0) + took_us

    # ------------------------------------------------------------------- its batches

    def on_warm(self, bucket: int) -> None:
        """Its primary thread has run this size: libraries have chosen their kernels."""
        self.warm_buckets.add(bucket)

    def on_batch_started(self, batch_id: int) -> None:
        self.batches.add(batch_id)

    def on_batch_ended(self, batch_id: int) -> None:
        self.batches.discard(batch_id)

    def on_eager_started(self) -> None:
        self.eager_batches += 1

    def on_eager_ended(self) -> None:
        self.eager_batches -= 1

    def on_outputs(self, outputs: Sequence[Any] | None) -> None:
        """Remember how large a result is."""
        if outputs:
            self.row_bytes = getattr(outputs[0], "nbytes", 0)


def close_runner(name: str, runner: Runner) -> None:
    """Close the user's code, in the primary thread: it may take long, or fail."""
    try:
        runner.close()
    except BaseException as error:
        os.write(2, f"lamina: {name} could not be closed: {error!r}\n".encode(errors="replace"))


def buckets_for(most: int) -> tuple[int, ...]:
    """Batch sizes with graphs: powers of two, and the largest batch itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return (*sizes, most) if most > 1 else (1,)


def model_work(model: LoadedTorchModel | LoadedKernelGraph, has_device: bool) -> tuple[Any, Sequence[Any]]:
    """What the executor runs for a model, and a batch of one as example: a module on a device, a callable on the host."""
    if isinstance(model, LoadedTorchModel):
        is_module = has_device or not hasattr(model.module, "parameters")
        return model.module if is_module else host_forward(model), model.example
    if not has_device:
        return model.host, model.example
    import torch

    launcher = NvrtcLauncher(int(torch.cuda.current_device()))
    return device_module(model.graph, model.plan, launcher, lambda: int(torch.cuda.current_stream().cuda_stream))


def host_forward(model: LoadedTorchModel) -> Callable[..., Any]:
    """The forward pass on arrays of the host, for executors without a GPU."""
    import torch

    def work(*arrays: Any) -> Any:
        with torch.inference_mode():
            output = model.module(*[torch.from_numpy(array) for array in arrays])
        if isinstance(output, tuple | list):
            return tuple(to_numpy(part) for part in output)
        return to_numpy(output)

    return work


def usual_mask(function: Function[..., Any], slicer: Slicer, home: int) -> int:
    return home or (1 << function.spec.units_on(slicer.device)) - 1


def likely_masks(slicer: Slicer, loaded: LoadedFunction, home: int) -> list[int]:
    """The slices a function is likely to run on: its home; the blocks of its usual size, those of others while its home is busy;
    and the largest, if its calls are to be answered as soon as can be, or its home has neighbours that may be idle."""
    blocks, spec = all_masks(slicer.device), loaded.function.spec
    same = [block for block in blocks if block.bit_count() == loaded.mask.bit_count() and block != home]
    found = ([home] if home else []) + same[:PREPARED_BLOCKS]
    largest = max(blocks, key=int.bit_count)
    return found + ([largest] if largest not in found and (home or spec.objective == "latency") else [])


@dataclass(frozen=True, slots=True)
class CallableBatch:
    """A batch for a callable."""

    batch_id: int
    runner: Runner
    calls: Sequence[dict[str, Any]]
    context: BatchContext
    cores: Sequence[int] = ()  #: of the host, that go with the slice; none: any


class SliceThread:
    """Thread of one slice, for callables. Results come back by `done(batch_id, device_us, outputs)`, called in this thread."""

    def __init__(self, slice_: DeviceSlice, done: Callable[[int, int, list[Any]], None]) -> None:
        self._slice = slice_
        self._done = done
        self._todo: queue.SimpleQueue[CallableBatch] = queue.SimpleQueue()
        self._cores: Sequence[int] = ()
        threading.Thread(target=self._work, daemon=True, name=f"slice-{slice_.mask:x}").start()

    def put(self, piece: CallableBatch) -> None:
        self._todo.put(piece)

    def _work(self) -> None:
        while True:
            piece = self._todo.get()
            if piece.cores and piece.cores != self._cores:
                os.sched_setaffinity(0, piece.cores)  # of this thread, and of those that it starts
                self._cores = piece.cores
            started_ns = time.perf_counter_ns()
            try:
                with self._slice, active_context(piece.context), attach_trace(piece.context):
                    outputs = [on_host(output) for output in piece.runner.run(list(piece.calls))]
                    self._slice.synchronize()  # what it started and did not wait for is part of its time
            except BaseException as error:  # SystemExit too: a function may end its call, not its executor
                outputs = [error] * len(piece.calls)
            self._done(piece.batch_id, (time.perf_counter_ns() - started_ns) // 1000, outputs)


def on_host(value: Any) -> Any:
    """Convert tensors to arrays, wherever they are in a value."""
    if isinstance(value, dict):
        return {key: on_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [on_host(inner) for inner in value]
    return to_numpy(value) if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach") else value
