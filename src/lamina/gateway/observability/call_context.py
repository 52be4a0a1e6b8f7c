"""Call context for workers: tenant and trace of the calls a function serves, and the spans it reports. Off, it costs nothing."""

from __future__ import annotations

from typing import Any

from lamina.core.actions import JobRef
from lamina.drivers.realtime import RealtimeDriver
from lamina.drivers.timer import clock_us
from lamina.engines.job_delivery import Origin
from lamina.gateway.observability.tracer import Tracer


def attach_call_context(loop: RealtimeDriver, traces: Tracer | None, *, has_tenants: bool) -> None:
    """Attach to every engine that runs functions in processes; an emulated one needs none."""
    if traces is None and not has_tenants:
        return
    runs = loop.controller.state.runs
    origin_us = clock_us() - loop.now_us()

    def origin(job: JobRef, batch_id: int) -> Origin:
        run = runs.get(job.call_id) if has_tenants else None
        return run.call.tenant if run is not None else "", traces.step_traceparent(job, batch_id) if traces is not None else ""

    engine: Any = loop.engine
    for part in getattr(engine, "parts", [engine]):
        if hasattr(part, "origin"):
            part.origin = origin
            if traces is not None:
                part.on_spans = lambda batch_id, spans: traces.add_user_spans(batch_id, spans, origin_us)
