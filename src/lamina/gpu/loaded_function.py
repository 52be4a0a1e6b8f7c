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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lamina.gpu.function_threads import FunctionThreads
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.function import Function
from lamina.sdk.runner import Runner
from lamina.sdk.torch_model import LoadedTorchModel, TorchModel, to_numpy
from lamina.worker.otel_context import attach_trace

PREPARED_BLOCKS = 16
"""Slices of its usual size for which graphs are made before anybody asks; further ones when they are used."""


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """A function that is loaded in this executor."""

    instance: str
    function: Function[..., Any]
    runner: Runner
    mask: int  #: a slice as it will usually get: its home, or the first of its size
    threads: FunctionThreads
    staged: Any = None  #: its weights in pinned memory
    took_us: dict[str, int] = field(default_factory=dict)  #: where the time of its load went
    was_standby: bool = False  #: it was opened in a spare, before anybody asked for it
    clone: Any = None  #: its module once more, for a second thread
    likely: set[tuple[int, int]] = field(default_factory=set)  #: places (bucket, mask) whose graphs the maker makes
    to_capture: list[tuple[int, int]] = field(default_factory=list)  #: when there is time
    capturing: dict[tuple[int, int], bool] = field(default_factory=dict)  #: by the maker, or by the other thread?
    missed: dict[tuple[int, int], int] = field(default_factory=dict)  #: batches that found no graph there
    uncapturable: set[tuple[int, int]] = field(default_factory=set)  #: places where there can be none
    retry_on_primary: set[tuple[int, int]] = field(
        default_factory=set
    )  #: places the other thread tried in vain: was it its module?
    has_logged_failure: bool = False
    needed_for_ready: set[tuple[int, int]] = field(default_factory=set)  #: places without which it is not ready
    on_ready: Callable[[], None] | None = None  #: to be called when they are there
    eager_batches: int = 0  #: batches without a graph, with the maker
    warm_primary: set[int] = field(default_factory=set)  #: buckets the maker has met; its own
    warm_secondary: set[int] = field(default_factory=set)  #: and the other thread
    row_bytes: int = 0  #: of one result, once one has been seen
    is_leaving: bool = False
    batches: set[int] = field(default_factory=set)
    buckets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = buckets_for(self.function.spec.max_batch)

    @property
    def first_buckets(self) -> tuple[int, ...]:
        """The smallest and the largest batch size: enough to serve any batch, padded."""
        return tuple(dict.fromkeys((1, self.buckets[-1])))

    def is_for_primary(self, place: tuple[int, int]) -> bool:
        """Is this graph captured in the primary thread?"""
        return place in self.likely or place in self.retry_on_primary or self.clone is None

    @property
    def is_busy(self) -> bool:
        """Is any batch or capture of it under way?"""
        return bool(self.batches or self.capturing or self.eager_batches)

    def close(self, then: Callable[[], None]) -> None:
        """Close its runner and retire its threads; `then` is called in its primary thread, when it has left."""
        self.threads.retire(self.close_runner, then)

    def close_runner(self) -> None:
        """Close the user's code, in the primary thread: it may take long, or fail."""
        try:
            self.runner.close()
        except BaseException as error:
            os.write(2, f"lamina: {self.function.name} could not be closed: {error!r}\n".encode(errors="replace"))

    @property
    def model(self) -> LoadedTorchModel | None:
        return self.runner.model

    @property
    def weights_bytes(self) -> int:
        return int(self.staged.size) if self.staged is not None else 0

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.took_us[part] = self.took_us.get(part, 0) + (time.monotonic_ns() - begin_ns) // 1000

    @property
    def takes_device_values(self) -> bool:
        """Can it read values on the device? A user's own `pre` wants arrays of the host."""
        return self.model is not None and type(self.model.model).pre is TorchModel.pre


def buckets_for(most: int) -> tuple[int, ...]:
    """Batch sizes with graphs: powers of two, and the largest batch itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return (*sizes, most) if most > 1 else (1,)


def host_forward(model: LoadedTorchModel) -> Callable[..., Any]:
    """The module's forward pass on arrays of the host, for executors without a GPU."""
    import torch

    def work(*arrays: Any) -> Any:
        with torch.inference_mode():
            output = model.module(*[torch.from_numpy(array) for array in arrays])
        if isinstance(output, tuple | list):
            return tuple(to_numpy(part) for part in output)
        return to_numpy(output)

    return work


def usual_mask(function: Function[..., Any], slicer: Any, home: int) -> int:
    return home or (1 << function.spec.units_on(slicer.device)) - 1


def likely_masks(slicer: Any, mask: int, home: int) -> list[int]:
    """The slices a function is likely to run on: its home, or the blocks of its usual size."""
    from lamina.gpu.slicer import all_masks

    if home:
        return [home]
    same = [block for block in all_masks(slicer.device) if block.bit_count() == mask.bit_count()]
    return same[:PREPARED_BLOCKS]


@dataclass(frozen=True, slots=True)
class CallableBatch:
    """A batch for a callable."""

    batch_id: int
    runner: Runner
    calls: Sequence[dict[str, Any]]
    context: BatchContext


class SliceThread:
    """Thread of one slice, for callables. Results come back by `done(batch_id, device_us, outputs)`, called in this thread."""

    def __init__(self, slice_: Any, done: Callable[[int, int, list[Any]], None]) -> None:
        self._slice = slice_
        self._done = done
        self._todo: queue.SimpleQueue[CallableBatch] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name=f"slice-{slice_.mask:x}").start()

    def put(self, piece: CallableBatch) -> None:
        self._todo.put(piece)

    def _work(self) -> None:
        while True:
            piece = self._todo.get()
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
