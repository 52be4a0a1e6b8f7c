"""Batches of many functions on the slices of one device, from one thread, without ever waiting.

    executor.load("resnet", module, example)            a torch module, or a callable that works on the current stream
    ticket = executor.submit("resnet", items, mask)     returns at once
    for finished in executor.poll(): ...                what has come to its end, with the device time it took

A batch is padded to the next bucket. The first runs of a (function, bucket, slice) are eager; its graph is captured when
there is nothing else to do, or at the third run. Moving a function to another slice is nothing but the next `submit` with
another mask; `prepare` captures there first, while the old slice serves. Items of a batch must not depend on each other:
the rows of a bucket that a batch leaves free hold what was there before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lamina.errors import BadValue, LaminaError, LoadFailed, UnknownTarget
from lamina.gpu.runtime import HostRuntime, Runtime
from lamina.gpu.slicer import Slicer

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
CAPTURE_AT_LATEST = 2
"""Eager runs before a graph is captured even though others have to wait for it."""


class ExecutorLost(LaminaError):
    """The device has reported an error that does not go away: this process must be replaced."""

    status = 503
    code: ClassVar[str] = "executor-lost"


@dataclass(frozen=True, slots=True)
class Finished:
    ticket: int
    device_us: int
    outputs: list[Any] | None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Function:
    name: str
    work: Callable[..., Any]
    example: Sequence[Any]
    buckets: tuple[int, ...]
    graphs: bool
    pre: Callable[[Any], Any] | None
    post: Callable[[Any], Any] | None
    block: Any = None  #: its weights, if they are ours to move
    largest: int = 0  #: items that are known to fit into memory together
    is_made_elsewhere: bool = False  #: its graphs come by `adopt`
    plans: dict[tuple[int, int], Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A submitted batch, which may run in pieces."""

    id: int
    outputs: list[Any]
    open_pieces: int = 0
    device_us: int = 0
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    ticket: _Ticket
    function: _Function
    first: int
    items: list[Any]
    mask: int
    keep: bool
    flight: Any = None


