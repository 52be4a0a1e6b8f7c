"""Frames of processes that run code of tenants: each is decoded on the loop, so none has more in it than a turn has time for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec
import msgspec.inspect
import pytest

from lamina import encoding
from lamina.engines.inflight import MAX_BATCH_PARTS, read_changes, read_spans
from lamina.ipc import child_process
from lamina.ipc.child_process import MAX_UNTAKEN_BYTES, SLICE_S, ChildProcess
from lamina.ipc.framing import MAX_FRAME_BYTES, FrameError, FrameReader, pack
from lamina.sdk.app_state import MAX_PARTS, StateChange, StateChanges
from lamina.sdk.spans import InnerSpan
from lamina.state import kv_state
from lamina.state.kv_state import StateTable
from lamina.values.references import ErrorInfo, unpack_fields
from lamina.worker.protocol import MAX_LISTED, MAX_SPAN_BYTES, BatchHeartbeat, FromWorker, from_worker_reader

SIZE = MAX_FRAME_BYTES - 100
ERROR = b"\x98\x01" + b"\xa0" * 4 + b"\x00\xc4\x00"


def a_list(item: bytes, room: int = SIZE) -> bytes:
    count = room // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


FRAMES = {
    "results": b"\x94\x06\x01\x01" + a_list(b"\xc4\x00"),
    "errors": b"\x94\x06\x01\x01" + a_list(ERROR),
    "fields of an error": b"\x94\x06\x01\x01\x91\x99\x01" + b"\xa0" * 4 + b"\x00\xc4\x00" + a_list(b"\x92\xa0\xa0"),
    "viewed": b"\x95\x06\x01\x01\x90" + a_list(b"\x95\x00\xa1a\x00\x00\x00"),
    "changes": b"\x96\x06\x01\x01\x90\x90" + a_list(b"\x92\x00\xc4\x00"),
    "lists of changes": b"\x96\x06\x01\x01\x90\x90" + a_list(b"\x93\x00\x90\x90"),
    "spans": b"\x97\x06\x01\x01\x90\x90\x90" + a_list(b"\x90"),
    "probes": b"\x94\x04\x01\x01" + a_list(b"\x93\x00\x00\x00"),
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_of_a_great_many_things_is_none(what: str) -> None:
    """One of empty lists took 24 s and 4 GiB to decode, with nobody served meanwhile."""
    frame = FRAMES[what]
    reader: FrameReader[FromWorker] = from_worker_reader()
    with pytest.raises(FrameError, match="not a frame"):
        list(reader.feed(len(frame).to_bytes(4, "little") + frame))


def test_no_frame_of_a_worker_has_lists_within_lists_or_lists_without_end() -> None:
    """What a tenant's code sends is decoded as a whole, so lists in it have a limit, and what they hold has none of its own."""
    for kind in get_args(FromWorker):
        for one in _lists(msgspec.inspect.type_info(kind)):
            assert (one.max_length or 2**62) <= MAX_LISTED, f"{kind.__name__}: {one}"
            assert not list(_lists(one.item_type)), f"{kind.__name__}: a list of lists"


def _lists(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.ListType]:
    match kind:
        case msgspec.inspect.ListType():
            yield kind
        case msgspec.inspect.UnionType():
            for part in kind.types:
                yield from _lists(part)
        case msgspec.inspect.TupleType():
            for part in kind.item_types:
                yield from _lists(part)
        case msgspec.inspect.StructType():
            for field in kind.fields:
                yield from _lists(field.type)
        case msgspec.inspect.DictType() | msgspec.inspect.SetType() | msgspec.inspect.AnyType() | msgspec.inspect.RawType():
            raise AssertionError(f"{kind} has no limit")


def change(number: int) -> StateChange:
    return StateChange("app", f"k{number}", "counter", "add", encoding.encode(1))


def test_changes_that_are_none_or_too_many_fail_their_own_request() -> None:
    good = msgspec.msgpack.encode(StateChanges(1, [], [change(0)]))
    many = msgspec.msgpack.encode(StateChanges(2, [], [change(0)] * (MAX_PARTS + 1)))
    found, errors = read_changes([(0, b"\xc1"), (1, good), (2, many), (3, good)])
    assert [one.place for one in found] == [1] and sorted(errors) == [0, 2, 3]
    assert all(error.type == "BadValue" for error in errors.values())


