"""Slice executor: batches of many models on the slices of one device, from one thread, without ever waiting.

    executor.load("resnet", module, example)            a torch module, or a callable that works on the current stream
    ticket = executor.submit("resnet", items, mask)     returns at once
    for finished in executor.poll(): ...                what has come to its end, with the device time it took

A batch is padded to the next bucket and runs by the plan of (model, bucket, slice), which `gpu/models.py` keeps. Moving a
model to another slice is nothing but the next `submit` with another mask; its graphs are captured there first, while the old
slice serves. Items of a batch must not depend on each other: the rows of a bucket that a batch leaves free hold what was
there before.

Long graphs run in segments (`gpu/segments.py`), and `poll` launches the next ones. A batch that `preempts` others begins when
they have come to the end of a segment, and they go on when it has ended. What runs beside this executor, eagerly or as a
callable, has a ticket without parts meanwhile (`reserve`). A batch behind one on the same slice begins when all of that is on its
way: a slice runs in the order in which it was given work, but for preemption.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from lamina.core.giving_way import patience_class
from lamina.errors import BadValue, LaminaError
from lamina.gpu.models import LoadedModel, ModelTable
from lamina.gpu.runtime import DeviceRuntime, HostRuntime
from lamina.gpu.slicer import Slicer

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class ExecutorLost(LaminaError):
    """A device error that does not go away: this process must be replaced."""

    status = 503
    code: ClassVar[str] = "executor-lost"


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    ticket: int
    device_us: int
    outputs: list[Any] | None
    error: BaseException | None = None
    then: Callable[[FinishedBatch], None] | None = None  #: as it was submitted with


@dataclass(slots=True, eq=False)
class _Ticket:
    """A submitted batch, which may run in parts."""

    id: int
    outputs: list[Any]
    then: Callable[[FinishedBatch], None] | None
    open_parts: int = 0
    device_us: int = 0
    error: BaseException | None = None
    parts: list[_Part] = field(default_factory=list)  #: that have not ended
    preempted_by: set[int] = field(default_factory=set)  #: tickets that it waits for, between two segments
    preempts: tuple[_Ticket, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of it runs: it is paused, or has not begun, or has ended."""
        return all(part.flight is None or part.flight.is_quiet for part in self.parts)


@dataclass(slots=True, eq=False)
class _Part:
    ticket: _Ticket
    function: LoadedModel
    first: int
    items: list[Any]
    mask: int
    keep: bool
    preemptible: bool
    flight: Any = None  #: None: it has not begun

    @property
    def is_begun(self) -> bool:
        return self.flight is not None


