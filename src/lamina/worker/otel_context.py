"""OpenTelemetry context: spans of a function that brings OpenTelemetry itself become part of its call's trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lamina.sdk.context import BatchContext

_NOTHING: AbstractContextManager[None] = nullcontext()


def attach_trace(context: BatchContext) -> AbstractContextManager[None]:
    """Attach the call's trace context; a no-op unless the function has loaded OpenTelemetry and its call is traced."""
    if "opentelemetry" not in sys.modules or not context.traceparent:
        return _NOTHING
    return _attached(context.traceparent)


@contextmanager
def _attached(traceparent: str) -> Iterator[None]:
    from opentelemetry import context as current
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = current.attach(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        current.detach(token)
