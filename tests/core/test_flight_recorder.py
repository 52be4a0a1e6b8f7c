"""Flight recorder: the last decisions about calls, within a number of bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.flight_recorder import BLOCK, DecisionRecord, EndRecord, FlightRecorder, StartRecord, call_history, records_of
from lamina.types import Call, Slo, call_for
from tests.properties import examples


def call(number: int) -> Call:
    return call_for(f"c-{number:x}", "f", 1_000 * number, Slo(latency_us=25_000))


def life(number: int, why: str = "", delay: str = "") -> list[tuple[int, ev.Event, list[do.Action]]]:
    """A call that arrives, runs and is answered."""
    at_us, job = 1_000 * number, do.JobRef(number, f"c-{number:x}", 0, "f")
    started = do.StartBatch(number, "f", "i1", "gpu0", 0b110, (job,), 3_000, why=why, delay=delay)
    return [
        (at_us, ev.CallArrived(call(number)), []),
        (at_us + 10, ev.ArrivalsDrained(), [started, do.WakeAt(at_us + 100)]),
        (at_us + 3_000, ev.BatchFinished(number, 2_900), [do.Reply(f"c-{number:x}", 3_000, False, 10, cost=0.5)]),
    ]


def record(recorder: FlightRecorder, *entries: tuple[int, ev.Event, list[do.Action]]) -> None:
    """As a driver does it."""
    for entry in entries:
        recorder.recent.append(entry)
        if len(recorder.recent) >= BLOCK:
            recorder.pack()


def history(recorder: FlightRecorder, call_id: str) -> dict[str, Any]:
    found: list[DecisionRecord] = []
    for records in recorder.search(call_id):
        found += records
    return call_history(call_id, found)


def test_a_call_is_told_from_its_arrival_to_its_end():
    recorder = FlightRecorder()
    record(recorder, *life(1), *life(2, "because", "batching"), *life(3))
    told = history(recorder, "c-2")
    assert (told["target"], told["goal_ms"], told["end"]["what"]) == ("f", 25.0, "in time")
    [step] = told["steps"]
    assert (step["slice"], step["batch"], step["took_ms"], step["why"]) == ("gpu0/1-2", 1, 2.9, "because")
    assert step["delay"] == "batching"


def test_a_rejection_keeps_its_reason_and_its_offer():
    recorder = FlightRecorder()
    record(recorder, (5, ev.CallArrived(call(7)), [do.Reject("c-7", "deadline", 10, 31_000, '{"rule":"deadline"}')]))
    end = history(recorder, "c-7")["end"]
    assert (end["what"], end["offer_ms"], end["why"]) == ("refused: deadline", 31.0, {"rule": "deadline"})


def test_a_batch_that_failed_says_so_and_its_next_try_follows():
    recorder = FlightRecorder()
    arrived, started, finished = life(1)
    record(recorder, arrived, started, (20, ev.BatchFailed(1, "oom"), []))
    record(recorder, (30, ev.Tick(), [do.StartBatch(9, "f", "i1", "gpu0", 1, started[2][0].jobs)]), finished)  # type: ignore[union-attr]
    steps = history(recorder, "c-1")["steps"]
    assert [step.get("error") for step in steps] == ["oom", None]


def test_an_id_that_begins_like_another_is_another():
    recorder = FlightRecorder()
    record(recorder, *life(0x12))
    assert "target" not in history(recorder, "c-1")


def test_what_is_unknown_has_no_target():
    assert history(FlightRecorder(), "c-1") == {"call": "c-1", "steps": []}


def test_steps_between_the_first_and_last_mention_of_a_call_are_found():
    """A batch that ends without a word about the call lies between blocks that name it."""
    recorder = FlightRecorder()
    arrived, started, _ = life(1)
    record(recorder, arrived, started)
    record(recorder, *(entry for number in range(2, 200) for entry in life(number)))
    record(recorder, (900_000, ev.BatchFinished(1, 777), []))
    record(recorder, *(entry for number in range(200, 400) for entry in life(number)))
    record(recorder, (990_000, ev.Tick(), [do.FailCall("c-1", "deadline", "f")]))
    told = history(recorder, "c-1")
    assert told["steps"][0]["took_ms"] == 0.777
    assert told["end"]["what"] == "failed: deadline"


@examples(50)
@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=60), st.integers(500, 20_000))
def test_it_never_holds_more_bytes_than_it_may(sizes: list[int], limit: int):
    recorder = FlightRecorder(limit)
    for number, size in enumerate(sizes):
        record(recorder, *life(number, "x" * size))
        recorder.pack()
        assert recorder.packed_bytes <= limit
    if sizes[-1] < limit // 4:
        assert "end" in history(recorder, f"c-{len(sizes) - 1:x}"), "the newest call is dropped last"


def test_records_from_elsewhere_are_bounded_too():
    recorder = FlightRecorder()
    for number in range(10 * BLOCK):
        recorder.add(EndRecord(number, f"x{number}", "refused", "deadline"))
        assert len(recorder.recent) < BLOCK


def test_batches_on_devices_of_many_units_are_recorded():
    """A machine of a hundred cores, or a device cut into percents: more units than an integer of msgpack has bits."""
    recorder = FlightRecorder()
    mask = (1 << 99) | (1 << 3)
    start = do.StartBatch(1, "f", "f-1", "cpu0", mask, (), 900)
    recorder.add(*records_of(5, ev.Tick(), [start]))
    recorder.pack()
    [(_, [record])] = recorder.blocks_after(0, 9)
    assert isinstance(record, StartRecord) and record.mask == mask