def test_of_a_batch_with_a_great_many_changes_the_first_ones_are_looked_at() -> None:
    packed = [(place, msgspec.msgpack.encode(StateChanges(place, [], [change(0)] * 10_000))) for place in range(20)]
    found, errors = read_changes(packed)
    assert len(found) == MAX_BATCH_PARTS // 10_000 + 1 and len(found) + len(errors) == 20


def test_requests_of_a_batch_that_change_too_much_for_one_turn_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 64 with 10,000 changes each kept everybody waiting for two seconds and more."""
    monkeypatch.setattr(kv_state, "MAX_CHANGES", 10)
    table = StateTable("app")
    batch = [StateChanges(place, [], [change(place * 10 + number) for number in range(6)]) for place in range(3)]
    steps = [(f"c{place}", 0, "n") for place in range(3)]
    assert table.commit("f", steps, batch) == {0: True, 1: False, 2: False}
    assert table.commit("f", steps, batch[1:]) == {1: True, 2: False}
    assert table.commit("f", steps, batch[2:]) == {2: True}


def test_spans_and_fields_that_are_none_are_left_out() -> None:
    span = InnerSpan("work", 1, 2)
    assert read_spans(msgspec.msgpack.encode([span])) == [span]
    assert read_spans(b"\xc1") == read_spans(bytes(MAX_SPAN_BYTES + 1)) == []
    assert unpack_fields(ErrorInfo("E", "m", fields=b"\xc1")) == []
    assert unpack_fields(ErrorInfo("E", "m", fields=msgspec.msgpack.encode([("a", "b")]))) == [("a", "b")]


# ------------------------------------------------------------------------------------------- floods


class Loop:
    """A loop that is run by hand."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        self.call_soon = self.soon.append


class Wire:
    """The socket of a process, as a transport."""

    is_reading, is_aborted, unsent = True, False, 0

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent


def a_process(monkeypatch: pytest.MonkeyPatch, seen: list[int], look_s: float) -> tuple[ChildProcess, Loop, Wire]:
    """A process whose frames take no time but that of a look at the clock."""
    now_s = itertools.count(0.0, look_s)
    monkeypatch.setattr(child_process, "perf_counter", lambda: next(now_s))
    process = ChildProcess.__new__(ChildProcess)
    reader: FrameReader[FromWorker] = from_worker_reader()
    process._reader, process.pid, loop, wire = reader, 1, Loop(), Wire()
    process._on_frame = lambda frame: seen.append(frame.batch_id)
    process._is_cut_off = process._has_ended = process._is_waiting = process._is_write_blocked = False
    process._frames, process._unread, process._timers = None, bytearray(), []
    process._loop, process._transport, process._on_end = loop, wire, lambda: None  # type: ignore[assignment]
    return process, loop, wire


def test_of_thousands_of_frames_in_one_read_each_turn_of_the_loop_has_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that wrote frames to the socket of its worker kept all other calls waiting for a second and more."""
    seen: list[int] = []
    process, loop, wire = a_process(monkeypatch, seen, SLICE_S / 5)
    wire_bytes = bytes(pack(*map(BatchHeartbeat, range(1_000))))
    half = len(wire_bytes) // 2
    process.data_received(wire_bytes[:half])
    assert 1 <= len(seen) <= 6 and not wire.is_reading
    process.data_received(wire_bytes[half:])  # it was read before
    while loop.soon:
        before = len(seen)
        loop.soon.popleft()()
        assert len(seen) - before <= 12
    assert seen == list(range(1_000)) and wire.is_reading


def test_a_process_that_asks_and_takes_no_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is 17 bytes, and an answer may be a megabyte: without end they were kept for it."""
    seen: list[int] = []
    process, _, wire = a_process(monkeypatch, seen, 0.0)
    process._is_write_blocked = True
    process.data_received(bytes(pack(BatchHeartbeat(1), BatchHeartbeat(2))))
    assert seen == [1, 2] and not wire.is_aborted, "one that is busy takes what it was sent later"
    wire.unsent = MAX_UNTAKEN_BYTES + 1
    process.data_received(bytes(pack(BatchHeartbeat(3), BatchHeartbeat(4))))
    assert seen == [1, 2, 3] and wire.is_aborted
    process.data_received(b"more")
    assert seen == [1, 2, 3]


def test_what_a_process_said_before_it_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    process, _, _ = a_process(monkeypatch, seen, SLICE_S)
    process.data_received(bytes(pack(*map(BatchHeartbeat, range(20)))))
    assert len(seen) < 20
    process._end()
    assert seen == list(range(20))
