"""Slice executor: batches of many models on the slices of one device, from one thread, without ever waiting.

    executor.load("resnet", module, example)            a torch module, or a callable that works on the current stream
    ticket = executor.submit("resnet", items, mask)     returns at once
    for finished in executor.poll(): ...                what has come to its end, with the device time it took

A batch is padded to the next bucket and runs by the plan of (model, bucket, slice), which `gpu/models.py` keeps. Moving a
model to another slice is nothing but the next `submit` with another mask; `prepare` captures there first, while the old
slice serves. Items of a batch must not depend on each other: the rows of a bucket that a batch leaves free hold what was
there before.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lamina.errors import BadValue, LaminaError, LoadFailed
from lamina.gpu.functions import Functions, Loaded
from lamina.gpu.runtime import HostRuntime, Runtime
from lamina.gpu.slicer import Slicer

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class ExecutorLost(LaminaError):
    """A device error that does not go away: this process must be replaced."""

    status = 503
    code: ClassVar[str] = "executor-lost"


@dataclass(frozen=True, slots=True)
class Finished:
    ticket: int
    device_us: int
    outputs: list[Any] | None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Ticket:
    """A submitted batch, which may run in parts."""

    id: int
    outputs: list[Any]
    open_pieces: int = 0
    device_us: int = 0
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    ticket: _Ticket
    function: Loaded
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
        self.functions = Functions(slicer, self._runtime, weights)
        self._lanes: dict[int, deque[_Piece]] = {}
        self._over: list[Finished] = []  #: ended before they reached the device
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
        """Load a model; returns the memory it needs in MiB. `example` is a batch of one, or a tuple of such.

        With a cap, the largest bucket is tried at once, and a model that needs more than it declared is rejected.
        `staged` is what `models.stage` made of the module's weights; without it, that is done here.
        """
        parts = example if isinstance(example, tuple | list) else (example,)
        function = Loaded(name, module, parts, tuple(sorted(buckets)), graphs, pre, post, made_elsewhere)
        self.functions.add(function, staged)
        need_mib = self._need_mib(function) if cap_mib else 0
        if need_mib > cap_mib:
            while self.functions.cool():
                pass
            self.unload(name)
            raise LoadFailed(
                f"{name!r} needs {need_mib} MiB at {function.buckets[-1]} items, and declared {cap_mib}",
                hint="declare more memory, or a smaller max_batch",
            )
        return need_mib

    def unload(self, name: str) -> None:
        """Unload a model. What it has running ends first, by poll()."""
        function = self.functions[name]
        self.functions.cool()
        running = any(piece.function is function for lane in self._lanes.values() for piece in lane)
        if running or self.functions.is_warming(name):
            raise BadValue(f"{name!r} has batches under way", hint="poll until they have finished")
        self.functions.remove(name)

    def prepare(self, name: str, masks: Iterable[int], buckets: Iterable[int] = ()) -> None:
        """Capture graphs for these slices, now: before a model moves there, so that the move costs nothing."""
        self.functions.prepare(name, masks, buckets)

    # ---------------------------------------------------------------- batches

    def submit(self, function: str, inputs: list[Any], mask: int, *, keep: bool = False) -> int:
        """Launch a batch. Items as `example` shows them, without its first dimension. `keep` leaves the results on the device."""
        if self._lost:
            raise ExecutorLost(self._lost)
        target = self.functions[function]
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
        most = target.largest  # as of now: a piece that does not fit makes it smaller
        ticket.open_pieces = -(-len(items) // most)  # all of them: one that fails at once must not end the others
        for first in range(0, len(items), most):
            self._start(_Piece(ticket, target, first, items[first : first + most], mask, keep))
        return ticket.id

    def poll(self) -> list[Finished]:
        """Batches that have ended since the last time. With nothing to report, it captures one graph that is still missing."""
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
            self.functions.cool()
        except Exception as error:
            self._lose(error, done)
        if not done and self.functions.lacks_graphs and not self._lanes:
            self.functions.capture_one()
        return done

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def has_work(self) -> bool:
        """Is there a reason to poll?"""
        return bool(self._lanes or self._over or self.functions.is_warming() or self.functions.lacks_graphs)

    def is_broken(self, error: BaseException) -> bool:
        """Is it the device that failed, and not the code on it?"""
        return self._runtime.is_broken(error)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self._runtime.is_out_of_memory(error)

    # ---------------------------------------------------------------- inside

    def _start(self, piece: _Piece) -> None:
        try:
            piece.flight = self.functions.launch(piece.function, self._tuples(piece.items), piece.mask, keep=piece.keep)
        except (Exception, SystemExit) as error:
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            self._failed(piece, error)
            return
        self._lanes.setdefault(piece.mask, deque()).append(piece)

    def _failed(self, piece: _Piece, error: BaseException) -> None:
        """Handle a failed launch. Out of memory halves the part, and later ones; another error ends this batch only, unless
        the device is broken."""
        count = len(piece.items)
        if self._runtime.is_broken(error):
            self._lost = f"the device failed: {error}"
            error = ExecutorLost(self._lost)
        if count > 1 and self._runtime.is_out_of_memory(error):
            half = count // 2
            piece.function.did_not_fit(count)
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
        self.functions.done(function)
        self._close_piece(piece, done)

    def _close_piece(self, piece: _Piece, done: list[Finished]) -> None:
        ticket = piece.ticket
        ticket.open_pieces -= 1
        if ticket.open_pieces == 0:
            outputs = ticket.outputs if ticket.error is None else None
            done.append(Finished(ticket.id, ticket.device_us, outputs, ticket.error))

    def _lose(self, error: Exception, done: list[Finished]) -> None:
        """End all batches: errors of the device are permanent, and affect every model."""
        self._lost = f"the device failed: {error}"
        for lane in self._lanes.values():
            for piece in lane:
                self._finish(piece, done)
        self._lanes.clear()

    def _need_mib(self, function: Loaded) -> int:
        """Memory of a model: weights and the peak of one run of the largest bucket on the whole device."""
        import torch

        mask = (1 << self.slicer.device.units) - 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plan = self.functions.plan(function, function.buckets[-1], mask)
        self.functions.warm_up(function, plan, function.buckets[-1])
        peak = int(torch.cuda.max_memory_allocated()) - int(before)
        return peak + (int(function.block.room) if function.block else 0) >> 20

    @staticmethod
    def _tuples(items: list[Any]) -> list[Any]:
        return [item if isinstance(item, tuple | list) else (item,) for item in items]


def on_gpu(slicer: Any, *, weights_mib: int = 0) -> Executor:
    """Open an executor on green slices; `weights_mib` is how much of the device may hold weights (0: four fifths)."""
    from lamina.gpu.cuda import CudaRuntime
    from lamina.gpu.weights import Weights

    capacity = weights_mib << 20 or slicer.driver.memory_bytes()[1] * 4 // 5
    return Executor(slicer, CudaRuntime(), Weights(slicer.driver, capacity))
