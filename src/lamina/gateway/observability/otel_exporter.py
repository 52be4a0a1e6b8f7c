"""Exporter of spans to an OpenTelemetry collector, over OTLP/HTTP. Batching, retries and backpressure are the SDK's own."""

from __future__ import annotations

import time
from typing import Any

from lamina import __version__
from lamina.errors import BadValue
from lamina.gateway.observability.tracer import Span


class OtelExporter:
    """`export` takes a span on the loop's thread and returns at once; a thread of the SDK sends it."""

    def __init__(self, endpoint: str, app: str, loop_now_us: int, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError:
            raise BadValue("--otlp: OpenTelemetry is not installed", hint="pip install 'lamina[otel]'") from None
        self._processor = BatchSpanProcessor(exporter or _http(endpoint))
        self._resource = Resource.create({"service.name": app, "service.version": __version__})
        self._scope = InstrumentationScope("lamina", __version__)
        self._epoch_ns = time.time_ns() - loop_now_us * 1000

    def export(self, span: Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        context = SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=sampled)
        parent = (
            SpanContext(span.trace_id, span.parent_id, is_remote=span.is_call, trace_flags=sampled) if span.parent_id else None
        )
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind.SERVER if span.is_call else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
                start_time=self._epoch_ns + span.begin_us * 1000,
                end_time=self._epoch_ns + span.end_us * 1000,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Flush what is waiting, then stop."""
        self._processor.shutdown()


def _http(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)
