"""Trace spans inside a batch: `with lamina.context().span("decode"):`.

They are kept in a list while the batch runs and travel with its results; the exporter of the step's span hangs them below it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from msgspec import Struct

MAX_SPANS = 256
"""Of one batch; what comes after is not kept."""

MAX_CHARS = 1_000

Attribute = bool | int | float | str


class InnerSpan(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A span inside a step. Times are on the machine's monotonic clock."""

    name: str
    begin_us: int
    end_us: int
    parent: int = -1  #: its place in the list; -1: the step itself
    attributes: dict[str, Attribute] = {}
    error: str = ""


_parent_span: ContextVar[int] = ContextVar("lamina_span", default=-1)


@contextmanager
def record_span(spans: list[InnerSpan], name: str, attributes: dict[str, Any]) -> Iterator[None]:
    if len(spans) >= MAX_SPANS:
        yield
        return
    place, parent, begin_us = len(spans), _parent_span.get(), now_us()
    spans.append(InnerSpan(name, begin_us, begin_us, parent))  # so that those inside find their place behind it
    token = _parent_span.set(place)
    error = ""
    try:
        yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        _parent_span.reset(token)
        spans[place] = InnerSpan(name[:MAX_CHARS], begin_us, now_us(), parent, _plain(attributes), error)


def now_us() -> int:
    return time.monotonic_ns() // 1000


def _plain(attributes: dict[str, Any]) -> dict[str, Attribute]:
    return {key: value if isinstance(value, bool | int | float) else str(value)[:MAX_CHARS] for key, value in attributes.items()}