class SliceExecutor:
    def __init__(self, slicer: Slicer, runtime: DeviceRuntime | None = None, weights: Any = None) -> None:
        """`weights` moves parameters to and fro (`lamina.gpu.weights`); without it a module stays where it is."""
        self.slicer = slicer
        self._runtime: DeviceRuntime = runtime or HostRuntime()
        self.models = ModelTable(slicer, self._runtime, weights)
        self._slice_queues: dict[int, deque[_Part]] = {}
        self._preempting: list[_Part] = []  #: begun or not, outside of the order of their slices
        self._open: dict[int, _Ticket] = {}
        self._paused: set[int] = set()  #: tickets that wait for others
        self._stopped: set[int] = set()  #: those that have been told to be at the end of a segment
        self._finished_early: list[FinishedBatch] = []  #: ended before they reached the device
        self._tickets = 0
        self._lost = ""

    # ---------------------------------------------------------------- functions

    def load(
        self,
        name: str,
        module: Callable[..., Any],
        example: Any,
        *,
        buckets: Sequence[int] = BUCKETS,
        graphs: bool = True,
        staged: Any = None,
        slo_us: int = 0,
    ) -> None:
        """Load a model. `example` is a batch of one, or a tuple of such.

        `staged` is what `models.stage` made of the module's weights; without it, that is done here. Without an SLO,
        or with a long one, long graphs are cut, where the runtime can (`segments.gives_way_with`).
        """
        parts = example if isinstance(example, tuple | list) else (example,)
        self.models.add(LoadedModel(name, module, parts, tuple(sorted(buckets)), graphs, slo_us), staged)

    def unload(self, name: str) -> None:
        """Unload a model. What it has running ends first, by poll()."""
        function = self.models[name]
        self.models.reap_warmups()
        lanes = (*self._slice_queues.values(), self._preempting)
        running = any(piece.function is function for lane in lanes for piece in lane)
        if running or self.models.has_warmups(name):
            raise BadValue(f"{name!r} has batches under way", hint="poll until they have finished")
        self.models.remove(name)

    def prepare(self, name: str, masks: Iterable[int], buckets: Iterable[int] = ()) -> None:
        """Capture graphs for these slices, now: before a model moves there, so that the move costs nothing."""
        self.models.prepare(name, masks, buckets)

    # ---------------------------------------------------------------- batches

    def submit(
        self,
        function: str,
        inputs: list[Any],
        mask: int,
        *,
        keep: bool = False,
        then: Callable[[FinishedBatch], None] | None = None,
        preempts: Iterable[int] = (),
        preempted_by: Iterable[int] = (),
        preemptible: bool = True,
    ) -> int:
        """Launch a batch. Items as `example` shows them, without its first dimension. `keep` leaves the results
        on the device; `then` comes back with what has ended. Batches that it `preempts`, by ticket, wait meanwhile, and it waits
        for those that it is `preempted_by` from the beginning. One that is not `preemptible` runs whole: pieces cost a little."""
        if self._lost:
            raise ExecutorLost(self._lost)
        target = self.models[function]
        if not inputs or len(inputs) > target.buckets[-1]:
            raise BadValue(f"{len(inputs)} items for {function!r}", hint=f"1 to {target.buckets[-1]} at a time")
        self._tickets += 1
        ticket = _Ticket(self._tickets, [None] * len(inputs), then)
        self.slicer.slice(mask)  # a mask that is none is the caller's mistake, and raised here
        self._open[ticket.id] = ticket
        is_cut = partial(self.models.is_cut, target, len(inputs), mask)
        self._preempt(ticket, self._preemptable(preempts, mask, target, is_cut))
        for one in preempted_by:
            if (before := self._open.get(one)) is not None:
                self._preempt(before, (ticket,))
        most = target.largest_fit  # as of now: a piece that does not fit makes it smaller
        ticket.open_parts = -(-len(inputs) // most)  # all of them: one that fails at once must not end the others
        for first in range(0, len(inputs), most):
            self._add(_Part(ticket, target, first, inputs[first : first + most], mask, keep, preemptible))
        return ticket.id

    def reserve(self, preempts: Iterable[int]) -> int:
        """A ticket for work that does not run here: the batches that it preempts wait until `release`, and so may later ones."""
        self._tickets += 1
        ticket = self._open[self._tickets] = _Ticket(self._tickets, [], None)
        self._preempt(ticket, self._preemptable(preempts))
        return ticket.id

    def release(self, ticket: int) -> None:
        """The work of a reserved ticket has ended."""
        self._close_ticket(self._open[ticket])

    def remaining_segments(self, ticket: int) -> int:
        """Segments of a batch that are still to be launched; 0 for one that runs in one go, or has ended."""
        found = self._open.get(ticket)
        return sum(part.flight.remaining_segments for part in found.parts if part.flight is not None) if found is not None else 0

    def take_paused(self) -> list[tuple[int, int, int]]:
        """Batches that have come to the end of a segment, once for each pause: ticket, segments that are left, and their time."""
        found = []
        for ticket_id in sorted(self._paused - self._stopped):
            parts = self._open[ticket_id].parts
            if parts and all(part.flight is not None and part.flight.is_quiet for part in parts):
                self._stopped.add(ticket_id)
                left = [(part.flight.remaining_segments, part.flight.remaining_us) for part in parts]
                found.append((ticket_id, sum(one for one, _ in left), sum(us for _, us in left)))
        return found

    def poll(self) -> list[FinishedBatch]:
        """Batches that have ended since the last time."""
        done, self._finished_early = self._finished_early, []
        if self._lost and not done:
            raise ExecutorLost(self._lost)
        try:
            for piece in [one for one in self._preempting if one.flight is not None and one.flight.is_done()]:
                self._preempting.remove(piece)
                self._finish(piece, done)
            for mask in list(self._slice_queues):
                lane = self._slice_queues[mask]
                while lane and lane[0].flight is not None and lane[0].flight.is_done():
                    self._finish(lane.popleft(), done)
                if lane and not lane[-1].is_begun:
                    self._begin_next(lane)
                if not lane:
                    self._slice_queues.pop(mask, None)
            for piece in [one for one in self._preempting if one.flight is None]:
                self._begin_preempting(piece)
            self.models.reap_warmups()
        except Exception as error:
            self._fail_all(error, done)
        return done

    @property
    def paused(self) -> Set[int]:
        """Tickets that wait for batches which preempt them."""
        return self._paused

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._slice_queues.values())) + len(self._preempting)

    @property
    def has_work(self) -> bool:
        """Is there a reason to poll?"""
        return bool(self._slice_queues or self._preempting or self._finished_early or self.models.has_warmups())

    def is_broken(self, error: BaseException) -> bool:
        """Is it the device that failed, and not the code on it?"""
        return self._runtime.is_broken(error)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self._runtime.is_out_of_memory(error)

    # ---------------------------------------------------------------- inside

    def _add(self, piece: _Part) -> None:
        """Begin a part, or let it wait for its turn."""
        piece.ticket.parts.append(piece)
        if piece.ticket.preempts:
            self._preempting.append(piece)
            self._begin_preempting(piece)
            return
        lane = self._slice_queues.get(piece.mask)
        if lane and not (lane[-1].is_begun and lane[-1].flight.is_launched):
            lane.append(piece)
        elif piece.ticket.preempted_by or self._begin(piece):
            self._slice_queues.setdefault(piece.mask, deque()).append(piece)

    def _begin(self, piece: _Part) -> bool:
        """Launch a part; False if that failed, and the part is settled."""
        try:
            items, in_segments = self._tuples(piece.items), piece.preemptible
            piece.flight = self.models.launch(piece.function, items, piece.mask, keep=piece.keep, in_segments=in_segments)
        except (Exception, SystemExit) as error:
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            self._failed(piece, error)
            return False
        return True

    def _begin_next(self, lane: deque[_Part]) -> None:
        """Begin the parts of a slice whose predecessors are all on their way."""
        while True:
            index = next((index for index, piece in enumerate(lane) if not piece.is_begun), None)
            if index is None or (index and not lane[index - 1].flight.is_launched):
                return
            piece = lane[index]
            if piece.ticket.preempted_by:
                return
            if not self._begin(piece):
                lane.remove(piece)

    def _begin_preempting(self, piece: _Part) -> None:
        """Begin a part that preempts others, if none of them runs at this moment."""
        if all(victim.is_quiet for victim in piece.ticket.preempts) and not self._begin(piece):
            self._preempting.remove(piece)

    def _preempt(self, ticket: _Ticket, victims: tuple[_Ticket, ...]) -> None:
        """Pause these batches, which may not have begun, until the ticket is closed."""
        ticket.preempts = (*ticket.preempts, *victims)
        for victim in victims:
            victim.preempted_by.add(ticket.id)
            self._paused.add(victim.id)
            for part in victim.parts:
                if part.flight is not None:
                    part.flight.pause()

    def _preemptable(
        self, tickets: Iterable[int], mask: int = 0, target: LoadedModel | None = None, is_cut: Callable[[], bool] = bool
    ) -> tuple[_Ticket, ...]:
        """Those of the batches that can be preempted for work on this slice: one that is on its way as a whole cannot. Segmented
        graphs of one slice use the same memory if SLOs are about the same, or there are none: there the second waits for the
        first, as if it did not preempt."""
        known = [self._open[one] for one in tickets if one in self._open]
        found = tuple([one for one in known if not any(part.is_begun and part.flight.is_launched for part in one.parts)])
        if target is None:
            return found
        parts = [part for victim in found for part in victim.parts if part.mask == mask]
        shares_memory = any(patience_class(part.function.slo_us) == patience_class(target.slo_us) for part in parts)
        return () if shares_memory and is_cut() else found

    def _failed(self, piece: _Part, error: BaseException) -> None:
        """Handle a failed launch. Out of memory halves the part, and later ones; another error ends this batch only, unless
        the device is broken."""
        count = len(piece.items)
        if self._runtime.is_broken(error):
            self._lost = f"the device failed: {error}"
            error = ExecutorLost(self._lost)
        if count > 1 and self._runtime.is_out_of_memory(error):
            half = count // 2
            piece.function.on_out_of_memory(count)
            piece.ticket.open_parts += 1
            piece.ticket.parts.remove(piece)
            for first, items in ((0, piece.items[:half]), (half, piece.items[half:])):
                part = _Part(
                    *(piece.ticket, piece.function, piece.first + first, items, piece.mask, piece.keep, piece.preemptible)
                )
                self._add(part)
            return
        piece.ticket.error = piece.ticket.error or error
        self._close_part(piece, self._finished_early)

    def _finish(self, piece: _Part, done: list[FinishedBatch]) -> None:
        function, ticket = piece.function, piece.ticket
        if piece.flight is None:  # it had not begun
            ticket.error = ticket.error or ExecutorLost(self._lost)
            self._close_part(piece, done)
            return
        if self._lost:
            ticket.error = ticket.error or ExecutorLost(self._lost)
        else:
            try:
                device_us, outputs = piece.flight.result()
                ticket.device_us += device_us
                ticket.outputs[piece.first : piece.first + len(piece.items)] = outputs
            except Exception as error:
                ticket.error = ticket.error or error
        self.models.release_weights(function)
        self._close_part(piece, done)

    def _close_part(self, piece: _Part, done: list[FinishedBatch]) -> None:
        ticket = piece.ticket
        ticket.open_parts -= 1
        ticket.parts.remove(piece)
        if ticket.open_parts == 0:
            self._close_ticket(ticket)
            outputs = ticket.outputs if ticket.error is None else None
            done.append(FinishedBatch(ticket.id, ticket.device_us, outputs, ticket.error, ticket.then))

    def _close_ticket(self, ticket: _Ticket) -> None:
        """A batch has ended: those it preempted go on, unless others preempt them too."""
        del self._open[ticket.id]
        self._paused.discard(ticket.id)
        self._stopped.discard(ticket.id)
        for victim in ticket.preempts:
            victim.preempted_by.discard(ticket.id)
            if not victim.preempted_by:
                self._paused.discard(victim.id)
                self._stopped.discard(victim.id)
                for part in victim.parts:
                    if part.flight is not None:
                        part.flight.resume()

    def _fail_all(self, error: Exception, done: list[FinishedBatch]) -> None:
        """End all batches: errors of the device are permanent, and affect every model."""
        self._lost = f"the device failed: {error}"
        for lane in (*self._slice_queues.values(), self._preempting):
            for piece in lane:
                self._finish(piece, done)
        self._slice_queues.clear()
        self._preempting.clear()

    @staticmethod
    def _tuples(items: list[Any]) -> list[Any]:
        return [item if isinstance(item, tuple | list) else (item,) for item in items]


def open_executor(slicer: Slicer, weights_mib: int = 0, folder: str = "") -> SliceExecutor:
    """Open an executor with the slicer's own runtime; `weights_mib` is how much of the device may hold weights (0: most).
    Executors with one `folder` share the host's copies of weights."""
    runtime, weights = slicer.open_runtime(weights_mib, folder)
    return SliceExecutor(slicer, runtime, weights)
