"""Flight recorder: the last decisions about calls, in a bounded number of bytes, and the history of one call made from them.

The driver adds every event with its actions to `recent`, which costs one append. Every `BLOCK` events what concerns calls is
packed into bytes (`pack`); the oldest blocks are dropped beyond the limit. So a running server can say why a call was rejected or
had to wait without having written a log, and its garbage collector has nothing more to look at. Event logs give the same records,
so `lamina explain` has one source for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.scheduling.leases import slice_label
from lamina.types import NEVER_US

BLOCK = 128
"""Events that are packed together."""

DEFAULT_BYTES = 16 * 2**20
"""About 80,000 calls of plain functions."""

SEARCHED_AT_ONCE = 64
"""Blocks that a search goes through before it lets others run: less than a millisecond."""


class ArrivalRecord(Struct, frozen=True, gc=False, array_like=True, tag="a"):
    at_us: int
    call_id: str
    target: str
    tenant: str
    arrived_us: int
    deadline_us: int


class StartRecord(Struct, frozen=True, array_like=True, tag="s"):
    at_us: int
    batch_id: int
    function: str
    device: str
    bits: int | bytes  #: of the units; as bytes where they are more than msgpack has integers for
    jobs: list[tuple[str, str]]  #: call and step
    predicted_us: int
    behind: int
    cores: int
    why: str
    delay: str  #: why the function was deferred before

    @property
    def mask(self) -> int:
        return self.bits if isinstance(self.bits, int) else int.from_bytes(self.bits, "little")


class FinishRecord(Struct, frozen=True, gc=False, array_like=True, tag="f"):
    at_us: int
    batch_id: int
    device_us: int
    error: str = ""


class EndRecord(Struct, frozen=True, gc=False, array_like=True, tag="e"):
    """End of a call. `what`: "in time", "late", "refused" or "failed"."""

    at_us: int
    call_id: str
    what: str
    reason: str = ""
    why: str = ""
    step: str = ""
    latency_us: int = 0
    queue_us: int = 0
    cold_us: int = 0
    retries: int = 0
    offer_us: int = 0
    cost: float = 0.0


DecisionRecord = ArrivalRecord | StartRecord | FinishRecord | EndRecord
Entry = tuple[int, ev.Event, list[do.Action]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[DecisionRecord])


def records_of(now_us: int, event: ev.Event, actions: Iterable[do.Action]) -> Iterator[DecisionRecord]:
    """What an event and its actions say about calls."""
    if isinstance(event, ev.CallArrived | ev.CallRecovered):
        call = event.call
        yield ArrivalRecord(now_us, call.id, call.target, call.tenant, call.arrived_us, call.deadline_us)
    elif isinstance(event, ev.BatchFinished):
        yield FinishRecord(now_us, event.batch_id, event.device_us)
    elif isinstance(event, ev.BatchFailed):
        yield FinishRecord(now_us, event.batch_id, 0, event.reason)
    for action in actions:
        kind = type(action)
        if isinstance(action, do.StartBatch):
            jobs = [(job.call_id, job.node) for job in action.jobs]
            yield StartRecord(
                now_us,
                action.batch_id,
                action.function,
                action.device,
                action.mask if action.mask < 2**64 else action.mask.to_bytes(-(-action.mask.bit_length() // 8), "little"),
                jobs,
                action.predicted_us,
                action.behind,
                action.cores,
                action.why,
                action.delay,
            )
        elif kind is do.Reply or kind is do.Reject or kind is do.FailCall:
            yield end_record(now_us, action)  # type: ignore[arg-type]


def end_record(now_us: int, ending: do.Reply | do.Reject | do.FailCall) -> EndRecord:
    if isinstance(ending, do.Reply):
        return EndRecord(
            now_us,
            ending.call_id,
            "late" if ending.late else "in time",
            latency_us=ending.latency_us,
            queue_us=ending.queue_us,
            cold_us=ending.cold_us,
            retries=ending.retries,
            cost=ending.cost,
        )
    if isinstance(ending, do.Reject):
        return EndRecord(now_us, ending.call_id, "refused", ending.reason, ending.why, offer_us=ending.offer_us)
    return EndRecord(now_us, ending.call_id, "failed", ending.error, step=ending.step)


class FlightRecorder:
    """The last records, at most `max_bytes` of them packed and `BLOCK` events that are not."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.recent: list[Entry | DecisionRecord] = []  #: not yet packed: events with their actions, and records
        self._max_bytes = max_bytes
        self._blocks: deque[bytes] = deque()
        self._subscribers: list[Callable[[list[DecisionRecord]], None]] = []
        self.packed_bytes = 0
        self.sequence = 0  #: of the last block, counted from 1

    def pack(self) -> None:
        """Pack what is recent, and drop the oldest blocks beyond the limit."""
        found: list[DecisionRecord] = []
        for entry in self.recent:
            if isinstance(entry, tuple):
                found += records_of(*entry)
            else:
                found.append(entry)
        self.recent.clear()
        if not found:
            return
        for notify in self._subscribers:
            notify(found)
        block = _encoder.encode(found)
        self._blocks.append(block)
        self.sequence += 1
        self.packed_bytes += len(block)
        while self.packed_bytes > self._max_bytes:
            self.packed_bytes -= len(self._blocks.popleft())

    def subscribe(self, notify: Callable[[list[DecisionRecord]], None]) -> Callable[[], None]:
        """Tell of records as they are packed; returns what ends that. They are made anyway: one that listens costs little."""
        self._subscribers.append(notify)
        return lambda: self._subscribers.remove(notify)

    def blocks_after(self, sequence: int, most: int) -> Iterator[tuple[int, list[DecisionRecord]]]:
        """Blocks after that number, with their own, the oldest first: those that are still there, and at most the last `most`."""
        count = max(0, min(self.sequence - sequence, len(self._blocks), most))
        first = self.sequence - count + 1
        for number, block in enumerate(list(islice(reversed(self._blocks), count))[::-1], first):
            yield number, _decoder.decode(block)

    def add(self, *records: DecisionRecord) -> None:
        """Records of what the controller has not seen."""
        self.recent += records
        if len(self.recent) >= BLOCK:
            self.pack()

    def search(self, call_id: str) -> Iterator[list[DecisionRecord]]:
        """Records from the first to the last that name the call, block by block, with others among them. Empty lists come before:
        after each item a loop may do something else."""
        self.pack()
        blocks, name = tuple(self._blocks), _encoder.encode(call_id)  # with its length: no other id that begins like it
        naming: list[int] = []
        for place, block in enumerate(blocks):
            if name in block:
                naming.append(place)
            if place % SEARCHED_AT_ONCE == 0:
                yield []
        if naming:
            for block in blocks[naming[0] : naming[-1] + 1]:
                yield _decoder.decode(block)


