from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.ipc import framing
from lamina.ipc.framing import FrameError, StopProcess
from lamina.values.references import ErrorInfo, ReleaseSlots, ShmRef
from lamina.worker import protocol
from lamina.worker.protocol import BatchDone, JobFrame, RunBatch, WorkerLoadFailed, WorkerReady

TO_WORKER = [
    RunBatch(7, 0b1100, [JobFrame(1, "c1", {"x": ["input", "x", 0]}, [(("input", "x"), b"abc")], 99)]),
    RunBatch(8, 1, [JobFrame(2, "c2", None, [(("item", ""), ShmRef("gateway", 3, 70_000))])]),
    RunBatch(9, 1, [JobFrame(3, "c3", None, [], error=ErrorInfo("Absent", "no input 'x'"))]),
    ReleaseSlots([1, 2], [3]),
    StopProcess(),
]
FROM_WORKER = [
    WorkerReady(1_000, 42),
    WorkerLoadFailed(ErrorInfo("ValueError", "no weights", "File app.py")),
    BatchDone(7, 12, [b"r", ShmRef("w1", 0, 65_537), ErrorInfo("KeyError", "'k'")], [ShmRef("gateway", 3, 70_000)]),
]


def bare(size: int, body: bytes = b"") -> bytes:
    return size.to_bytes(4, "little") + body


@pytest.mark.parametrize("piece", [1, 3, 64, 10_000])
def test_frames_to_a_worker_arrive_whatever_the_pieces(piece: int) -> None:
    wire, reader = framing.pack(*TO_WORKER), protocol.to_worker_reader()
    got = [frame for at in range(0, len(wire), piece) for frame in reader.feed(bytes(wire[at : at + piece]))]
    assert got == TO_WORKER


def test_frames_from_a_worker_arrive_together() -> None:
    assert list(protocol.from_worker_reader().feed(bytes(framing.pack(*FROM_WORKER)))) == FROM_WORKER


def test_a_truncated_frame_gives_nothing_and_is_remembered() -> None:
    reader = protocol.from_worker_reader()
    wire = framing.pack(FROM_WORKER[2])
    assert list(reader.feed(bytes(wire[:-1]))) == []
    assert reader.pending == len(wire) - 1


def test_an_oversized_length_is_refused_before_its_body_comes() -> None:
    with pytest.raises(FrameError, match="67108865 bytes was announced"):
        list(protocol.from_worker_reader().feed(bare(framing.MAX_FRAME_BYTES + 1)))


def test_frames_before_a_bad_one_are_still_delivered() -> None:
    feed = protocol.from_worker_reader().feed(bytes(framing.pack(FROM_WORKER[0])) + bare(1, b"\xc1"))
    assert next(feed) == FROM_WORKER[0]
    with pytest.raises(FrameError):
        next(feed)


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x93\x04\xff\x01",  # a negative load time
        b"\x92\x04\x01",  # a field is missing
        b"\x94\x04\x01\x01\x01",  # a field too many
        b"\x93\x63\x01\x01",  # no such frame
        b"\x93\x04\xa11\x01",  # text where a number belongs
        b"\x80",
        b"",
    ],
)
def test_a_frame_of_the_wrong_shape_is_refused(wrong: bytes) -> None:
    with pytest.raises(FrameError, match="not a frame"):
        list(protocol.from_worker_reader().feed(bare(len(wrong), wrong)))


@pytest.mark.parametrize("ref", [ShmRef("../etc", 0, 1), ShmRef("w1\n", 0, 1), ShmRef("w1", -1, 1), ShmRef("w1", 0, -1)])
def test_a_reference_out_of_bounds_is_refused(ref: ShmRef) -> None:
    with pytest.raises(FrameError):
        list(protocol.from_worker_reader().feed(bytes(framing.pack(BatchDone(1, 1, [ref])))))


def test_a_worker_cannot_speak_for_the_gateway() -> None:
    with pytest.raises(FrameError):
        list(protocol.from_worker_reader().feed(bytes(framing.pack(ReleaseSlots([1])))))


def test_a_frame_that_is_too_big_is_not_sent() -> None:
    with pytest.raises(framing.FrameTooBig, match="at most 67108864"):
        framing.pack(BatchDone(1, 1, [bytes(framing.MAX_FRAME_BYTES)]))


def test_a_constant_that_cannot_travel_is_not_sent() -> None:
    with pytest.raises(FrameError, match="cannot be sent"):
        framing.pack(RunBatch(1, 1, [JobFrame(1, "c", {"x": ["value", 2**70]}, [])]))


@given(st.lists(st.binary(max_size=64) | st.just(bytes(framing.pack(ReleaseSlots([1])))), max_size=8))
def test_garbage_never_does_worse_than_a_frame_error(pieces: list[bytes]) -> None:
    reader = protocol.to_worker_reader()
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                assert isinstance(frame, protocol.ToWorker)
    except FrameError:
        pass


@given(st.integers(0, 3), st.binary(min_size=1, max_size=4), st.data())
def test_a_damaged_frame_is_refused_or_still_a_frame(which: int, noise: bytes, data: st.DataObject) -> None:
    wire = framing.pack(TO_WORKER[which])
    at = data.draw(st.integers(4, len(wire) - 1))
    wire[at : at + len(noise)] = noise[: len(wire) - at]
    try:
        for frame in protocol.to_worker_reader().feed(bytes(wire)):
            assert isinstance(frame, protocol.ToWorker)
    except FrameError:
        pass


@given(st.integers(0, 2**200))
def test_units_of_machines_of_any_size_can_be_sent(mask: int):
    """More than 64 cores are more than an integer of msgpack has bits."""
    [batch] = protocol.to_worker_reader().feed(bytes(framing.pack(RunBatch(1, framing.wire_mask(mask), []))))
    assert isinstance(batch, RunBatch) and framing.read_mask(batch.mask) == mask
