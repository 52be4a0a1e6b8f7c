"""Tracer: a call and its steps as spans in the client's own trace."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.core.actions import FailCall, JobRef, Reject, Reply, StartBatch
from lamina.core.events import BatchFinished, InstanceLost, JobOutcome, Tick
from lamina.gateway.observability.tracer import Span, Tracer, parse_traceparent
from lamina.sdk.spans import InnerSpan

HEADER = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def started(batch_id: int, *calls: str) -> StartBatch:
    jobs = tuple(JobRef(number, call, 0, "resize") for number, call in enumerate(calls))
    return StartBatch(batch_id, "resize", "resize-1", "gpu0", 0b11, jobs, 900)


@pytest.fixture
def spans() -> list[Span]:
    return []


@pytest.fixture
def traces(spans: list[Span]) -> Tracer:
    return Tracer(spans.append, seed=1)


def test_a_step_hangs_below_its_call_and_the_call_below_the_caller(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "thumbnail", 100, HEADER)
    traces.on_event(200, Tick(), [started(1, "c1")])
    traces.on_event(1200, BatchFinished(1, 1000), [Reply("c1", 1100, late=False)])
    step, call = spans
    assert (call.trace_id, call.parent_id, call.begin_us, call.end_us) == (TRACE, CALLER, 100, 1200)
    assert (step.trace_id, step.parent_id, step.begin_us, step.end_us) == (TRACE, call.span_id, 200, 1200)


def test_a_booked_batch_begins_when_the_device_began_it(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "thumbnail", 0, HEADER)
    traces.on_event(200, Tick(), [started(1, "c1")])
    traces.on_event(5000, BatchFinished(1, 1000), [])
    assert spans[0].begin_us == 4000


def test_calls_batched_together_get_a_span_each_in_their_own_traces(traces: Tracer, spans: list[Span]) -> None:
    other = HEADER.replace(b"0af7", b"0af8")
    traces.start("c1", "thumbnail", 0, HEADER)
    traces.start("c2", "thumbnail", 0, other)
    traces.on_event(1, Tick(), [started(1, "c1", "c2", "untraced")])
    traces.on_event(9, BatchFinished(1, 5), [])
    assert len({span.trace_id for span in spans}) == len(spans) == 2


def test_a_job_that_failed_says_what_was_raised(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "thumbnail", 0, HEADER)
    traces.on_event(1, Tick(), [started(1, "c1")])
    traces.on_event(
        9, BatchFinished(1, 5, (JobOutcome(False, "function-failed", "KeyError"),)), [FailCall("c1", "function-failed")]
    )
    assert [span.error for span in spans] == ["KeyError", "function-failed"]


def test_a_lost_worker_ends_the_spans_of_its_batches(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "thumbnail", 0, HEADER)
    traces.on_event(1, Tick(), [started(1, "c1")])
    traces.on_event(9, InstanceLost("resize-1"), [])
    assert [(span.name, span.error) for span in spans] == [("resize", "worker-lost")]


def test_a_refusal_is_a_span_with_its_reason(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "thumbnail", 0, HEADER)
    traces.on_event(3, Tick(), [Reject("c1", "deadline")])
    assert spans[0].error == "refused: deadline"


def test_the_caller_decides_whether_it_is_traced(traces: Tracer) -> None:
    always = Tracer(lambda span: None, ratio=1.0)
    assert not always.start("c1", "f", 0, HEADER[:-1] + b"0")
    assert always.start("c2", "f", 0, b"")
    assert not traces.start("c3", "f", 0, b"")


def test_what_a_step_does_carries_the_span_of_that_step(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "f", 0, HEADER)
    batch = started(1, "c1")
    carried = parse_traceparent(traces.step_traceparent(batch.jobs[0], 1).encode())
    traces.on_event(3, Tick(), [batch])
    traces.on_event(9, BatchFinished(1, 5), [Reply("c1", 3, late=False)])
    assert carried is not None
    assert (carried.trace_id, carried.span_id) == (TRACE, spans[0].span_id)
    assert traces.step_traceparent(batch.jobs[0], 2) == ""


def test_parts_hang_below_their_step_and_below_each_other_in_every_trace_of_the_batch(traces: Tracer, spans: list[Span]) -> None:
    traces.start("c1", "f", 0, HEADER)
    traces.start("c2", "f", 0, HEADER.replace(b"0af7", b"0af8"))
    batch = started(1, "c1", "c2", "untraced")
    for job in batch.jobs:
        traces.step_traceparent(job, 1)
    traces.on_event(3, Tick(), [batch])
    traces.add_user_spans(
        1, [InnerSpan("decode", 1010, 1050, -1, {"bytes": 7}), InnerSpan("inflate", 1020, 1030, 0, {}, "KeyError")], 1000
    )
    traces.on_event(90, BatchFinished(1, 80), [])
    outer, inner, _, _, step, _ = spans
    assert (outer.name, outer.parent_id, outer.begin_us, outer.end_us, outer.attributes) == (
        *("decode", step.span_id, 10, 50),
        {"bytes": 7},
    )
    assert (inner.parent_id, inner.error, inner.trace_id) == (outer.span_id, "KeyError", TRACE)
    assert {span.trace_id for span in spans} == {TRACE, spans[2].trace_id} and len(spans) == 6


def test_steps_that_end_after_their_calls_leave_nothing_behind(traces: Tracer) -> None:
    traces.start("c1", "f", 0, HEADER)
    batch = started(1, "c1")
    traces.step_traceparent(batch.jobs[0], 1)
    traces.on_event(3, Tick(), [batch])
    traces.on_event(5, Tick(), [FailCall("c1", "deadline")])
    traces.on_event(9, BatchFinished(1, 5), [])
    assert not traces._batches and not traces._steps


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"nonsense",
        b"01" + HEADER[2:],
        HEADER + b"-x",
        HEADER.upper(),
        b"00-" + b"0" * 32 + HEADER[35:],
        HEADER[:36] + b"0" * 16 + b"-01",
    ],
)
def test_a_header_that_makes_no_sense_is_no_parent(header: bytes) -> None:
    assert parse_traceparent(header) is None


def test_spans_reach_an_exporter_with_their_ids_and_times() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from lamina.gateway.observability.otel_exporter import OtelExporter

    kept = InMemorySpanExporter()
    otel = OtelExporter("", "shop", loop_now_us=0, exporter=kept)
    traces = Tracer(otel.export, seed=1)
    traces.start("c1", "thumbnail", 100, HEADER)
    traces.on_event(400, Tick(), [Reply("c1", 300, late=True)])
    otel._processor.force_flush()
    (span,) = kept.get_finished_spans()
    otel.close()
    context: Any = span.get_span_context()
    assert (context.trace_id, span.parent.span_id, span.end_time - span.start_time) == (TRACE, CALLER, 300_000)
    assert span.attributes["lamina.late"] is True
    assert span.resource.attributes["service.name"] == "shop"