def call_history(call_id: str, records: Iterable[DecisionRecord]) -> dict[str, Any]:
    """History of one call: its steps, with batch, slice, time and reasons, and its end. Without `target`: nothing is known."""
    told: dict[str, Any] = {"call": call_id, "steps": []}
    running: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        at_ms = record.at_us / 1000
        if isinstance(record, FinishRecord):
            for step in running.pop(record.batch_id, ()):
                step |= {"took_ms": record.device_us / 1000, "ended_ms": at_ms}
                if record.error:
                    step["error"] = record.error
        elif isinstance(record, StartRecord):
            mine = [node for call, node in record.jobs if call == call_id]
            for name in dict.fromkeys(mine):
                step = {
                    "step": name,
                    "jobs": mine.count(name),
                    "function": record.function,
                    "decided_ms": at_ms,
                    "batch": len(record.jobs),
                    "slice": slice_label(record.device, record.mask),
                    "cores": record.cores,
                    "predicted_ms": record.predicted_us / 1000,
                    "behind_batch": record.behind or None,
                    "why": _read(record.why),
                    "delay": record.delay or None,
                }
                told["steps"].append(step)
                running.setdefault(record.batch_id, []).append(step)
        elif record.call_id == call_id:
            if isinstance(record, ArrivalRecord):
                told |= {"target": record.target, "tenant": record.tenant, "arrived_ms": record.arrived_us / 1000}
                told["goal_ms"] = (record.deadline_us - record.arrived_us) / 1000 if record.deadline_us < NEVER_US else None
                told["unread_ms"] = max(0, record.at_us - record.arrived_us) / 1000
            else:
                told["end"] = _end(record)
    return told


def _end(record: EndRecord) -> dict[str, Any]:
    at = {"at_ms": record.at_us / 1000}
    if record.what == "refused":
        return {
            "what": f"refused: {record.reason}", **at, "offer_ms": record.offer_us / 1000 or None, "why": _read(record.why)
        }  # fmt: skip
    if record.what == "failed":
        return {"what": f"failed: {record.reason}", **at, "step": record.step}
    spent = {"latency_ms": record.latency_us / 1000, "queue_ms": record.queue_us / 1000, "cold_ms": record.cold_us / 1000}
    return {"what": record.what, **at, **spent, "retries": record.retries, "cost": record.cost}


def _read(why: str) -> Any:
    """Decoded reasons of the policy: JSON where it is, else as it stands."""
    if why.startswith("{"):
        try:
            return msgspec.json.decode(why)
        except msgspec.DecodeError:
            pass
    return why or None