class Executor:
    def __init__(self, slicer: Slicer, runtime: Runtime | None = None, weights: Any = None) -> None:
        """`weights` moves parameters to and fro (`lamina.gpu.weights`); without it a module stays where it is."""
        self.slicer = slicer
        self._runtime: Runtime = runtime or HostRuntime()
        self._weights = weights
        self._functions: dict[str, _Function] = {}
        self._lanes: dict[int, deque[_Piece]] = {}
        self._over: list[Finished] = []  #: ended before they reached the device
        self._uncaptured: dict[tuple[str, int, int], tuple[_Function, Any]] = {}
        self._warming: list[tuple[_Function, Any]] = []  #: runs for nobody, before a graph is captured
        self._tickets = 0
        self._lost = ""

    # ---------------------------------------------------------------- functions

    def load(
        self,
        name: str,
        module: Callable[..., Any],
        example: Any,
        cap_mib: int = 0,
        *,
        buckets: Sequence[int] = BUCKETS,
        graphs: bool = True,
        pre: Callable[[Any], Any] | None = None,
        post: Callable[[Any], Any] | None = None,
        staged: Any = None,
        made_elsewhere: bool = False,
    ) -> int:
        """Ready to be called; returns the memory it needs in MiB. `example` is a batch of one, or a tuple of such.

        With a cap, the largest bucket is tried at once, and a function that needs more than it declared is refused.
        `staged` is what `stage` made of the module's weights; without it, that is done here.
        """
        if name in self._functions:
            raise BadValue(f"{name!r} is loaded already", hint="unload it first")
        parts = example if isinstance(example, tuple | list) else (example,)
        function = _Function(name, module, parts, tuple(sorted(buckets)), graphs, pre, post, largest=max(buckets))
        function.is_made_elsewhere = made_elsewhere
        if self._weights is not None and hasattr(module, "parameters"):
            function.block = self._weights.add(name, staged or self._weights.stage(module))
        self._functions[name] = function
        need_mib = self._need_mib(function) if cap_mib else 0
        if need_mib > cap_mib:
            while self._warming:
                self._cool()
            self.unload(name)
            raise LoadFailed(
                f"{name!r} needs {need_mib} MiB at {function.buckets[-1]} items, and declared {cap_mib}",
                hint="declare more memory, or a smaller max_batch",
            )
        return need_mib

    def stage(self, module: Any, digest: str = "") -> Any:
        """The slow part of a load, for any thread; None where weights are not ours to move."""
        return self._weights.stage(module, digest) if self._weights is not None and hasattr(module, "parameters") else None

    # Graphs made elsewhere. A library chooses and compiles its kernels when a shape is first met, which takes seconds, and
    # cuDNN remembers them for each thread by itself. So a thread of the function's own makes its graphs: it warms up, captures,
    # and hands over; the thread that serves only replays.

    def warm(self, name: str, bucket: int, mask: int) -> int:
        """A first run of this size, waited for; for a maker's thread, between `hold` and `let_go`. The MiB beside the weights."""
        function = self._function(name)
        return self._runtime.warm(function.work, function.example, bucket, self.slicer.slice(mask), self._arrived(function))

    def make(self, name: str, bucket: int, mask: int) -> Any:
        """A captured plan, for `adopt`, or why there is none; for a maker's thread, between `hold` and `let_go`, after `warm`."""
        function = self._function(name)
        try:
            return self._runtime.make(function.work, function.example, bucket, self.slicer.slice(mask), function.block)
        except Exception as error:
            if self._runtime.is_broken(error):
                raise
            return error

    def adopt(self, name: str, bucket: int, mask: int, plan: Any) -> None:
        """Serve with it from now on. It runs once for nobody: the first replay uploads the graph, which takes a millisecond."""
        function = self._function(name)
        if isinstance(plan, Exception):
            if self._runtime.is_out_of_memory(plan):
                function.largest = max(1, min(function.largest, bucket // 2))
            else:  # it waits for the device, say: then it stays eager, and serves all the same
                function.graphs = False
            return
        function.plans[bucket, mask] = plan
        self._warm_up(function, plan, bucket)

    def is_ready(self, name: str, count: int, mask: int) -> bool:
        """Can a batch of this size run here without making anything first?"""
        function = self._function(name)
        return not function.graphs or any(size >= min(count, function.largest) for size, at in function.plans if at == mask)

    def bucket_for(self, name: str, count: int) -> int:
        function = self._function(name)
        return next(size for size in function.buckets if size >= min(count, function.largest))

    def hold(self, name: str) -> None:
        """Its weights stay where they are until `let_go`."""
        self._bring(self._function(name))

    def let_go(self, name: str) -> None:
        block = self._function(name).block
        if block is not None:
            self._weights.shelf.done(block.key)

    def weights_of_mib(self, name: str) -> int:
        block = self._function(name).block
        return int(block.room) >> 20 if block is not None else 0

    def unload(self, name: str) -> None:
        """What it has running ends first, by poll()."""
        function = self._function(name)
        self._cool()
        running = [piece.function for lane in self._lanes.values() for piece in lane] + [entry[0] for entry in self._warming]
        if any(one is function for one in running):
            raise BadValue(f"{name!r} has batches under way", hint="poll until they have finished")
        del self._functions[name]
        for key in [key for key in self._uncaptured if key[0] == name]:
            del self._uncaptured[key]
        function.plans.clear()
        if function.block is not None:
            self._weights.remove(name, function.block)

    def prepare(self, name: str, masks: Iterable[int], buckets: Iterable[int] = ()) -> None:
        """Graphs for these slices, now: before a function moves there, so that the move costs nothing."""
        function = self._function(name)
        for mask in masks:
            for bucket in buckets or function.buckets:
                plan = self._plan(function, bucket, mask)
                if function.graphs and not plan.is_captured:
                    if not plan.runs:
                        self._warm_up(function, plan, bucket)
                    self._capture(function, plan, bucket, mask)
                    self._warm_up(function, plan, bucket)  # the first replay uploads the graph, which takes a millisecond

    # ---------------------------------------------------------------- batches

    def submit(self, function: str, inputs: list[Any], mask: int, *, keep: bool = False) -> int:
        """Items as `example` shows them, without its first dimension. `keep` leaves the results on the device."""
        if self._lost:
            raise ExecutorLost(self._lost)
        target = self._function(function)
        if not inputs or len(inputs) > target.buckets[-1]:
            raise BadValue(f"{len(inputs)} items for {function!r}", hint=f"1 to {target.buckets[-1]} at a time")
        self._tickets += 1
        ticket = _Ticket(self._tickets, [None] * len(inputs))
        self.slicer.slice(mask)  # a mask that is none is the caller's mistake, and raised here
        try:
            items = [target.pre(item) for item in inputs] if target.pre else inputs
        except Exception as error:
            self._over.append(Finished(ticket.id, 0, None, error))
            return ticket.id
        for first in range(0, len(items), target.largest):
            ticket.open_pieces += 1
            self._start(_Piece(ticket, target, first, items[first : first + target.largest], mask, keep))
        return ticket.id

    def poll(self) -> list[Finished]:
        """What has ended since the last time. With nothing to tell, it captures one graph that is still missing."""
        done, self._over = self._over, []
        if self._lost and not done:
            raise ExecutorLost(self._lost)
        try:
            for mask in list(self._lanes):
                lane = self._lanes[mask]
                while lane and lane[0].flight.is_done():
                    self._finish(lane.popleft(), done)
                if not lane:
                    del self._lanes[mask]
            if self._warming:
                self._cool()
        except Exception as error:
            self._lose(error, done)
        if not done and self._uncaptured and not self._lanes:
            self._capture_one()
        return done

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def has_work(self) -> bool:
        """Is there a reason to poll?"""
        return bool(self._lanes or self._over or self._warming or self._uncaptured)

    def is_warming(self, name: str) -> bool:
        """Has it runs for nobody under way?"""
        return any(entry[0].name == name for entry in self._warming)

    def is_broken(self, error: BaseException) -> bool:
        """Is it the device that failed, and not the code on it?"""
        return self._runtime.is_broken(error)

    @property
    def graphs(self) -> int:
        return sum(plan.is_captured for function in self._functions.values() for plan in function.plans.values())

    @property
    def weights_mib(self) -> int:
        """Of the device, under weights."""
        return self._weights.shelf.used >> 20 if self._weights is not None else 0

    @property
    def evictions(self) -> int:
        return self._weights.shelf.evictions if self._weights is not None else 0

    # ---------------------------------------------------------------- inside

    def _start(self, piece: _Piece) -> None:
        function, count = piece.function, len(piece.items)
        try:
            self._bring(function)
            bucket = self._bucket(function, count, piece.mask)
            plan = self._plan(function, bucket, piece.mask)
            if function.graphs and not plan.is_captured and plan.runs >= CAPTURE_AT_LATEST:
                self._capture(function, plan, bucket, piece.mask)
            piece.flight = self._runtime.launch(plan, self._tuples(piece.items), after=self._arrived(function), keep=piece.keep)
        except Exception as error:
            if function.block is not None and function.block.key in self._weights.shelf:
                self._weights.shelf.done(function.block.key)
            self._failed(piece, error)
            return
        if function.graphs and not plan.is_captured:
            self._uncaptured[function.name, bucket, piece.mask] = (function, plan)
        self._lanes.setdefault(piece.mask, deque()).append(piece)

    @staticmethod
    def _bucket(function: _Function, count: int, mask: int) -> int:
        """The smallest that holds them; of a function whose graphs are made elsewhere, the smallest that is made."""
        sizes = [size for size in function.buckets if size >= count]
        if function.is_made_elsewhere:
            return next((size for size in sizes if (size, mask) in function.plans), sizes[0])
        return sizes[0]

    def _failed(self, piece: _Piece, error: Exception) -> None:
        """Out of memory halves the piece, and what comes later; anything else ends this batch and nobody else's, unless it is
        the device that is broken."""
        count = len(piece.items)
        if self._runtime.is_broken(error):
            self._lost = f"the device failed: {error}"
            error = ExecutorLost(self._lost)
        if count > 1 and self._runtime.is_out_of_memory(error):
            half = count // 2
            piece.function.largest = min(piece.function.largest, max(1, half))
            piece.ticket.open_pieces += 1
            for first, items in ((0, piece.items[:half]), (half, piece.items[half:])):
                self._start(_Piece(piece.ticket, piece.function, piece.first + first, items, piece.mask, piece.keep))
            return
        piece.ticket.error = piece.ticket.error or error
        self._close_piece(piece, self._over)

    def _finish(self, piece: _Piece, done: list[Finished]) -> None:
        function, ticket = piece.function, piece.ticket
        if self._lost:
            ticket.error = ticket.error or ExecutorLost(self._lost)
        else:
            try:
                device_us, outputs = piece.flight.result()
                ticket.device_us += device_us
                if function.post is not None:
                    outputs = [function.post(output) for output in outputs]
                ticket.outputs[piece.first : piece.first + len(piece.items)] = outputs
            except Exception as error:
                ticket.error = ticket.error or error
        if function.block is not None:
            self._weights.shelf.done(function.block.key)
        self._close_piece(piece, done)

    def _close_piece(self, piece: _Piece, done: list[Finished]) -> None:
        ticket = piece.ticket
        ticket.open_pieces -= 1
        if ticket.open_pieces == 0:
            outputs = ticket.outputs if ticket.error is None else None
            done.append(Finished(ticket.id, ticket.device_us, outputs, ticket.error))

    def _lose(self, error: Exception, done: list[Finished]) -> None:
        """Errors of the device are for ever, and everybody's: all that is under way ends."""
        self._lost = f"the device failed: {error}"
        for lane in self._lanes.values():
            for piece in lane:
                self._finish(piece, done)
        self._lanes.clear()

    def _warm_up(self, function: _Function, plan: Any, bucket: int) -> None:
        """A run for nobody. Its weights count as used until it has ended."""
        self._bring(function)
        self._warming.append((function, self._runtime.launch(plan, [None] * bucket, after=self._arrived(function))))

    def _cool(self) -> None:
        ended = [entry for entry in self._warming if entry[1].is_done()]
        for entry in ended:
            self._warming.remove(entry)
            if entry[0].block is not None:
                self._weights.shelf.done(entry[0].block.key)

    def _capture_one(self) -> None:
        (_, bucket, mask), (function, plan) = next(iter(self._uncaptured.items()))
        self._capture(function, plan, bucket, mask)

    def _capture(self, function: _Function, plan: Any, bucket: int, mask: int) -> None:
        """A function that cannot be captured (it waits for the device, say) stays eager, and serves all the same."""
        self._uncaptured.pop((function.name, bucket, mask), None)
        try:
            self._runtime.capture(plan, function.block)
        except Exception as error:
            function.graphs = False
            if self._runtime.is_out_of_memory(error):
                function.largest = max(1, min(function.largest, bucket // 2))

    def _plan(self, function: _Function, bucket: int, mask: int) -> Any:
        plan = function.plans.get((bucket, mask))
        if plan is None:
            slice_ = self.slicer.slice(mask)
            plan = function.plans[bucket, mask] = self._runtime.plan(function.work, function.example, bucket, slice_)
        return plan

    def _bring(self, function: _Function) -> None:
        if function.block is not None:
            self._weights.bring(function.block)
            self._weights.shelf.use(function.block.key)

    def _arrived(self, function: _Function) -> Any:
        return function.block.to_wait_for() if function.block is not None else None

    def _need_mib(self, function: _Function) -> int:
        """Weights and the peak of one run of the largest bucket on the whole device."""
        import torch

        mask = (1 << self.slicer.device.units) - 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plan = self._plan(function, function.buckets[-1], mask)
        self._warm_up(function, plan, function.buckets[-1])
        peak = int(torch.cuda.max_memory_allocated()) - int(before)
        return peak + (int(function.block.room) if function.block else 0) >> 20

    def _function(self, name: str) -> _Function:
        found = self._functions.get(name)
        if found is None:
            raise UnknownTarget(f"{name!r} is not loaded", hint=f"there are {', '.join(self._functions) or 'none'}")
        return found

    @staticmethod
    def _tuples(items: list[Any]) -> list[Any]:
        return [item if isinstance(item, tuple | list) else (item,) for item in items]


def on_gpu(slicer: Any, *, weights_mib: int = 0) -> Executor:
    """An executor on green slices; `weights_mib` is how much of the device may hold weights (0: four fifths)."""
    from lamina.gpu.cuda import CudaRuntime
    from lamina.gpu.weights import Weights

    capacity = weights_mib << 20 or slicer.driver.memory_bytes()[1] * 4 // 5
    return Executor(slicer, CudaRuntime(), Weights(slicer.driver, capacity))
